"""Where images come from: one file per kind of source.

source.identity()            which images these are, as plain data; it changes when they may have changed
source.labels()              one label per position, read without touching an image
source.fetch(positions)      the records at increasing positions, in that order
"""

from dap_bench.data.sources.base import Record, Source
from dap_bench.data.sources.hub import Hub
from dap_bench.data.sources.imagefolder import ImageFolder
from dap_bench.data.sources.parquet import Parquet
from dap_bench.data.sources.shapes import Shapes

__all__ = ["Hub", "ImageFolder", "Parquet", "Record", "Shapes", "Source"]
