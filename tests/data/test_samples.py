"""The frozen sample set: whole or not there, the same for everyone, checked when it is used."""

import os
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from filelock import FileLock

from dap_bench import UserError
from dap_bench.data.samplers import non_balanced
from dap_bench.data.samples import _held, frozen
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
    assert len(list((tmp_path / "samples").iterdir())) == 1
    assert not list(tmp_path.glob(".*.lock"))


def test_waiting_for_another_process_is_said(tmp_path, caplog):
    begun = threading.Event()

    def other():
        with FileLock(tmp_path / "lock"):
            begun.set()
            time.sleep(1.5)

    holder = threading.Thread(target=other)
    holder.start()
    assert begun.wait(20)
    with _held(FileLock(tmp_path / "lock")):
        holder.join()
    assert "another process is drawing these images" in caplog.text
    caplog.clear()
    with _held(FileLock(tmp_path / "lock")):  # it was released
        assert caplog.text == ""


@pytest.mark.parametrize("harm", ["cut", "swap", "memory"])
def test_a_damaged_cache_is_drawn_again(tmp_path, harm, caplog):
    digest = draw(tmp_path).digest
    path = folder(tmp_path)
    if harm == "cut":
        (path / "samples.parquet").write_bytes((path / "samples.parquet").read_bytes()[:5000])
    elif harm == "swap":
        other = draw(tmp_path / "other", n=21).folder
        (path / "samples.parquet").write_bytes((other / "samples.parquet").read_bytes())
    else:
        (memory,) = (tmp_path / "draws").iterdir()
        memory.write_text("{")
    again = draw(tmp_path)
    assert again.digest == digest
    assert len(again.read(range(20))) == 20
    assert ("damaged and is drawn again" in caplog.text) == (harm != "memory")


def test_changed_image_bytes_are_noticed_when_read(tmp_path):
    samples = draw(tmp_path)
    path = samples.folder / "samples.parquet"
    content = bytearray(path.read_bytes())
    at = content.find(b"P6\n224 224")
    content[at + 1000] ^= 255
    path.write_bytes(bytes(content))
    with pytest.raises(UserError, match="was removed or damaged \\(shapes-0-.* is not what was drawn\\); repeat"):
        draw(tmp_path).read(range(20))
    assert len(draw(tmp_path).read(range(20))) == 20  # which helps


def test_a_cache_that_is_removed_in_mid_run_is_a_sentence(tmp_path):
    samples = draw(tmp_path)
    shutil.rmtree(samples.folder)
    with pytest.raises(UserError, match="was removed or damaged .*repeat the same command to draw it again"):
        samples.read([0])
    assert draw(tmp_path).digest == samples.digest


def test_a_failure_while_drawing_leaves_nothing_behind(tmp_path):
    class Broken(Shapes):
        def fetch(self, positions):
            yield from super().fetch(positions[:5])
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        draw(tmp_path, source=Broken(size=200))
    assert not list((tmp_path / "samples").iterdir())


def test_a_draft_of_a_killed_process_is_removed_by_the_next(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    draft = tmp_path / "samples" / f".{os.uname().nodename}.{dead.pid}.0a1b2c3d.tmp"
    draft.mkdir(parents=True)
    (draft / "samples.parquet").write_bytes(b"half")
    draw(tmp_path)
    assert not draft.exists()


def test_a_cache_that_may_only_be_read_is_used_if_it_has_the_set(tmp_path, monkeypatch):
    digest = draw(tmp_path).digest

    class Moved(Shapes):
        """The same images from a source that is not known yet."""

        def identity(self):
            return {"kind": "moved"}

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("dap_bench.data.samples.FileLock", refuse)
    assert draw(tmp_path).digest == digest
    assert draw(tmp_path, source=Moved(size=200)).folder == tmp_path / "samples" / digest
    with pytest.raises(UserError, match="cannot be written .*Permission denied.* set cache_dir=FOLDER"):
        draw(tmp_path, n=21, source=Moved(size=200))


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


@pytest.mark.parametrize("names", [["a", "a#2", "a", "b"], ["a", "a", "a#1", "b"], ["a", "a", "a", "a#2"]])
def test_no_image_is_lost_by_its_name(tmp_path, names):
    class Named(Shapes):
        def fetch(self, positions):
            return (Record(names[position], 0, str(position).encode()) for position in positions)

    samples = draw(tmp_path, n=4, source=Named(size=4))
    assert len(set(samples.ids)) == 4
    assert [data for data, _ in samples.read(range(4))] == [b"0", b"1", b"2", b"3"]


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written .* set cache_dir=FOLDER"):
        draw(tmp_path / "file")
