"""Sources: labels without images, the right bytes for each position, one sentence for bad input."""

import io
import os
import shutil
import subprocess
import sys
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dap_bench import UserError
from dap_bench.data.samplers import non_balanced
from dap_bench.data.samples import frozen
from dap_bench.data.sources import Hub, ImageFolder, Parquet, Shapes
from dap_bench.data.sources.base import encode

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def picture(value):
    buffer = io.BytesIO()
    Image.new("RGB", (20, 10), (value, value, value)).save(buffer, "PNG")
    return buffer.getvalue()


def shard(path, values, group=2):
    images = [{"bytes": picture(value), "path": f"img{value}.png"} for value in values]
    table = pa.table({"image": pa.array(images, IMAGE), "label": [value % 5 for value in values]})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=group)


@pytest.fixture
def shards(tmp_path):
    shard(tmp_path / "shards" / "train-00000-of-00002.parquet", [3, 4, 5])
    shard(tmp_path / "shards" / "train-00001-of-00002.parquet", [6, 7, 8, 9])
    return tmp_path / "shards"


@pytest.fixture
def read(monkeypatch):
    """What is read of Parquet files: row groups and columns."""
    found = []
    groups, batches = pq.ParquetFile.read_row_group, pq.ParquetFile.iter_batches

    def read_row_group(self, number, columns, **options):
        found.append((number, *columns))
        return groups(self, number, columns, **options)

    def iter_batches(self, size, row_groups, columns, **options):
        found.extend((number, *columns) for number in row_groups)
        return batches(self, size, row_groups, columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", read_row_group)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    return found


def test_parquet_positions_run_over_all_files(shards):
    source = Parquet(str(shards))
    assert source.labels() == [3, 4, 0, 1, 2, 3, 4]
    records = list(source.fetch([0, 2, 3, 6]))
    assert [record.id for record in records] == ["img3.png", "img5.png", "img6.png", "img9.png"]
    assert [record.label for record in records] == [3, 0, 1, 4]
    assert records[2].data == picture(6)


def test_parquet_reads_only_the_row_groups_it_needs(shards, read):
    source = Parquet(str(shards))
    source.labels()
    assert read == [(0, "label"), (1, "label"), (0, "label"), (1, "label")]
    read.clear()
    list(source.fetch([3, 4]))
    assert read == [(0, "image")]


def test_parquet_takes_a_file_a_pattern_or_a_split(shards):
    shard(shards / "validation-00000-of-00001.parquet", [1])
    assert len(Parquet(str(shards / "train-00000-of-00002.parquet")).labels()) == 3
    assert len(Parquet(str(shards / "train-*.parquet")).labels()) == 7
    assert Parquet(str(shards), split="validation").labels() == [1]
    with pytest.raises(UserError, match=r"several splits; choose one with data.split=train\|validation"):
        Parquet(str(shards)).labels()
    with pytest.raises(UserError, match="data.split=test is not in .*; it has train, validation"):
        Parquet(str(shards), split="test").labels()


def test_boxes_become_masks(shards):
    (shards / "boxes.csv").write_text("path,x0,y0,x1,y1\nimg4.png,2,3,6,8\nimg4.png,15,0,20,2\n")
    first, second = Parquet(str(shards), boxes=str(shards / "boxes.csv")).fetch([0, 1])
    assert first.mask is None
    mask = Image.open(io.BytesIO(second.mask))
    assert mask.size == (20, 10)
    assert sum(value == 255 for value in mask.tobytes()) == 4 * 5 + 5 * 2
    assert (mask.getpixel((2, 3)), mask.getpixel((6, 3)), mask.getpixel((19, 1))) == (255, 0, 255)


def test_masks_are_turned_as_their_images_are(tmp_path):
    from dap_bench.data.images import decode

    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.new("RGB", (20, 10)).save(buffer, "JPEG", exif=exif)
    table = pa.table({"image": pa.array([{"bytes": buffer.getvalue(), "path": "a.jpg"}], IMAGE), "label": [0]})
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "boxes.csv").write_text("path,x0,y0,x1,y1\na.jpg,0,0,5,10\n")  # the left quarter as stored
    (record,) = Parquet(str(tmp_path / "a.parquet"), boxes=str(tmp_path / "boxes.csv")).fetch([0])
    mask = decode(record.mask)
    assert mask.size == decode(record.data).size == (10, 20)
    assert (mask.getpixel((5, 2)), mask.getpixel((5, 10))) == ((255,) * 3, (0,) * 3)  # the upper quarter


