"""Streaming from the Hub for real: the real clients, in a process of their own, and a Hub on this machine.

Only the waits before a repeated request are left out.
"""

import gc
import io
import logging
import os
import random
import signal
import threading
import time
import weakref
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import LIMITED, NEWCOMER, TOKEN, HubServer

from dap_bench import hub
from dap_bench.data.samples import frozen
from dap_bench.data.sources import Hub, Record
from dap_bench.data.sources import hub as sources_hub
from dap_bench.data.sources.hub import AHEAD, INSTEAD, _in_order, _part
from dap_bench.data.sources.parquet import Group
from dap_bench.errors import UserError

SHARDS, ROWS, GROUP = 3, 12, 4  # shards, images in a shard, images in a row group
FILES = [f"data/train-{number:05d}-of-{SHARDS:05d}.parquet" for number in range(SHARDS)]
DRAWN = [1, 2, 9, 29]
GROUPS = [{0, 2}, set(), {1}]  # the row groups of each shard in which they lie
LABELLED = {(number, "labels") for number in range(SHARDS)}
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

    hub.time = _http.time = SimpleNamespace(sleep=WAITS.append, monotonic=time.monotonic)


def begin_hasty():
    """In another clients' process: lose patience after 0.6 seconds."""
    from huggingface_hub import constants

    begin()
    constants.HF_HUB_DOWNLOAD_TIMEOUT = 0.2


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
def server():
    with HubServer() as server:
        yield server


@contextmanager
def clients(server, home, begin):
    """A function that calls another one in a process of the clients."""
    with ProcessPoolExecutor(1, get_context("spawn"), begin) as pool:
        with patch.dict(os.environ, environment(server.endpoint, home), clear=True):
            pool.submit(int).result()  # the process starts now
        yield lambda *call: pool.submit(*call).result()


@pytest.fixture(scope="module")
def running(server, tmp_path_factory):
    with clients(server, tmp_path_factory.mktemp("home"), begin) as call:
        yield call


@pytest.fixture(scope="module")
def hasty(server, tmp_path_factory):
    with clients(server, tmp_path_factory.mktemp("home"), begin_hasty) as call:
        yield call


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

    def pieces(self):
        """The pieces of files in the cache: (number of the file, "labels" or the row)."""
        address = f"hf://datasets/{self.repo}@{self.server.commits[self.repo]}/"
        keys = {sha256((address + file).encode()).hexdigest()[:20]: number for number, file in enumerate(FILES)}
        split = [path.name.split("-") for path in (self.cache / "hub").glob("[!.]*")]
        return {(keys[key], int(name) if name.isdecimal() else name) for key, name in split}

    def images(self):
        """The row groups whose images were sent, as (number of the file, number of the row group)."""
        return sorted(found for answer in self.server.log for found in self.images_in(answer))

    def images_in(self, answer):
        if answer.kind != "storage":
            return []
        groups = touched([(answer.start, answer.end)], chunks(self.files[answer.file], "image"))
        return [(FILES.index(answer.file), group) for group in groups]

    def failure(self, call):
        """What the user reads when `call` fails: one line."""
        with pytest.raises(UserError) as caught:
            call()
        assert "\n" not in str(caught.value)
        return str(caught.value)


@pytest.fixture
def dataset(server, running, files, tmp_path):
    yield Dataset(server, running, files, tmp_path / "cache")
    server.meet, server.notice = None, lambda _: None


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
    assert dataset.pieces() == {(0, "labels"), (2, "labels")}
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
    assert dataset.pieces() == {(1, "labels"), (2, "labels")}
    dataset.server.recover()
    dataset.draw([])
    dataset.server.fail("storage", what, file=FILES[2])
    dataset.failure(dataset.freeze)
    assert dataset.pieces() == LABELLED | {(0, 1), (0, 2), (0, 9)}  # what has arrived
    assert {path.parent.name for path in dataset.kept()} == {"hub"}
    dataset.server.recover()
    samples = dataset.freeze()
    assert dataset.images() == [(2, 1)]  # what was missing
    assert samples.ids == [record.id for record in RECORDS]
    assert samples.labels == [record.label for record in RECORDS]
    assert samples.read(range(len(samples))) == [(record.data, None) for record in RECORDS]
    dataset.server.recover()
    assert dataset.freeze().digest == samples.digest
    assert dataset.server.log == []  # a frozen set needs no Hub


