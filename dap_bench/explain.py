"""python -m dap_bench.explain image=cat.jpg method=dap,legrad: one photo, some explainers, one PNG."""

import sys
from pathlib import Path
from textwrap import fill
from typing import Any

import yaml

from dap_bench.config import load_method, load_vit
from dap_bench.errors import UserError
from dap_bench.report.command import answer, with_folders

USAGE = """Explain what a ViT sees in one photo.

  python -m dap_bench.explain image=cat.jpg model=vit_t method=dap,legrad,chefer

  image=FILE         the photo; without one a picture of the embedded `shapes` is drawn
  model=NAME         a model of conf/model or any timm tag (vit_t); model.checkpoint=FILE for local weights
  method=A,B,...     explainers (ar,attr,chefer,gmar,gradcam,cdam,agcam,legrad,dap), or functions: my_method.norms
  method.KEY=VALUE   an option of the explainers named
  --config-dir DIR   configs of your own
  out=FILE           the picture to write (explanation.png)
  device=auto        auto | cpu | cuda | mps
"""
DEFAULTS = {
    "image": "",
    "model": "vit_t",
    "method": "ar,attr,chefer,gmar,gradcam,cdam,agcam,legrad,dap",
    "out": "explanation.png",
    "device": "auto",
}


def main(arguments: list[str]) -> None:
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return
    options, model_options, method_options = _parse(with_folders(arguments))
    sys.path.append(str(Path.cwd()))  # where a function of one's own is
    explainers = {name: load_method(name, **method_options) for name in options["method"].split(",")}
    vit = _load(options["model"], options["device"], model_options)
    explain(vit, explainers, options["image"], Path(options["out"]))


def explain(vit: Any, explainers: dict[str, Any], image: str, out: Path) -> None:
    """Write each explainer's heatmap for the top class and the runner-up, and print both with their probabilities."""
    import torch

    from dap_bench.data import shapes
    from dap_bench.data.images import BadImage, decode
    from dap_bench.isolation import copied, explained
    from dap_bench.report.pictures import grid

    try:
        if image and not Path(image).expanduser().is_file():
            raise UserError(f"image={image} cannot be read: there is no such file.")
        picture = decode(Path(image).expanduser().read_bytes()) if image else shapes.draw(0)[0]
    except OSError as error:
        raise UserError(f"image={image} cannot be read ({error.strerror}).") from error
    except BadImage as error:
        raise UserError(f"image={image}: {error}.") from error
    images = vit.transform(picture)[None].to(vit.device)
    best = vit.score(images).softmax(1).topk(2)
    rows = []
    twin = copied(vit)
    with twin.shared_traces():
        for probability, label in zip(best.values[0].tolist(), best.indices[0].tolist(), strict=True):
            title = f"{vit.class_name(label)} ({probability:.1%})"
            print(title)
            classes = torch.tensor([label], device=images.device)
            found = [explained(each, twin, images, classes, [image]) for each in explainers.values()]
            maps = [explanation.heatmaps(vit.image_size)[0] for explanation in found]
            rows.append((fill(title, 24), [heatmap.float().cpu().numpy() for heatmap in maps]))
    try:
        grid(vit.pixels(images)[0].permute(1, 2, 0).cpu().numpy(), rows, list(explainers), out)
    except OSError as error:
        raise UserError(f"out={out} cannot be written ({error.strerror}).") from error
    print(f"wrote {out}")


def _load(model: str, device: str, options: dict[str, str]) -> Any:
    """The model, or the embedded one where its weights are out of reach."""
    try:
        return load_vit(model, device=device, **options)
    except UserError as error:
        if "Hugging Face" not in str(error):
            raise
        print(f"{error}\nGoing on with the embedded vit_shapes, which knows nothing but drawn shapes.", file=sys.stderr)
        return load_vit("vit_shapes", device=device)


def _parse(arguments: list[str]) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
    options = dict(DEFAULTS)
    model_options: dict[str, Any] = {}
    method_options: dict[str, Any] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key.startswith("model."):
            model_options[key.removeprefix("model.")] = yaml.safe_load(value)
        elif equals and key.startswith("method."):
            method_options[key.removeprefix("method.")] = yaml.safe_load(value)
        elif equals and key in options:
            options[key] = value
        else:
            raise UserError(f"{argument} is not an option; use {', '.join(f'{name}=' for name in DEFAULTS)} or --help.")
    return options, model_options, method_options


if __name__ == "__main__":
    answer("explain", lambda: main(sys.argv[1:]))
