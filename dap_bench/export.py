"""Export the sampled images as files and tensors, with both classes, so that another program can make maps.

    dap-bench export out=FOLDER model=vit_t sampler.n=100

    OUT/samples.csv              id, label, predicted, alternative, confidence, image, tensor
    OUT/images/<id>.png          the image
    OUT/tensors/<id>.npy         [3,H,W] as it enters the model

Score the maps with `python -m dap_bench method=maps method.path=FOLDER` and the same arguments.
"""

import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from tqdm import tqdm

from dap_bench import config, files
from dap_bench.command import command
from dap_bench.errors import UserError

COLUMNS = ("id", "label", "predicted", "alternative", "confidence", "image", "tensor")


def export(out: Path, overrides: Sequence[str]) -> Path:
    """Write the samples of a run as files, with both classes of each.

    Args:
        out: The folder to write to.
        overrides: Options of a run, as on the command line: "model=vit_t", "sampler.n=100".

    Returns:
        The list of samples, OUT/samples.csv.

    Raises:
        UserError: If an option is wrong, an id cannot be a file name, or a file cannot be written.
    """
    import numpy as np
    import torch

    from dap_bench.data.images import BadImage, decode
    from dap_bench.evaluation import Evaluation
    from dap_bench.metrics.base import Batch
    from dap_bench.runner import sample_set

    cfg = config.compose(*overrides)
    samples = sample_set(cfg)
    vit = config.instantiate(cfg.model, device=cfg.device, precision=cfg.precision)
    nothing: Any = lambda *_: None  # noqa: E731  is explained here
    evaluation = Evaluation(vit, nothing, {})
    rows: list[dict[str, Any]] = []
    for index, name in enumerate(tqdm(samples.ids, "exporting", unit=" images", file=sys.stderr)):
        ((data, _),) = samples.read([index])
        loaded = evaluation.load(data, None)
        if isinstance(loaded, BadImage):
            print(f"{name} is left out: {loaded}", file=sys.stderr)
            continue
        picture = out / "images" / f"{_inside(name)}.png"
        tensor = out / "tensors" / f"{_inside(name)}.npy"
        with files.replacing(picture) as draft, draft.open("wb") as file:
            decode(data).save(file, "PNG")
        with files.replacing(tensor) as draft, draft.open("wb") as file:
            np.save(file, loaded[0].numpy())
        batch = Batch.of(vit, nothing, torch.stack([loaded[0].to(vit.device)]))
        classes = {"predicted": batch.predicted.item(), "alternative": batch.alternative.item()}
        where = {"image": picture.relative_to(out).as_posix(), "tensor": tensor.relative_to(out).as_posix()}
        rows.append(
            {"id": name, "label": samples.labels[index], **classes, "confidence": batch.confidence.item(), **where}
        )
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    files.write_text(out / "samples.csv", text.getvalue())
    return out / "samples.csv"


def _inside(name: str) -> str:
    if ".." in Path(name).parts or Path(name).is_absolute():
        raise UserError(f"the id {name!r} cannot be a file name; rename that image.")
    return name


@command()
def main(
    *overrides: Annotated[str, "options of a run: model=... sampler=... data=..."],
    out: Annotated[Path, "the folder to write to"],
) -> None:
    print(f"wrote {export(out, overrides)}")


if __name__ == "__main__":
    main()
