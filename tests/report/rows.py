"""Cells with known values."""

from dap_bench import __version__
from dap_bench.store import Cell


def cell(folder, method, values, better="lower", labels=None, more=(), **columns):
    """A cell of deletion; metrics in `more` have the same values below zero, unless a column is given."""
    names = {"model": "vit_t", "method": method, "sampler": "balanced", "data": "toy"}
    made = Cell.at(folder, names, "f")
    info = {
        **names,
        "n": len(values),
        "metrics": {"deletion": better, **dict.fromkeys(more, "higher")},
        "fingerprint": "f",
        "identity": {"versions": {"dap-bench": __version__}},
    }
    config = {"cache_dir": str(folder / "nowhere"), "method": {}}
    extra = {"class_names": ["</script><b>cat", "dog"], "command": f"python -m dap_bench method={method}"}
    made.describe({**info, **extra, "config": config})
    rows = []
    for at, value in enumerate(values):
        kept = {name: column[at] for name, column in columns.items()}
        base = {"sample_id": f"s{at}", "label": labels[at] if labels else 0, "predicted": 1, "confidence": 0.5}
        rows.append({**base, "fallback": False, **names, "status": "ok", "deletion": value, **kept})
        for name in more:
            rows[-1].setdefault(name, -value)
    made.write(rows, ["deletion", *more])
