"""Sources: labels without images, the right bytes for each position, one sentence for bad input."""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dap_bench import UserError
from dap_bench.data.sources import Hub, ImageFolder, Parquet, Shapes

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
    shard(tmp_path / "train-00000-of-00002.parquet", [3, 4, 5])
    shard(tmp_path / "train-00001-of-00002.parquet", [6, 7, 8, 9])
    return tmp_path


def test_parquet_positions_run_over_all_files(shards):
    source = Parquet(str(shards))
    assert source.labels() == [3, 4, 0, 1, 2, 3, 4]
    records = list(source.fetch([0, 2, 3, 6]))
    assert [record.id for record in records] == ["img3.png", "img5.png", "img6.png", "img9.png"]
    assert [record.label for record in records] == [3, 0, 1, 4]
    assert records[2].data == picture(6)


def test_parquet_reads_only_the_row_groups_it_needs(shards, monkeypatch):
    source, read = Parquet(str(shards)), []
    original = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda self, number, columns: (read.append((number, *columns)), original(self, number, columns))[1],
    )
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


def test_other_boxes_are_another_source(shards):
    for name, edge in (("a", 5), ("b", 6)):
        (shards / f"{name}.csv").write_text(f"path,x0,y0,x1,y1\nimg4.png,0,0,{edge},5\n")
    one, two = (Parquet(str(shards), boxes=str(shards / f"{name}.csv")).identity() for name in "ab")
    assert one != two


def test_identity_changes_with_the_content_and_not_with_the_folder(shards, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for file in shards.iterdir():
        (elsewhere / file.name).write_bytes(file.read_bytes())
    assert Parquet(str(shards)).identity() == Parquet(str(elsewhere)).identity()
    shard(elsewhere / "train-00001-of-00002.parquet", [6, 7])
    assert Parquet(str(shards)).identity() != Parquet(str(elsewhere)).identity()


def test_bad_parquet_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="holds no Parquet file"):
        Parquet(str(tmp_path / "nowhere")).labels()
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(UserError, match=r"other.parquet has columns \(a: int64\), expected image \{bytes, path\}"):
        Parquet(str(tmp_path / "other.parquet")).labels()
    shard(tmp_path / "cut.parquet", [1, 2, 3])
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "cut.parquet").read_bytes()[:-20])
    with pytest.raises(UserError, match=r"cut.parquet cannot be read as Parquet: it is damaged or cut short"):
        Parquet(str(tmp_path / "cut.parquet")).labels()


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


def test_streaming_reads_labels_once_and_then_only_the_row_groups_drawn(shards, tmp_path, monkeypatch, capsys):
    """The Hub's addresses replaced by local ones: everything else is the streamed path."""
    read = []
    original = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda self, number, columns: (read.append((number, *columns)), original(self, number, columns))[1],
    )
    addresses = sorted(f"file://{file}" for file in shards.glob("*.parquet"))
    monkeypatch.setattr(Hub, "files", addresses)
    source = Hub("some/dataset", "train", cache_dir=str(tmp_path / "cache"))
    assert source.labels() == [3, 4, 0, 1, 2, 3, 4]
    assert sorted(read) == [(0, "label"), (0, "label"), (1, "label"), (1, "label")]
    read.clear()
    again = Hub("some/dataset", "train", cache_dir=str(tmp_path / "cache"))
    assert [(r.id, r.label, r.data == picture(6)) for r in again.fetch([3])] == [("img6.png", 1, True)]
    assert read == [(0, "image")]
    size = pq.ParquetFile(shards / "train-00001-of-00002.parquet").metadata.row_group(0)
    expected = sum(size.column(at).total_compressed_size for at in range(size.num_columns)) / 2**20
    assert f"downloading 1 row groups, {expected:.1f} MiB" in capsys.readouterr().out
    (index,) = (tmp_path / "cache" / "labels").iterdir()
    index.write_bytes(b"damaged")
    assert Hub("some/dataset", "train", cache_dir=str(tmp_path / "cache")).labels() == [3, 4, 0, 1, 2, 3, 4]


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
