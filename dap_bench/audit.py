"""Check a method before a reviewer does: dap-bench audit method=my_method.norms

One method gives a line per check, several methods a line each. dap_bench/checks.py says what is measured and what
passes. The exit code is 1 if a map is not finite, most maps are constant, or maps depend on the batch or change from
call to call: rows would then be meaningless. Everything else is reported for you to judge.
"""

import platform
import re
import shlex
import sys
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any

from omegaconf import OmegaConf
from tqdm import tqdm

from dap_bench import files
from dap_bench.checks import HARD, LEGEND, QUESTIONS, Check, Subject, Yardstick, audit
from dap_bench.command import Device, command, grouped
from dap_bench.config import choices, compose, load_method, load_source, load_vit
from dap_bench.data.images import FORMATS, BadImage, decode
from dap_bench.data.samplers import non_balanced
from dap_bench.data.sources.base import Record
from dap_bench.errors import UserError, path, require_int
from dap_bench.isolation import Given
from dap_bench.report.markdown import table

WIDTH = 100  # columns of a terminal
MARKS = {"pass": "", "note": "?", "fail": "!"}


@command(others=r"(method|model|data)\.\w+=.*")
def main(
    *others: Annotated[str, "method.KEY=VALUE of a single method, model.KEY=VALUE, data.KEY=VALUE"],
    method: Annotated[str, "methods A,B of conf/method, functions (my_method.norms), or all"] = "",
    model: Annotated[str, "a model of conf/model or any timm tag; model.checkpoint=FILE: local weights"] = "vit_shapes",
    data: Annotated[str, "data source, with its options: data=parquet data.path=FOLDER"] = "shapes",
    image: Annotated[str, "use photos A,B instead, or a folder of them"] = "",
    n: Annotated[int, "how many images"] = 8,
    device: Device = "auto",
    out: Annotated[Path | None, "FILE.md to write the page to as well; pages of other audits in it are kept"] = None,
) -> int:
    import torch

    if not method:
        raise UserError(f"name a method to audit: method=NAME, one of {', '.join(choices('method'))}, or method=all.")
    require_int("n", n)
    options = grouped(others, "method", "model", "data")
    names = _complete() if method == "all" else method.split(",")
    if len(names) > 1 and options["method"]:
        raise UserError(f"method.{next(iter(options['method']))} is an option of one method; name only one.")
    methods = {name: load_method(name, **options["method"]) for name in names}
    vit = load_vit(model, device=device, **options["model"])
    records = _photos(image, n) if image else _drawn(data, options["data"], n)
    given, runner_up = _given(vit, records)

    pages: dict[str, list[Check] | str] = {}
    with tqdm(total=len(QUESTIONS) * len(methods), unit=" checks", dynamic_ncols=True, leave=False) as bar:
        bar.set_description("forward pass")
        yardstick = Yardstick.of(vit, given)
        for number, (name, explain) in enumerate(methods.items()):

            def tick(check: str, name: str = name, number: int = number) -> None:
                bar.set_description(f"{name} {check}")
                bar.update(len(QUESTIONS) * number + list(QUESTIONS).index(check) - bar.n)

            try:
                pages[name] = audit(Subject(explain, vit, given, runner_up, yardstick), tick)
            except UserError as error:
                if len(methods) == 1:
                    raise
                pages[name] = str(error)
    subject = ", ".join(names) if len(names) < 4 else f"{len(names)} methods"
    title = f"Audit of {subject} on {model}"
    where = f"{len(records)} images" + ("" if image else f" (data={data})")
    versions = f"torch {torch.__version__.split('+')[0]} on {given.images.device.type}, {platform.machine()}"
    print(f"{title}: {where}\n\n{_terminal(pages)}\n\n{_end(pages)}")
    if out:
        asked = shlex.join(["python", "-m", "dap_bench.audit", *sys.argv[1:]])
        head = f"`{asked}`\n\n{where}; {versions}.\n\n"
        _write(out, title, f"{head}{_markdown(pages)}\n\n{_end(pages)}\n")
        print(f"wrote {out}")
    return 1 if any(isinstance(checks, str) or _failed(checks) for checks in pages.values()) else 0


def _complete() -> list[str]:
    """The methods that need no more than their YAML says."""
    return [name for name in choices("method") if not OmegaConf.missing_keys(compose(f"method={name}").method)]


# ---------------------------------------------------------------------- images


def _drawn(data: str, options: dict[str, Any], n: int) -> list[Record]:
    """Images of a source, drawn as a benchmark run draws them."""
    source = load_source(data, **options)
    return list(source.fetch(non_balanced(source.labels(), n, seed=0)))


