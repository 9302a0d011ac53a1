"""Rows -> statistics -> tables. Nothing here computes anything about a model: rows are the truth."""
