"""The frozen sample set: whole or not there, the same for everyone, checked when it is used."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from dap_bench import UserError
from dap_bench.data.samplers import non_balanced
from dap_bench.data.samples import frozen
from dap_bench.data.sources import Record, Shapes


def draw(cache, n=20, source=None, seed=0):
    return frozen(source or Shapes(size=200), partial(non_balanced, n=n, seed=seed), {"n": n, "seed": seed}, cache)


def folder(cache):
    return next(path for path in (cache / "samples").iterdir() if path.is_dir())


def test_it_holds_the_drawn_images(tmp_path):
    samples = draw(tmp_path)
    positions = non_balanced(Shapes(size=200).labels(), n=20, seed=0)
    assert samples.ids == [f"shapes-0-{position:06d}" for position in positions]
    expected = list(Shapes(size=200).fetch(positions))
    assert [data for data, _ in samples.read(range(20))] == [record.data for record in expected]
    assert [mask for _, mask in samples.read([19, 3])] == [expected[19].mask, expected[3].mask]


def test_it_is_drawn_once(tmp_path):
    first = draw(tmp_path)
    again = draw(tmp_path, source=Untouchable())
    assert again.digest == first.digest
    assert draw(tmp_path, seed=1).digest != first.digest


class Untouchable(Shapes):
    def __init__(self):
        super().__init__(size=200)

    def labels(self):
        pytest.fail("the source was read although the set is in the cache")


def test_two_processes_that_start_together_get_the_same_set(tmp_path):
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from test_samples import draw; print(draw(Path(sys.argv[1]), n=100).digest)"
    )
    start = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)]
    processes = [subprocess.Popen(start, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    digests = {process.communicate()[0].strip() for process in processes}
    assert digests == {draw(tmp_path / "another", n=100).digest}
    assert sorted(path.suffix for path in (tmp_path / "samples").iterdir()) == ["", ".lock"]


@pytest.mark.parametrize("harm", ["cut", "manifest", "swap", "missing"])
def test_a_damaged_cache_is_drawn_again(tmp_path, harm, caplog):
    digest = draw(tmp_path).digest
    path = folder(tmp_path)
    if harm == "cut":
        (path / "samples.parquet").write_bytes((path / "samples.parquet").read_bytes()[:5000])
    elif harm == "manifest":
        (path / "manifest.json").write_text("{")
    elif harm == "swap":
        other = draw(tmp_path / "other", n=21).folder
        (path / "samples.parquet").write_bytes((other / "samples.parquet").read_bytes())
    else:
        (path / "manifest.json").unlink()
    again = draw(tmp_path)
    assert again.digest == digest
    assert len(again.read(range(20))) == 20
    assert "damaged and is drawn again" in caplog.text


def test_changed_image_bytes_are_noticed_when_read(tmp_path):
    samples = draw(tmp_path)
    path = samples.folder / "samples.parquet"
    content = bytearray(path.read_bytes())
    at = content.find(b"P6\n224 224")
    content[at + 1000] ^= 255
    path.write_bytes(bytes(content))
    with pytest.raises(UserError, match="is damaged at shapes-0-.*; delete that folder and run again"):
        draw(tmp_path).read(range(20))


def test_a_failure_while_drawing_leaves_nothing_behind(tmp_path):
    class Broken(Shapes):
        def fetch(self, positions):
            yield from super().fetch(positions[:5])
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        draw(tmp_path, source=Broken(size=200))
    assert [path.suffix for path in (tmp_path / "samples").iterdir()] == [".lock"]


def test_masks_are_part_of_the_set(tmp_path):
    class Masked(Shapes):
        def __init__(self, mask):
            super().__init__(size=30)
            self.mask = mask

        def identity(self):
            return {"mask": str(self.mask)}

        def fetch(self, positions):
            return (Record(str(position), 0, b"same", self.mask) for position in positions)

    digests = {draw(tmp_path, n=3, source=Masked(mask)).digest for mask in (None, b"one", b"two")}
    assert len(digests) == 3


def test_images_with_one_name_stay_apart(tmp_path):
    class SameNames(Shapes):
        def fetch(self, positions):
            for position in positions:
                yield Record("same.png", 0, str(position).encode())

    samples = draw(tmp_path, n=3, source=SameNames(size=3))
    assert samples.ids == ["same.png", "same.png#1", "same.png#2"]


def test_the_manifest_says_where_the_set_comes_from(tmp_path):
    samples = draw(tmp_path)
    manifest = json.loads((samples.folder / "manifest.json").read_text())
    assert {key: manifest["source"][key] for key in ("kind", "size", "seed")} == {
        "kind": "shapes",
        "size": 200,
        "seed": 0,
    }
    assert (manifest["n"], manifest["digest"], manifest["version"]) == (20, samples.digest, 2)


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written .* set cache_dir=FOLDER"):
        draw(tmp_path / "file")