def test_shards_without_a_split_in_their_names(tmp_path):
    for number in range(2):
        shard(tmp_path / f"{number:04d}.parquet", [number])
    assert Parquet(str(tmp_path)).labels() == [0, 1]


@pytest.mark.parametrize("struct", [False, True])
def test_a_column_of_masks(tmp_path, struct):
    """Grey ones have the object where they are not 0, ImageNet-S' colours where red + 256 green is a class."""
    grey, colours = np.zeros((6, 8), np.uint8), np.zeros((6, 8, 3), np.uint8)
    grey[1:3, 2:5] = 7
    colours[0, :3] = (44, 1, 0)  # class 300
    colours[1, :3] = (1000 % 256, 1000 // 256, 0)  # nobody has looked
    stored = [encode(Image.fromarray(grey), "PNG"), encode(Image.fromarray(colours), "PNG"), None]
    column = [None if mask is None else {"bytes": mask, "path": "m"} for mask in stored] if struct else stored
    picture = encode(Image.new("RGB", (8, 6), (200, 10, 10)), "PNG")
    images = [{"bytes": picture, "path": f"{at}.png"} for at in range(3)]
    pq.write_table(pa.table({"image": images, "label": [0, 1, 2], "mask": column}), tmp_path / "a.parquet")
    one, two, three = Parquet(str(tmp_path / "a.parquet")).fetch([0, 1, 2])
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(one.mask))) == 255, grey > 0)
    expected = np.zeros((6, 8), bool)
    expected[0, :3] = True
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(two.mask))) == 255, expected)
    assert three.mask is None
    pq.write_table(pa.table({"image": images, "label": [0, 1, 2], "mask": [1, 2, 3]}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match="column mask of int64; expected encoded pictures"):
        Parquet(str(tmp_path / "b.parquet")).labels()


def test_other_boxes_are_another_source(shards):
    for name, edge in (("a", 5), ("b", 6)):
        (shards / f"{name}.csv").write_text(f"path,x0,y0,x1,y1\nimg4.png,0,0,{edge},5\n")
    one, two = (Parquet(str(shards), boxes=str(shards / f"{name}.csv")).identity() for name in "ab")
    assert one != two


def _drawn(source, cache):
    return frozen(source, partial(non_balanced, n=3, seed=0), {"n": 3}, cache)


@pytest.mark.parametrize("what", ["labels", "images"])
def test_what_is_changed_in_place_is_noticed(shards, tmp_path, what):
    """Same name, same size, same time: only the content differs."""
    source = Parquet(str(shards))
    before = _drawn(source, tmp_path)
    file = shards / "train-00001-of-00002.parquet"
    found = file.stat()
    if what == "labels":
        table = pq.read_table(file)
        pq.write_table(table.set_column(1, "label", [[4, 3, 2, 1]]), file, row_group_size=2)
    else:
        file.write_bytes(file.read_bytes().replace(b"IHDR", b"IHDX"))
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (found.st_size, found.st_mtime_ns)
    assert _drawn(Parquet(str(shards)), tmp_path).digest != before.digest


def test_an_image_file_changed_in_place_is_noticed(tmp_path):
    for name in "abc":
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "x.png").write_bytes(picture(1))
    before = _drawn(ImageFolder(str(tmp_path / "images")), tmp_path)
    file = tmp_path / "images" / "b" / "x.png"
    found = file.stat()
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert _drawn(ImageFolder(str(tmp_path / "images")), tmp_path).digest != before.digest


