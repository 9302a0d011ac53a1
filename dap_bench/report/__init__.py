"""Rows -> statistics -> tables. Nothing here computes anything about a model: rows are the truth."""

from dap_bench.report.summary import summarize

__all__ = ["summarize"]
