"""Explain one photo with several methods, as a PNG.

For example: dap-bench explain image=cat.jpg model=vit_t method=dap,legrad,chefer
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

from dap_bench.command import Device, command, grouped
from dap_bench.config import load_method, load_vit
from dap_bench.errors import UserError
from dap_bench.report.layouts import label, paper_methods

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image
    from torch import Tensor

    from dap_bench.explainers.base import Explainer
    from dap_bench.vit import ViT


@command(others=r"(method|model)\.\w+=.*")
def main(
    *others: Annotated[str, "method.KEY=VALUE, an option of the chosen methods; model.KEY=VALUE"],
    image: Annotated[str, "the photo; by default a generated picture of shapes"] = "",
    model: Annotated[str, "a model of conf/model or any timm tag; model.checkpoint=FILE: local weights"] = "vit_t",
    method: Annotated[tuple[str, ...], "methods of conf/method, or functions: my_method.norms"] = paper_methods(),
    out: Annotated[Path, "the picture to write"] = Path("explanation.png"),
    device: Device = "auto",
) -> None:
    options = grouped(others, "method", "model")
    explainers = {name: load_method(name, **options["method"]) for name in method}
    explain(_load(model, device, options["model"]), explainers, image, out)


def explain(vit: "ViT", explainers: dict[str, "Explainer"], image: str, out: Path) -> None:
    """Write each explainer's heatmap for the top class and the runner-up, and print both with their probabilities.

    Args:
        vit: The model.
        explainers: Explainers by name.
        image: A file; without one ("") a picture of the bundled shapes is drawn.
        out: The PNG to write.

    Raises:
        UserError: If the picture cannot be read, a method does not work, or the PNG cannot be written.
    """
    from dap_bench.report.pictures import grid

    images = vit.transform(read(image))[None].to(vit.device)
    best = vit.score(images).softmax(1).topk(2)
    labels = best.indices[0].tolist()
    titles = [
        f"{vit.class_name(name)} ({probability:.1%})"
        for name, probability in zip(labels, best.values[0].tolist(), strict=True)
    ]
    print("\n".join(titles))
    rows = zip((fill(title, 24) for title in titles), heatmaps(vit, explainers, images, labels), strict=True)
    grid(colours(vit, images), list(rows), list(map(label, explainers)), out)
    print(f"wrote {out}")


def read(image: str) -> "Image.Image":
    """The picture in a file, upright and in RGB; without a file ("") one of the bundled shapes.

    Args:
        image: The file, or "".

    Returns:
        The picture.

    Raises:
        UserError: If the file cannot be read.
    """
    from dap_bench.data import shapes
    from dap_bench.data.images import BadImage, decode

    try:
        if image and not Path(image).expanduser().is_file():
            raise UserError(f"image={image} cannot be read: there is no such file.")
        return decode(Path(image).expanduser().read_bytes()) if image else shapes.draw(0)[0]
    except OSError as error:
        raise UserError(f"image={image} cannot be read ({error.strerror}).") from error
    except BadImage as error:
        raise UserError(f"image={image}: {error}.") from error


def colours(vit: "ViT", images: "Tensor") -> "np.ndarray":
    """The first of some images as one would look at it.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W].

    Returns:
        The picture [H,W,3] in 0..1.
    """
    return vit.pixels(images)[0].permute(1, 2, 0).cpu().numpy()


def heatmaps(
    vit: "ViT", explainers: dict[str, "Explainer"], images: "Tensor", labels: Sequence[int]
) -> list[list["np.ndarray"]]:
    """What explainers say of an image.

    Args:
        vit: The model; explainers work on a copy.
        explainers: Explainers by name.
        images: One normalised image [1,3,H,W].
        labels: The classes to explain.

    Returns:
        For each class and each explainer a heatmap [H,W] in 0..1.
    """
    import torch

    from dap_bench.isolation import copied, explained

    twin = copied(vit)

    def of(explain: "Explainer", label: int) -> "np.ndarray":
        found = explained(explain, twin, images, torch.tensor([label]))
        return found.heatmaps(vit.image_size)[0].float().cpu().numpy()

    with twin.shared_traces():
        return [[of(explain, label) for explain in explainers.values()] for label in labels]


def _load(model: str, device: str, options: dict[str, Any]) -> "ViT":
    """The model, or the bundled one where its weights are out of reach."""
    try:
        return load_vit(model, device=device, **options)
    except UserError as error:
        if "Hugging Face" not in str(error):
            raise
        print(f"{error}\nUsing the bundled vit_shapes instead, which knows only drawn shapes.", file=sys.stderr)
        return load_vit("vit_shapes", device=device)


if __name__ == "__main__":
    main()