def test_the_same_images_elsewhere_are_the_same_set(shards, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(shards, elsewhere)
    one, two = (_drawn(Parquet(str(folder)), tmp_path) for folder in (shards, elsewhere))
    assert (one.digest, one.folder) == (two.digest, two.folder)


def test_bad_parquet_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="holds no Parquet file"):
        Parquet(str(tmp_path / "nowhere")).labels()
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(UserError, match=r"other.parquet has columns \(a: int64\), expected image \{bytes: "):
        Parquet(str(tmp_path / "other.parquet")).labels()
    shard(tmp_path / "cut.parquet", [1, 2, 3])
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "cut.parquet").read_bytes()[:-20])
    with pytest.raises(UserError, match=r"cut.parquet cannot be read as Parquet: it is damaged or cut short"):
        Parquet(str(tmp_path / "cut.parquet")).labels()


BAD_TABLES = {
    "text": ({"bytes": "text", "path": "a"}, pa.struct([("bytes", pa.string()), ("path", pa.string())]), [1], "binary"),
    "null": ({"bytes": b"x", "path": "a"}, IMAGE, pa.array([None], pa.int64()), "images without a label"),
    "negative": ({"bytes": b"x", "path": "a"}, IMAGE, [-1], "images without a label"),
    "huge": ({"bytes": b"x", "path": "a"}, IMAGE, pa.array([2**63 + 5], pa.uint64()), "not class numbers"),
}


