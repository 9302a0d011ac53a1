"""Show maps of a photo in a browser.

Drop a photo, choose a model, a class and methods, and see their maps side by side at http://127.0.0.1:7860. The
bundled vit_shapes, which knows only drawn shapes, needs no network; other models load their weights from the Hub, or
from checkpoint=FILE for the model given. Nothing leaves this machine, unless share=true asks gradio for a public
address.

It needs gradio: pip install 'dap-bench[app]'. This may install another version of Pillow, which is part of the
fingerprint of rows; in a source tree `make app` installs gradio with the pinned versions.
"""

import os
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dap_bench.command import Device, command
from dap_bench.config import choices, load_method, load_vit
from dap_bench.errors import UserError, require_int
from dap_bench.explain import colours, heatmaps, read
from dap_bench.report.layouts import label as label_of
from dap_bench.report.layouts import ordered, paper_methods

if TYPE_CHECKING:
    import numpy as np

    from dap_bench.vit import ViT

TOLD = ("maps", "oracle")  # methods that must be told more than a photo
PREDICTED = -1  # of the classes: whichever the model finds likeliest
LISTED = 5  # classes whose probabilities are shown
KEPT = (600, 3600)  # seconds: how often gradio looks for copies of photos and maps to delete, and how old they are then
CSS = "#maps .grid-wrap {min-height: 0; max-height: none; overflow: visible}"  # the page scrolls, not the gallery
FONTS = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}  # which nobody must send

# the likeliest classes with their probabilities, the class explained, and the photo and its maps with their captions
Shown = tuple[dict[str, float], str, list[tuple["np.ndarray", str]]]


def build(model: str = "vit_shapes", checkpoint: str = "", device: str = "auto") -> Any:
    """The page, with the model loaded.

    Args:
        model: A model of conf/model, or any timm tag. Defaults to "vit_shapes".
        checkpoint: A local file of its weights. Defaults to "".
        device: auto, cpu, cuda, cuda:N or mps. Defaults to "auto".

    Returns:
        gradio's Blocks; `launch` shows them.

    Raises:
        UserError: If gradio is not installed, or the model cannot be had.
    """
    gr = _gradio()

    @lru_cache(maxsize=1)
    def loaded(name: str) -> "ViT":
        return load_vit(name, device=device, **({"checkpoint": checkpoint} if checkpoint and name == model else {}))

    def classes(name: str) -> Any:
        vit = _answered(gr, lambda: loaded(name))
        named = [(vit.class_name(label), label) for label in range(vit.classes)]
        return gr.Dropdown([("the likeliest", PREDICTED), *named], value=PREDICTED, label="class")

    def show(photo: str | None, name: str, label: int, methods: list[str]) -> Shown:
        photo = photo or ""
        return _answered(gr, lambda: _shown(loaded(name), photo, label, methods), photo)

    methods = [(label_of(name), name) for name in ordered(choices("method")) if name not in TOLD]
    models = [name for name in dict.fromkeys([model, *ordered(choices("model"))]) if name != "timm"]
    loaded(model)  # a mistake in its name is answered now
    blocks = gr.Blocks(title="dap_bench", analytics_enabled=False, fill_width=True, delete_cache=KEPT)
    with blocks as page, gr.Row():
        with gr.Column(scale=1, min_width=300):
            photo = gr.Image(type="filepath", image_mode=None, sources=["upload"], label="photo", height=220)
            chosen = gr.Dropdown(models, value=model, label="model")
            asked = classes(model)
            button = gr.Button("Explain", variant="primary")
            said = gr.Label(num_top_classes=LISTED, label="what the model says")
        with gr.Column(scale=3):
            wanted = gr.CheckboxGroup(methods, value=list(paper_methods()), label="methods")
            title = gr.Markdown("Without a photo, a picture of shapes is drawn.")
            maps = gr.Gallery(format="png", columns=5, show_label=False, buttons=[], elem_id="maps")
        chosen.change(classes, chosen, asked)
        button.click(show, [photo, chosen, asked, wanted], [said, title, maps], show_progress_on=maps)
    return page


def _gradio() -> Any:
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before it is imported
    try:
        import gradio
    except ImportError as error:
        raise UserError(
            "the app needs gradio; install it: pip install 'dap-bench[app]', or in a source tree: make app."
        ) from error
    return gradio


def _answered(gr: Any, function: Callable[[], Any], photo: str = "") -> Any:
    """What a function gives; a mistake of the user's is shown on the page, without the folder of the photo's copy."""
    try:
        return function()
    except UserError as error:
        raise gr.Error(str(error).replace(photo, Path(photo).name), print_exception=False) from error


def _shown(vit: "ViT", photo: str, label: int, methods: list[str]) -> Shown:
    """What the page shows of a photo: see `Shown`."""
    images = vit.transform(read(photo))[None].to(vit.device)
    best = vit.score(images).softmax(1)[0].topk(min(LISTED, vit.classes))
    said = dict(zip(map(vit.class_name, best.indices.tolist()), best.values.tolist(), strict=True))
    label = int(best.indices[0]) if label == PREDICTED else label
    (found,) = heatmaps(vit, {name: _method(name) for name in methods}, images, [label])
    seen = colours(vit, images)
    tiles = [(tile(seen, heatmap), label_of(name)) for name, heatmap in zip(methods, found, strict=True)]
    return said, f"### Maps of {vit.class_name(label)}", [(tile(seen), "photo"), *tiles]


@cache
def _method(name: str) -> Any:
    return load_method(name)


def tile(photo: "np.ndarray", heatmap: "np.ndarray | None" = None) -> "np.ndarray":
    """A photo, under a heatmap if one is given, pixel by pixel.

    Args:
        photo: The photo [H,W,3] in 0..1.
        heatmap: The heatmap [H,W] in 0..1. Defaults to None.

    Returns:
        The picture [H,W,3] in 0..255.
    """
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from dap_bench.report.pictures import overlay

    height, width = photo.shape[:2]
    figure = Figure(figsize=(width / 100, height / 100), dpi=100)
    overlay(figure.add_axes((0, 0, 1, 1)), photo, heatmap)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


@command()
def main(
    model: Annotated[str, "a model of conf/model or any timm tag"] = "vit_shapes",
    checkpoint: Annotated[str, "local file with its weights"] = "",
    device: Device = "auto",
    port: Annotated[int, "port to listen on"] = 7860,
    share: Annotated[bool, "ask gradio for a public address"] = False,
) -> None:
    require_int("port", port, most=65535)
    page = build(model, checkpoint, device)
    try:
        page.launch(
            server_name="127.0.0.1",
            server_port=port,
            share=share,
            theme=_gradio().themes.Default(**FONTS),
            css=CSS,
            ssr_mode=False,
            footer_links=[],
            run_history=False,
            quiet=True,
            prevent_thread_lock=True,
        )
    except OSError as error:
        raise UserError(f"port={port} cannot be used, perhaps another program uses it; choose another.") from error
    print(f"open {page.share_url or page.local_url} in a browser; press Ctrl-C to stop", flush=True)
    page.block_thread()


if __name__ == "__main__":
    main()