# ---------------------------------------------------------------------- several at a time, and only once


EVERY = range(SHARDS * ROWS)
EVERY_GROUP = [(number, group) for number in range(SHARDS) for group in range(ROWS // GROUP)]


def test_row_groups_are_asked_for_together_and_come_in_order(dataset):
    meeting = threading.Barrier(len(EVERY_GROUP))  # no images are sent before those of all row groups are asked for
    dataset.server.notice = lambda answer: dataset.images_in(answer) and meeting.wait(20)
    records = dataset.draw(EVERY)[1]
    assert not meeting.broken
    assert [(record.id, record.data) for record in records] == [
        (image(position)["path"], image(position)["bytes"]) for position in EVERY
    ]
    assert dataset.images() == EVERY_GROUP


def test_threads_do_not_run_far_ahead_of_who_reads():
    begun, release = [], threading.Event()

    def work(item):
        begun.append(item)
        assert item == 0 or release.wait(20)
        return -item

    results = _in_order(work, range(10 * AHEAD), 8)
    assert next(results) == 0
    assert len(begun) <= AHEAD
    release.set()
    assert list(results) == [-item for item in range(1, 10 * AHEAD)]


@pytest.mark.parametrize(("size", "most"), [(500, 1), (100, 1), (50, 3)])
def test_large_row_groups_are_fetched_by_fewer_threads(monkeypatch, tmp_path, size, most):
    monkeypatch.setattr(sources_hub, "MEMORY", 150)
    now, seen = set(), set()

    def obtain(group, rows, bar):
        now.add(group.number)
        seen.add(len(now))
        time.sleep(0.01)
        now.remove(group.number)
        return [group.number]

    source = Hub("some/dataset", "train", cache_dir=str(tmp_path))
    monkeypatch.setattr(source, "_obtain", obtain)
    wanted = [(Group("file", number, number, size, [0]), [0]) for number in range(20)]
    assert list(source._images(wanted)) == [[number] for number in range(20)]
    assert max(seen) <= most


def test_an_error_ends_the_threads_and_comes_in_its_turn():
    def work(item):
        if item == 3:
            raise UserError("no")
        return item

    results = _in_order(work, range(1000), 8)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(UserError, match="no"):
        next(results)
    assert not [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]


def test_the_bar_moves_by_what_a_row_group_has_and_no_more():
    moved = []
    bar = SimpleNamespace(update=moved.append, get_lock=threading.Lock)
    count = _part(bar, 100)
    for size in (30, 60, 60, 100):
        count(size)
    assert moved == [30, 60, 10, 0]


def test_the_hub_is_asked_once_where_the_bytes_of_a_file_lie(dataset):
    dataset.draw(EVERY)
    assert {file: dataset.server.requests("resolve")[file] for file in FILES} == dict.fromkeys(FILES, 1)


def test_a_place_that_is_no_longer_valid_is_asked_for_again(dataset):
    def expire(answer):
        """After the last labels of a file."""
        if answer.file == FILES[1] and 2 in touched([(answer.start, answer.end)], labels):
            dataset.server.fail("storage", 403, times=1, file=FILES[1])

    labels = chunks(dataset.files[FILES[1]], "label")
    dataset.server.notice = expire
    assert [record.id for record in dataset.draw(EVERY)[1]] == [image(position)["path"] for position in EVERY]
    assert dataset.server.fault.times == 0
    assert dataset.server.requests("resolve")[FILES[1]] == 1  # in the log that began when the place expired


def test_draws_share_what_they_share(dataset):
    dataset.draw([1, 2, 9])
    assert dataset.pieces() == LABELLED | {(0, 1), (0, 2), (0, 9)}
    dataset.server.recover()
    assert [record.id for record in dataset.draw([2, 9, 29])[1]] == ["img2.JPEG", "img9.JPEG", "img29.JPEG"]
    assert dataset.images() == [(2, 1)]
    dataset.server.recover()
    assert [record.id for record in dataset.draw([1, 3, 29])[1]] == ["img1.JPEG", "img3.JPEG", "img29.JPEG"]
    assert dataset.images() == [(0, 0)]  # for the one image of it that was not drawn before
    dataset.server.recover()
    dataset.draw([1, 2, 3, 9, 29])
    assert dataset.server.requests("storage") == {}


@pytest.mark.parametrize("harm", ["cut", "flip", "swap", "empty"])
def test_a_damaged_piece_is_fetched_again_and_no_other(dataset, harm):
    dataset.draw([1, 9, 29])
    one, other = (next((dataset.cache / "hub").glob(f"*-{row}")) for row in (9, 1))
    content = one.read_bytes()
    flipped = content[:5000] + bytes([content[5000] ^ 1]) + content[5001:]
    one.write_bytes({"cut": content[:-1], "flip": flipped, "swap": other.read_bytes(), "empty": b""}[harm])
    dataset.server.recover()
    records = dataset.draw([1, 9, 29])[1]
    assert [record.data for record in records] == [image(position)["bytes"] for position in (1, 9, 29)]
    assert dataset.images() == [(0, 2)]
    assert one.read_bytes() == content


def test_damaged_labels_of_a_file_are_read_again_and_no_others(dataset):
    dataset.draw([])
    damaged = sorted((dataset.cache / "hub").iterdir())[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    dataset.server.recover()
    assert dataset.draw([])[0] == LABELS
    assert len(dataset.server.requests("storage")) == 1


def test_what_is_kept_of_another_commit_is_not_taken(dataset):
    dataset.draw([1])
    dataset.publish(**{FILES[0]: shard(SHARDS * ROWS)})
    assert dataset.draw([1])[1][0].data == image(SHARDS * ROWS + 1)["bytes"]


def test_without_a_cache_nothing_is_kept(dataset):
    dataset.cache = ""
    assert dataset.draw()[:2] == (LABELS, RECORDS)


def test_two_processes_may_fetch_at_a_time(dataset, hasty):
    one, two = [1, 2, 9, 29], [2, 9, 13, 29]
    with ThreadPoolExecutor(2) as pool:
        found = [
            pool.submit(call, draw, dataset.repo, str(dataset.cache), positions, TOKEN)
            for call, positions in ((dataset.call, one), (hasty, two))
        ]
    for future, positions in zip(found, (one, two), strict=True):
        assert [record.data for record in future.result()[1]] == [image(position)["bytes"] for position in positions]
    assert dataset.pieces() == LABELLED | {(0, 1), (0, 2), (0, 9), (1, 1), (2, 5)}
    dataset.server.recover()
    dataset.draw(sorted({*one, *two}))
    assert dataset.server.requests("storage") == {}


def killed(dataset, home, answers, delay):
    """Fetch everything in a process that is killed `delay` seconds after so many answers of the storage."""
    process = get_context("spawn").Process(target=draw, args=(dataset.repo, str(dataset.cache), EVERY, TOKEN))
    left = iter(range(answers, -1, -1))

    def kill():
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)

    def notice(answer):
        if answer.kind == "storage" and next(left, None) == 0:
            threading.Timer(delay, kill).start()

    dataset.server.notice = notice
    with patch.dict(os.environ, environment(dataset.server.endpoint, home), clear=True):
        process.start()
    process.join()
    dataset.server.recover()
    dataset.server.notice = lambda _: None
    return process.exitcode


def resumed(dataset, home, answers, delay):
    """After a kill exactly what had not arrived is asked for."""
    code = killed(dataset, home, answers, delay)
    assert code in (-signal.SIGKILL, 0)
    kept = dataset.pieces()
    left = [
        (number, group)
        for number, group in EVERY_GROUP
        if not {(number, row) for row in range(group * GROUP, (group + 1) * GROUP)} <= kept
    ]
    assert [record.data for record in dataset.draw(EVERY)[1]] == [image(position)["bytes"] for position in EVERY]
    assert dataset.images() == left
    for number, file in enumerate(FILES):
        labels = touched(dataset.server.ranges(file), chunks(dataset.files[file], "label"))
        assert labels == (set() if (number, "labels") in kept else {0, 1, 2})
    assert not list((dataset.cache / "hub").glob(".*.tmp"))
    return code


def test_after_a_kill_only_what_is_missing_is_fetched(dataset, tmp_path):
    assert resumed(dataset, tmp_path / "home", 20, 0) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_after_a_kill_at_any_point_only_what_is_missing_is_fetched(dataset, tmp_path, seed):
    chance = random.Random(seed)
    resumed(dataset, tmp_path / "home", chance.randrange(26), chance.random() / 50)


# ---------------------------------------------------------------------- patience


SILENT = [
    *[(kind, what) for kind in ("auth-check", "resolve") for what in ("silence", "drip head")],  # without a body
    *[(kind, what) for kind in ("revision", "tree", "storage") for what in ("silence", "drip", "drip head")],
]


@pytest.mark.parametrize(("kind", "what"), SILENT)
def test_a_hub_that_sends_next_to_nothing_is_given_up(dataset, hasty, kind, what):
    dataset.call = hasty
    dataset.server.fail(kind, what, file="data/" if kind == "resolve" else "")
    start = time.monotonic()
    sentence = dataset.failure(dataset.draw)
    assert time.monotonic() - start < 15
    assert "The Hugging Face Hub has sent next to nothing for 0.6 seconds; repeat the same command" in sentence
    assert "HF_HUB_DOWNLOAD_TIMEOUT=1.2" in sentence
    assert dataset.kept() == []
    dataset.server.recover()
    assert dataset.draw()[:2] == (LABELS, RECORDS)


def test_images_that_drip_are_given_up_and_what_came_before_is_kept(dataset, hasty):
    dataset.call = hasty
    dataset.draw([1])
    dataset.server.fail("storage", "drip", file=FILES[2])
    sentence = dataset.failure(dataset.draw)
    assert "next to nothing" in sentence
    assert dataset.pieces() == LABELLED | {(0, 1), (0, 2), (0, 9)}


class Answered:
    """As much of an answer of the client as is listened to."""

    status_code, headers, has_redirect_location = 200, {}, False

    def iter_raw(self):
        yield from (b"12", b"345")


def test_what_arrives_is_counted_by_who_asked_and_not_kept_in_memory():
    answer, sizes = Answered(), []
    alive = weakref.ref(answer)
    hub._life.listen(answer)
    with hub.counting(sizes.append):
        assert b"".join(answer.iter_raw()) == b"12345"
    assert sizes == [2, 3]
    gc.disable()
    try:
        del answer
        assert alive() is None  # a row group each: they cannot wait for the garbage collector
    finally:
        gc.enable()


def test_the_hub_is_waited_for_when_it_says_so():
    answer = Answered()
    answer.status_code = 429
    hub._life.listen(answer)
    try:
        assert 290 < hub._life.last - time.monotonic() <= 300
    finally:
        hub._life.last = 0


def test_what_signs_an_address_is_not_in_the_messages_of_the_client():
    record = logging.LogRecord("x", 30, "", 0, "%s thrown", ("GET https://storage/a?X-Amz-Signature=abc",), None)
    assert hub._discreet(record)
    assert record.getMessage() == "GET https://storage/a?... thrown"
