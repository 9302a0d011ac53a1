"""Streaming from the Hub for real: the real clients, in a process of their own, and a Hub on this machine.

Only the waits before a repeated request are left out.
"""

import io
import os
import random
from concurrent.futures import ProcessPoolExecutor
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import LIMITED, NEWCOMER, TOKEN, HubServer

from dap_bench.data.samples import frozen
from dap_bench.data.sources import Hub, Record
from dap_bench.data.sources.hub import INSTEAD
from dap_bench.errors import UserError

SHARDS, ROWS, GROUP = 3, 12, 4  # shards, images in a shard, images in a row group
FILES = [f"data/train-{number:05d}-of-{SHARDS:05d}.parquet" for number in range(SHARDS)]
DRAWN = [1, 2, 9, 29]
GROUPS = [{0, 2}, set(), {1}]  # the row groups of each shard in which they lie
AGAIN = "; repeat the same command."
NUMBERS, WAITS = count(), []


def image(position):
    return {"bytes": random.Random(position).randbytes(20_000), "path": f"img{position}.JPEG"}


def label(position):
    return position % 5


def shard(first):
    """A shard of ImageNet's schema. Its footer holds the names of all classes, as ImageNet's does, and is large."""
    rows = range(first, first + ROWS)
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"image": pa.array(map(image, rows), kind), "label": list(map(label, rows))})
    names = repr([f"class {number} of ImageNet, also called by other names" for number in range(1000)])
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({"huggingface": names}), buffer, row_group_size=GROUP)
    return buffer.getvalue()


LABELS = [label(position) for position in range(SHARDS * ROWS)]
RECORDS = [Record(image(position)["path"], label(position), image(position)["bytes"]) for position in DRAWN]


def chunks(content, column):
    """Where a column lies in a shard: the first byte and the end, by row group."""
    metadata, found = pq.read_metadata(io.BytesIO(content)), []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        parts = [group.column(at) for at in range(group.num_columns)]
        parts = [part for part in parts if part.path_in_schema.split(".")[0] == column]
        start = min(part.dictionary_page_offset or part.data_page_offset for part in parts)
        found.append((start, start + sum(part.total_compressed_size for part in parts)))
    return found


def touched(ranges, spans):
    """The numbers of the spans of which at least a byte lies in a range."""
    return {
        number for number, (first, last) in enumerate(spans) for start, end in ranges if start < last and first < end
    }


def begin():
    """In the clients' process: note waits instead of waiting."""
    from huggingface_hub.utils import _http

    from dap_bench import hub

    hub.time = _http.time = SimpleNamespace(sleep=WAITS.append)


def draw(repo, cache, positions, token):
    """In the clients' process: the labels, the records at `positions`, and the waits this would have taken."""
    os.environ["HF_TOKEN"] = token
    WAITS.clear()
    source = Hub(repo, "train", cache_dir=cache)
    return source.labels(), list(source.fetch(positions)), list(WAITS)


def freeze(repo, cache):
    """In the clients' process: the sample set, frozen."""
    os.environ["HF_TOKEN"] = TOKEN
    return frozen(Hub(repo, "train", cache_dir=cache), lambda _: DRAWN, {"positions": DRAWN}, Path(cache))