def _photos(image: str, n: int) -> list[Record]:
    """The first n images of a folder, or of a list of files."""
    found = [path("image", text) for text in image.split(",")]
    if len(found) == 1 and found[0].is_dir():
        found = sorted(file for file in found[0].iterdir() if file.suffix.lower() in FORMATS and file.is_file())
        if not found:
            raise UserError(f"image={image} holds no image ({', '.join(FORMATS)}).")
    try:
        return [Record(file.name, -1, file.read_bytes()) for file in found[:n]]
    except OSError as error:
        raise UserError(f"image={error.filename} cannot be read ({error.strerror}).") from error


def _given(vit: Any, records: list[Record]) -> tuple[Given, Any]:
    """The images as the model takes them with its best class for each, and the second best."""
    import torch

    try:
        images = torch.stack([decode(record.data, vit.transform) for record in records]).to(vit.device)
        masks = [decode(record.mask, vit.mask) if record.mask else None for record in records]
    except BadImage as error:
        raise UserError(f"{error}; name other images.") from error
    best = vit.score(images).topk(2).indices.clone()
    return Given(images, best[:, 0], [record.id for record in records], masks), best[:, 1]


# ---------------------------------------------------------------------- pages


def _terminal(pages: dict[str, list[Check] | str]) -> str:
    """A table of at most 100 columns: a line per check of one method, or a line per method."""
    (first, *more) = pages.values()
    if more or isinstance(first, str):
        import pandas as pd

        rows = {name: _cells(checks, "{value}{mark}") for name, checks in pages.items()}
        shown = pd.DataFrame.from_dict(rows, orient="index", columns=list(QUESTIONS)).to_string(line_width=WIDTH)
        return "\n".join(line.rstrip(" \\") for line in shown.splitlines())
    widths = [max(len(getattr(check, key)) for check in first) for key in ("name", "value", "verdict")]
    lines = []
    for check in first:
        start = "  ".join(
            f"{text:<{width}}" for text, width in zip((check.name, check.value, check.verdict), widths, strict=True)
        )
        text, *rest = wrap(check.says, WIDTH - len(start) - 2)
        lines += [f"{start}  {text}", *(" " * (len(start) + 2) + line for line in rest)]
    return "\n".join(lines)


def _markdown(pages: dict[str, list[Check] | str]) -> str:
    (first, *more) = pages.values()
    if not more and not isinstance(first, str):
        rows = [[check.name, check.value, check.verdict, check.says] for check in first]
        return table(["check", "measured", "verdict", "what it means"], rows).rstrip()
    bold = {"pass": "{value}", "note": "*{value}*", "fail": "**{value}**"}
    rows = [[name, *_cells(checks, bold)] for name, checks in pages.items()]
    legend = [f"* {name}: {text}" for name, text in LEGEND.items()]
    return "\n".join([table(["method", *QUESTIONS], rows), *legend])


def _cells(checks: list[Check] | str, form: str | dict[str, str]) -> list[str]:
    """A method's values, marked by their verdicts; dashes for one that cannot explain the images."""
    if isinstance(checks, str):
        return ["-"] * len(QUESTIONS)
    forms = form if isinstance(form, dict) else dict.fromkeys(MARKS, form)
    return [forms[check.verdict].format(value=check.value, mark=MARKS[check.verdict]) for check in checks]


def _end(pages: dict[str, list[Check] | str]) -> str:
    """What the marks mean and who fails."""
    lines = []
    if len(pages) > 1:
        lines.append("A value that fails is bold (! in the terminal), one to think about is in italics (?).")
    for name, checks in pages.items():
        if isinstance(checks, str):
            lines.append(f"{name} was not measured: {' '.join(checks.split())}")
    bad = {name: _failed(checks) for name, checks in pages.items() if not isinstance(checks, str)}
    said = [f"{name} ({', '.join(which)})" for name, which in bad.items() if which]
    hard = ", ".join(HARD[:-1]) + f" and {HARD[-1]}"
    lines.append(f"Failed: {'; '.join(said)}." if said else f"No hard check failed: {hard} are in order.")
    return "\n\n".join(lines)


def _failed(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if check.verdict == "fail"]


def _write(file: Path, title: str, text: str) -> None:
    """Put a page into a file, in the place of the page of the same title, or after those of other titles."""
    try:
        old = file.read_text(encoding="utf-8") if file.is_file() else ""
    except (OSError, ValueError) as error:
        raise UserError(f"out={file} is not a text file ({error}); name another file.") from error
    parts = re.split(r"(?m)^# (?=Audit of )", old)
    pages = {part.partition("\n")[0]: part for part in parts[1:]}
    pages[title] = f"{title}\n\n{text}"
    files.write_text(file, parts[0] + "\n".join(f"# {page.rstrip()}\n" for page in pages.values()))


if __name__ == "__main__":
    main()