@pytest.mark.parametrize("kind", BAD_TABLES)
def test_labels_and_bytes_that_are_none_are_a_sentence(tmp_path, kind):
    image, struct, labels, words = BAD_TABLES[kind]
    pq.write_table(pa.table({"image": pa.array([image], struct), "label": labels}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=words):
        Parquet(str(tmp_path / "a.parquet")).labels()


def test_two_columns_of_one_name_are_a_sentence(tmp_path):
    image = pa.array([{"bytes": b"x", "path": "a"}], IMAGE)
    pq.write_table(pa.Table.from_arrays([image, [1], [2]], ["image", "label", "label"]), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="has two columns called label"):
        Parquet(str(tmp_path / "a.parquet")).labels()


def test_names_that_are_no_text_are_a_sentence(tmp_path):
    bad = pa.StructArray.from_arrays(
        [pa.array([b"x"]), pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"]).buffers())], ["bytes", "path"]
    )
    pq.write_table(pa.table({"image": bad, "label": [1]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="not UTF-8"):
        list(Parquet(str(tmp_path / "a.parquet")).fetch([0]))
    folder = os.fsencode(tmp_path) + b"/images/cat"
    os.makedirs(folder)
    with open(folder + b"/\xff.png", "wb") as file:
        file.write(picture(1))
    with pytest.raises(UserError, match="rename it in printable characters"):
        ImageFolder(str(tmp_path / "images")).labels()


BOMB = """
import resource, sys
from dap_bench.data.sources import Parquet
from dap_bench.errors import UserError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    print(sum(len(record.data) for record in Parquet(sys.argv[1]).fetch(range(8))))
except UserError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.parametrize("kind", [pytest.param("large", marks=pytest.mark.slow), "repeated", "rows"])
def test_a_small_parquet_file_cannot_fill_the_memory(tmp_path, kind):
    file = tmp_path / "bomb.parquet"
    if kind == "rows":
        rows = 40_000_000
        nothing = [pa.nulls(rows, pa.binary()), pa.nulls(rows, pa.string())]
        image = pa.StructArray.from_arrays(nothing, ["bytes", "path"])
        pq.write_table(pa.table({"image": image, "label": pa.repeat(1, rows)}), file, row_group_size=rows)
    else:
        count, size = (2, 400 * 2**20) if kind == "large" else (40, 12 * 2**20)
        image = pa.array([{"bytes": bytes(size), "path": "a"}], IMAGE).take(pa.array([0] * count))
        pq.write_table(pa.table({"image": image, "label": [0] * count}), file, compression="zstd")
    out = subprocess.run([sys.executable, "-c", BOMB, str(file)], capture_output=True, text=True)
    *said, grown = out.stdout.splitlines()
    assert int(grown) < 300, (said, grown)
    assert "not a file of images" in said[0] or kind == "repeated"


def test_a_pipe_is_not_waited_for(tmp_path):
    (tmp_path / "images" / "cat").mkdir(parents=True)
    os.mkfifo(tmp_path / "images" / "cat" / "a.png")
    os.mkfifo(tmp_path / "a.parquet")
    os.mkfifo(tmp_path / "boxes.csv")
    with pytest.raises(UserError, match="has no images"):
        ImageFolder(str(tmp_path / "images")).labels()
    with pytest.raises(UserError, match="holds no Parquet file"):
        Parquet(str(tmp_path / "a.parquet")).labels()
    with pytest.raises(UserError, match="is not a CSV"):
        Parquet(str(tmp_path / "a.parquet"), boxes=str(tmp_path / "boxes.csv"))._boxes  # noqa: B018


def test_damage_in_the_middle_of_a_shard_is_found_when_it_is_read(tmp_path):
    shard(tmp_path / "a.parquet", [1, 2, 3, 4], group=4)
    source = Parquet(str(tmp_path / "a.parquet"))
    source.labels()
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[4:40] = b"\xff" * 36
    (tmp_path / "a.parquet").write_bytes(bytes(data))
    with pytest.raises(UserError, match="a.parquet cannot be read: it is damaged or cut short"):
        list(source.fetch([0]))


def test_real_boxes(assets):
    boxes = str(assets / "imagenet" / "validation_boxes.csv")
    source = Parquet(str(assets / "imagenet"), split="validation", boxes=boxes)
    known = 0
    for record in source.fetch(range(60)):
        if len(source._boxes.get(record.id, ())) == 1:
            x0, y0, x1, y1 = (round(edge) for edge in source._boxes[record.id][0])
            mask = Image.open(io.BytesIO(record.mask))
            assert mask.size == Image.open(io.BytesIO(record.data)).size
            width, height = min(x1, mask.width) - max(0, x0), min(y1, mask.height) - max(0, y0)
            assert sum(value == 255 for value in mask.tobytes()) == width * height
            known += 1
    assert known > 20


def test_imagefolder(tmp_path):
    for name, value in (("cat/b.png", 2), ("cat/a.png", 1), ("dog/deep/c.png", 3), ("dog/notes.txt", 0)):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(value))
    source = ImageFolder(str(tmp_path))
    assert source.labels() == [0, 0, 1]
    assert [(r.id, r.label, r.data == picture(v)) for r, v in zip(source.fetch([0, 2]), (1, 3), strict=True)] == [
        ("cat/a.png", 0, True),
        ("dog/deep/c.png", 1, True),
    ]


def test_imagefolder_with_wordnet_names_has_imagenet_labels(tmp_path):
    for name in ("n01443537", "n02123045"):  # goldfish, tabby
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").write_bytes(picture(1))
    assert ImageFolder(str(tmp_path)).labels() == [1, 281]
    (tmp_path / "n99999999").mkdir()
    with pytest.raises(UserError, match="n99999999 is not one of the 1,000 classes"):
        ImageFolder(str(tmp_path)).labels()


def test_imagefolder_without_images(tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        ImageFolder(str(tmp_path / "nowhere")).labels()
    with pytest.raises(UserError, match="has no images in class folders"):
        ImageFolder(str(tmp_path)).labels()


def test_shapes_are_drawn_with_their_masks():
    (record,) = Shapes(size=100).fetch([7])
    assert record.id == "shapes-0-000007"
    assert Image.open(io.BytesIO(record.data)).size == Image.open(io.BytesIO(record.mask)).size == (224, 224)


def test_the_hub_out_of_reach_names_three_alternatives(monkeypatch):
    from huggingface_hub import HfApi

    def fail(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(HfApi, "auth_check", fail)
    with pytest.raises(UserError, match=r"cannot be reached.*data=parquet.*data=imagefolder.*data=shapes"):
        Hub("ILSVRC/imagenet-1k", "train").labels()


@pytest.mark.parametrize(
    ("kind", "words"), [("GatedRepoError", "accept its terms"), ("RepositoryNotFoundError", "hf auth login")]
)
def test_the_hub_without_a_token_says_what_to_do(monkeypatch, kind, words):
    from huggingface_hub import HfApi, errors

    def fail(*_, **__):
        raise getattr(errors, kind).__new__(getattr(errors, kind))

    monkeypatch.setattr(HfApi, "auth_check", fail)
    with pytest.raises(UserError, match=words):
        Hub("ILSVRC/imagenet-1k", "train").labels()