def environment(endpoint, home):
    """What the clients start with: our Hub, and nothing of the user's Hugging Face settings or proxies."""
    names = [name for name in os.environ if not name.startswith(("HF_", "HUGGING"))]
    kept = {name: os.environ[name] for name in names if not name.lower().endswith("_proxy")}
    return {**kept, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_UPDATE_DOWNLOAD_COUNTS": "0"}


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """The server, and a function that calls another one in the clients' process."""
    with HubServer() as server, ProcessPoolExecutor(1, get_context("spawn"), begin) as pool:
        with patch.dict(os.environ, environment(server.endpoint, tmp_path_factory.mktemp("home")), clear=True):
            pool.submit(int).result()  # the process starts now
        yield server, lambda *call: pool.submit(*call).result()


@pytest.fixture(scope="module")
def files():
    return {
        "README.md": b"---\nlicense: other\n---\n",
        "data/validation-00000-of-00001.parquet": shard(SHARDS * ROWS),
        **{file: shard(number * ROWS) for number, file in enumerate(FILES)},
    }


class Dataset:
    """A dataset of its own on the Hub, with a cache of its own."""

    def __init__(self, server, call, files, cache):
        self.server, self.call, self.files, self.cache = server, call, dict(files), cache
        self.repo = f"ILSVRC/imagenet-{next(NUMBERS)}"
        self.publish()

    def publish(self, **changed):
        self.server.publish(self.repo, {**self.files, **changed})
        self.server.recover()

    def draw(self, positions=DRAWN, token=TOKEN):
        return self.call(draw, self.repo, str(self.cache), positions, token)

    def freeze(self):
        return self.call(freeze, self.repo, str(self.cache))

    def kept(self):
        """Everything in the cache but locks."""
        return [path for path in self.cache.rglob("*") if path.is_file() and path.suffix != ".lock"]

    def failure(self, call):
        """What the user reads when `call` fails: one line."""
        with pytest.raises(UserError) as caught:
            call()
        assert "\n" not in str(caught.value)
        return str(caught.value)


@pytest.fixture
def dataset(running, files, tmp_path):
    return Dataset(*running, files, tmp_path / "cache")


def test_labels_are_read_without_an_image_and_then_only_the_row_groups_drawn(dataset):
    labels, records, _ = dataset.draw([])
    assert (labels, records) == (LABELS, [])
    for file in FILES:
        content, ranges = dataset.files[file], dataset.server.ranges(file)
        assert touched(ranges, chunks(content, "label")) == {0, 1, 2}
        assert touched(ranges, chunks(content, "image")) == set()
    dataset.server.recover()
    labels, records, _ = dataset.draw()  # a second source: it finds the labels in the cache
    assert (labels, records) == (LABELS, RECORDS)
    for file, groups in zip(FILES, GROUPS, strict=True):
        content, ranges = dataset.files[file], dataset.server.ranges(file)
        assert touched(ranges, chunks(content, "label")) == set()
        assert touched(ranges, chunks(content, "image")) == groups
        footer = len(content) - chunks(content, "label")[-1][1]
        images = sum(end - start for at, (start, end) in enumerate(chunks(content, "image")) if at in groups)
        assert dataset.server.served(file) <= images + 2 * footer * len(groups)


def test_the_token_goes_to_the_hub_and_not_to_the_storage(dataset):
    dataset.draw()
    tokens = {(answer.kind == "storage", answer.token) for answer in dataset.server.log}
    assert tokens == {(True, None), (False, TOKEN)}


@pytest.mark.parametrize(
    ("token", "published", "words"),
    [
        ("", True, "is gated: accept its terms on https://huggingface.co/datasets/ILSVRC/imagenet-"),
        (NEWCOMER, True, "is gated: accept its terms on https://huggingface.co/datasets/ILSVRC/imagenet-"),
        ("", False, "is not visible to you: log in with `hf auth login`"),
        (TOKEN, False, "is not visible to you: log in with `hf auth login`"),
        ("hf_that_expired", True, "does not let your token read"),
        (LIMITED, True, "Please enable access to public gated repositories"),
    ],
)
def test_a_refusal_is_asked_for_once_and_says_what_to_do(dataset, token, published, words):
    if not published:
        del dataset.server.datasets[dataset.repo]
    sentence = dataset.failure(lambda: dataset.draw(token=token))
    assert words in sentence
    assert "hf auth login" in sentence
    assert sentence.endswith(INSTEAD)
    assert len(dataset.server.log) == 1
    assert dataset.kept() == []
    dataset.publish()
    assert dataset.draw()[1] == RECORDS


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_in_the_middle_is_not_repeated(dataset, status):
    dataset.server.fail("resolve", status, file="data/")
    sentence = dataset.failure(dataset.draw)
    assert sentence.startswith(f"hf://datasets/{dataset.repo}@")
    assert f"{status} " in sentence
    assert sentence.endswith(AGAIN)
    assert set(dataset.server.requests("resolve").values()) == {1, 2}  # the README is asked about before it is read
    assert dataset.kept() == []


TWICE = [
    *[("auth-check", what, "") for what in (429, 500, 503, "drop")],
    *[("revision", what, "") for what in (429, 503, "drop", "short")],
    *[("tree", what, "") for what in (429, 503, "drop", "short")],
    *[("resolve", what, "README.md") for what in (503, "drop")],
    *[("resolve", what, "data/") for what in (429, 500, 503, "drop")],
    *[("storage", what, "") for what in (429, 500, 503, "drop", "short", "whole")],
]


@pytest.mark.parametrize(("kind", "what", "file"), TWICE)
def test_what_fails_twice_succeeds_by_itself(dataset, kind, what, file):
    dataset.server.fail(kind, what, times=2, file=file)
    labels, records, waits = dataset.draw()
    assert dataset.server.fault.times == 0
    assert (labels, records) == (LABELS, RECORDS)
    assert waits
    if what == 429 and kind not in ("auth-check", "revision"):
        assert 8 in waits  # as the Hub asks, and a second more


@pytest.mark.parametrize("what", [429, 500, 503, "drop", "short", "whole"])
def test_images_that_fail_twice_succeed_by_themselves(dataset, what):
    dataset.draw([])
    dataset.server.fail("storage", what, times=2)
    assert dataset.draw()[:2] == (LABELS, RECORDS)
    assert dataset.server.fault.times == 0


FOR_EVER = [
    *[("auth-check", what, "", "cannot be reached") for what in (429, 503, "drop")],
    *[("revision", what, "", "cannot be opened") for what in (503, "drop", "short")],
    *[("tree", what, "", "cannot be opened") for what in (503, "drop", "short")],
    ("resolve", 503, "README.md", "cannot be opened"),
    *[("resolve", what, "data/", "cannot be read from the Hugging Face Hub") for what in (429, 503, "drop")],
    *[("storage", what, "", "cannot be read from the Hugging Face Hub") for what in (429, 500, "drop")],
    *[("storage", what, "", "arrived damaged or cut short") for what in ("short", "whole")],
]


@pytest.mark.parametrize(("kind", "what", "file", "words"), FOR_EVER)
def test_what_fails_for_ever_is_a_sentence_and_leaves_nothing(dataset, kind, what, file, words):
    dataset.server.fail(kind, what, file=file)
    sentence = dataset.failure(dataset.draw)
    assert words in sentence
    assert "repeat the same command" in sentence
    assert sentence.endswith((INSTEAD, AGAIN, "data.revision=COMMIT."))
    assert max(dataset.server.requests().values()) <= 18
    assert dataset.kept() == []
    dataset.server.recover()
    assert dataset.draw()[:2] == (LABELS, RECORDS)


def cut(content):
    return content[:-20]


def garbled(content):
    """The length of the footer and the last letters are right, the rest of it is noise."""
    return content[:-50_000] + random.Random(0).randbytes(50_000 - 8) + content[-8:]


def holed(content):
    """Shorter than its own footer says."""
    return content[:4] + content[30_000:]


@pytest.mark.parametrize("harm", [cut, garbled, holed])
def test_a_damaged_file_on_the_hub_is_named(dataset, harm):
    dataset.publish(**{FILES[1]: harm(dataset.files[FILES[1]])})
    sentence = dataset.failure(dataset.draw)
    assert sentence.startswith(f"hf://datasets/{dataset.repo}@{dataset.server.commits[dataset.repo]}/{FILES[1]} ")
    assert "arrived damaged or cut short" in sentence
    assert sentence.endswith("data.revision=COMMIT.")
    assert dataset.kept() == []
    dataset.publish()
    assert dataset.draw()[:2] == (LABELS, RECORDS)


def test_a_file_of_another_schema_is_named_at_once(dataset):
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": ["a"]}), buffer)
    dataset.publish(**{FILES[1]: buffer.getvalue()})
    sentence = dataset.failure(dataset.draw)
    assert f"/{FILES[1]} has columns (text: string), expected image {{bytes: binary, path: string}} and an" in sentence
    assert "Hugging Face" not in sentence


@pytest.mark.parametrize("what", [503, "drop", "short"])
def test_a_sample_set_is_whole_or_not_there(dataset, what):
    dataset.server.fail("storage", what, file=FILES[0])
    dataset.failure(dataset.freeze)
    assert dataset.kept() == []  # the labels did not arrive
    dataset.server.recover()
    dataset.draw([])
    (labels,) = dataset.kept()
    dataset.server.fail("storage", what, file=FILES[2])
    dataset.failure(dataset.freeze)
    assert dataset.server.served(FILES[0]) > 0  # it failed in the middle
    assert dataset.kept() == [labels]
    dataset.server.recover()
    samples = dataset.freeze()
    assert samples.ids == [record.id for record in RECORDS]
    assert samples.labels == [record.label for record in RECORDS]
    assert samples.read(range(len(samples))) == [(record.data, None) for record in RECORDS]
    dataset.server.recover()
    assert dataset.freeze().digest == samples.digest
    assert dataset.server.log == []  # a frozen set needs no Hub
