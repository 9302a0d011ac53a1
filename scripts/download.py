"""How fast do images come from the Hub? python scripts/download.py pause=0.05 rate=8

A Hub on this machine (that of the tests) waits before every answer and gives each connection so many MiB a second; from
it one image of each row group is drawn, with one request at a time and with as many as the program makes.
"""

import io
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq

from dap_bench.command import command
from dap_bench.report.markdown import line, table

TESTS = Path(__file__).parents[1] / "tests" / "data"
FILES, GROUPS, IMAGES, SIZE = 8, 12, 16, 2**16  # files, row groups in a file, images in a row group, bytes of an image
CLIENT = """
import re, sys, time
from dap_bench.data.sources import Hub, hub
hub.THREADS = int(sys.argv[1]) or hub.THREADS
source = Hub("some/images", "train", cache_dir=sys.argv[2])
source.files
start = time.monotonic()
labels = source.labels()
middle = time.monotonic()
count = sum(1 for _ in source.fetch(range(0, len(labels), int(sys.argv[3]))))
end = time.monotonic()
memory = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024
print(count, middle - start, end - middle, memory)
"""


@command()
def main(
    pause: Annotated[float, "seconds before every answer"] = 0.05,
    rate: Annotated[float, "MiB a second for each connection"] = 8,
) -> None:
    sys.path.insert(0, str(TESTS))
    from hub_server import TOKEN, HubServer

    names = [f"data/train-{number:05d}-of-{FILES:05d}.parquet" for number in range(FILES)]
    header = ["requests at a time", "labels (s)", "images (s)", "MiB a second"]
    print(table([*header, "to the Hub", "to the storage", "MiB of memory"], []), end="")
    with HubServer() as server:
        server.pause, server.rate = pause, rate * 2**20
        files = {name: shard(number) for number, name in enumerate(names)}
        server.publish("some/images", {"README.md": b"---\nlicense: other\n---\n", **files})
        times = []
        for threads in (1, 0):
            with tempfile.TemporaryDirectory() as home:
                environment = {**os.environ, "HF_ENDPOINT": server.endpoint, "HF_HOME": home, "HF_TOKEN": TOKEN}
                server.recover()
                done = subprocess.run(
                    [sys.executable, "-c", CLIENT, str(threads), home, str(IMAGES)],
                    env=environment,
                    capture_output=True,
                    text=True,
                )
            if done.returncode:
                sys.exit(done.stderr)
            count, labels, images, memory = map(float, done.stdout.split()[-4:])
            times.append((labels, images))
            size = count * IMAGES * SIZE / 2**20
            asked = [sum(server.requests(kind).values()) for kind in ("resolve", "storage")]
            row = [
                threads or "default",
                f"{labels:.1f}",
                f"{images:.1f}",
                f"{size / images:.1f}",
                *asked,
                f"{memory:.0f}",
            ]
            print(line(row), end="", flush=True)
    (label, image), (labels, images) = times
    print(f"\nlabels {label / labels:.1f} times as fast, images {image / images:.1f} times")


def shard(number: int) -> bytes:
    chance, buffer = random.Random(number), io.BytesIO()
    rows = [{"bytes": chance.randbytes(SIZE), "path": f"{number}-{row}.jpg"} for row in range(GROUPS * IMAGES)]
    pq.write_table(pa.table({"image": rows, "label": list(range(len(rows)))}), buffer, row_group_size=IMAGES)
    return buffer.getvalue()


if __name__ == "__main__":
    main()
