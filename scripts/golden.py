"""The golden numbers made again by the methods' authors: python scripts/golden.py repositories=FOLDER

`tests/data/nano.npz` and `beyond_intuition.npz` hold what the methods' original public code gives for a small random
ViT. Its weights (`w/...`), images (`x`) and classes (the most likely and the second) are in nano.npz and are taken as
they are. Without arguments this prints the commands that fetch the originals. With the folder of their checkouts it
gives nano's weights to each original, calls it as its function below says, and prints for every array the largest
difference from the golden one, relative to the largest value of an image's map; the exit code is 1 if one is above its
bound. `write=FOLDER` writes both files anew there.

The originals run on the CPU, one image at a time, in the precision that stands with them. What had to be changed for
that is said where it is done. With these commits, torch 2.15.0 and timm 1.0.30 no array differed by more than 2e-15.
"""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import numpy as np
import timm
import torch
from torch import Tensor, nn

from dap_bench import files
from dap_bench.command import command
from dap_bench.errors import UserError
from dap_bench.report.markdown import line, table

DATA = Path(__file__).parents[1] / "tests" / "data"
GIVEN = ("w/", "x", "num_heads", "class/")  # how the keys of nano.npz begin that no original makes
PACKAGES = "einops==0.8.2 open_clip_torch==3.3.0 opencv-python-headless scikit-learn ttach"  # the originals' imports
COMMITS = {
    "hila-chefer/Transformer-Explainability": "c3e578f76b954e8528afeaaee26de3f07e3fe559",
    "hila-chefer/Transformer-MM-Explainability": "58eaea85ac9c34aff052f368514b35d2e4c8dd3c",
    "yxheartipp/attr-rollout": "588c8234fd17fd97a1871e55305e93dd867bf769",
    "jacobgil/pytorch-grad-cam": "084273b3f30b54ad0c64cf8020a4337d979a66e0",
    "lenbrocki/CDAM": "2c502d5f4d2df2d69d1dd9bac3dd35653475ecff",
    "LeemSaebom/Attention-Guided-CAM-Visual-Explanations-of-Vision-Transformer-Guided-by-Self-Attention": (
        "7202d31138e1c08156d8543fa728ed980b3af0a3"
    ),
    "WalBouss/LeGrad": "a9edb031422d5f5829d9e6238a1e21feb1972c92",
    "sehyeongjo/GMAR": "20c0f84df0b9455fb3b17a31fcd338fa3db4f65f",
    "jiaminchen-1031/transformerinterp": "a76854abfcfd66a4f74109225ecfc40e07b5a3ef",
}

SIZES = {"num_classes": 10, "embed_dim": 48, "depth": 4, "num_heads": 4}  # of nano, in timm and in its descendants
NORM = partial(nn.LayerNorm, eps=1e-6)
LIKE_TIMM: dict[str, Any] = {**SIZES, "qkv_bias": True, "norm_layer": NORM}  # what its descendants leave open
Maps = dict[str, Tensor]  # array -> its row for one image and class
Explain = Callable[[Tensor, int], Maps]  # of an image [1, 3, 224, 224] and a class


class Nano(NamedTuple):
    """The golden ViT in an original's precision."""

    arrays: dict[str, np.ndarray]
    dtype: torch.dtype

    @property
    def weights(self) -> Maps:
        return {name[2:]: torch.from_numpy(self.arrays[name]) for name in self.arrays if name.startswith("w/")}

    def into(self, model: nn.Module, weights: Maps | None = None) -> Any:
        """The model with nano's weights, or with these."""
        model.load_state_dict(weights or self.weights)
        return model.to(self.dtype).eval()

    def timm(self) -> Any:
        vit = self.into(timm.create_model("vit_tiny_patch16_224", pretrained=False, **SIZES))
        for block in vit.blocks:
            block.attn.fused_attn = False  # as when the golden numbers were made; the fused one differs by 1e-6
        return vit


class Original(NamedTuple):
    repository: str
    arrays: list[str]
    file: str
    dtype: torch.dtype
    bound: float
    prepare: Callable[[Nano, Path], Explain]  # from the checkout


ORIGINALS: list[Original] = []


def original(repository: str, arrays: str, dtype: torch.dtype, file: str = "nano") -> Callable:
    """Enter a function into the list of originals."""

    def enter(prepare: Callable[[Nano, Path], Explain]) -> Callable:
        bound = 1e-8 if dtype == torch.float64 else 1e-5  # room for other CPUs: Chefer's rules are badly conditioned
        ORIGINALS.append(Original(repository, arrays.split(), file, dtype, bound, prepare))
        return prepare

    return enter


# ---------------------------------------------------------------------------------------------------- the originals


@original("hila-chefer/Transformer-Explainability", "logits ar ar_layers", torch.float64)
def rollout(nano: Nano, checkout: Path) -> Explain:
    """Baselines.generate_rollout(start_layer=0). A layer's map is the rollout up to it."""
    from baselines.ViT.ViT_explanation_generator import Baselines, compute_rollout_attention
    from baselines.ViT.ViT_new import VisionTransformer

    vit = nano.into(VisionTransformer(**LIKE_TIMM))

    def explain(image: Tensor, target: int) -> Maps:
        whole = Baselines(vit).generate_rollout(image, start_layer=0)
        attention = [block.attn.get_attention_map().mean(1) for block in vit.blocks]
        layers = [compute_rollout_attention(attention[:count])[0, 0, 1:] for count in range(1, len(attention) + 1)]
        return {"logits": vit(image)[0], "ar": whole[0], "ar_layers": torch.stack(layers)}

    return explain


@original("hila-chefer/Transformer-Explainability", "chefer chefer_start1", torch.float64)
def chefer(nano: Nano, checkout: Path) -> Explain:
    """LRP.generate_LRP(method="transformer_attribution"), start_layer 0 and 1."""
    from baselines.ViT.ViT_explanation_generator import LRP
    from baselines.ViT.ViT_LRP import VisionTransformer

    vit = nano.into(VisionTransformer(**SIZES, qkv_bias=True))
    vit.norm.eps = 1e-6  # theirs has 1e-5 in this one

    def explain(image: Tensor, target: int) -> Maps:
        attribute = partial(LRP(vit).generate_LRP, image, target, method="transformer_attribution")
        return {"chefer": attribute(start_layer=0)[0], "chefer_start1": attribute(start_layer=1)[0]}

    return explain


@original("hila-chefer/Transformer-MM-Explainability", "chefer_attention", torch.float64)
def chefer_attention(nano: Nano, checkout: Path) -> Explain:
    """generate_relevance of Transformer_MM_explainability_ViT.ipynb, with the ViT that the notebook takes."""
    sys.path.insert(0, str(checkout.parent / "Transformer-Explainability"))
    from baselines.ViT.ViT_new import VisionTransformer

    notebook = run(cells(checkout / "Transformer_MM_explainability_ViT.ipynb", "generate_relevance"))
    vit = nano.into(VisionTransformer(**LIKE_TIMM))
    return lambda image, target: {"chefer_attention": notebook.generate_relevance(vit, image, target)}


@original("yxheartipp/attr-rollout", "attr attr_layers", torch.float64)
def attr(nano: Nano, checkout: Path) -> Explain:
    """IG.generate_ig, then compute_rollout_attention as for attr_rollout in generate_visualizations.py."""
    from baselines.ViT.ViT_ig import VisionTransformer

    text = (checkout / "baselines" / "ViT" / "ViT_explanation_generator.py").read_text()
    text = edited(text, "heads = 12", "heads = 4")
    text = edited(text, "index = np.argmax(output.cpu().data.numpy(), axis=-1)", "index = [self.target]")
    generator = run(text)
    vit = nano.into(VisionTransformer(**LIKE_TIMM))
    integrated = generator.IG(vit)

    def explain(image: Tensor, target: int) -> Maps:
        integrated.target = target
        layers = integrated.generate_ig(image)
        maps = [generator.compute_rollout_attention(layers[:count])[0, 0, 1:] for count in range(1, len(layers) + 1)]
        return {"attr": maps[-1], "attr_layers": torch.stack(maps)}

    return explain


@original("jacobgil/pytorch-grad-cam", "gradcam gradcam_signed", torch.float32)
def gradcam(nano: Nano, checkout: Path) -> Explain:
    """GradCAM at blocks[-1].norm1, as in usage_examples/vit_example.py.

    Taken from get_cam_image, before the map is scaled to 0..1; ReLU is what the library does next.
    """
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
    from pytorch_grad_cam.utils.reshape_transforms import vit_reshape_transform

    vit = nano.timm()

    def explain(image: Tensor, target: int) -> Maps:
        cam = GradCAM(vit, [vit.blocks[-1].norm1], reshape_transform=vit_reshape_transform)
        with patch.object(cam, "get_cam_image", Recorder(cam.get_cam_image)) as unscaled:
            cam(image, [ClassifierOutputTarget(target)])
        signed = torch.from_numpy(unscaled.results[0]).flatten()
        return {"gradcam": signed.clamp(min=0), "gradcam_signed": signed}

    return explain


@original("lenbrocki/CDAM", "cdam_signed", torch.float32)
def cdam(nano: Nano, checkout: Path) -> Explain:
    """get_CDAM(return_raw=True) of CDAM.ipynb with the notebook's hooks on blocks[-1].norm1."""
    vit = nano.timm()
    marks = ("def get_CDAM", "def get_activation", "final_block_norm1.register_forward_hook")
    notebook = run(cells(checkout / "CDAM.ipynb", *marks), final_block_norm1=vit.blocks[-1].norm1)

    def explain(image: Tensor, target: int) -> Maps:
        score = vit(image)[0, target]
        return {"cdam_signed": notebook.get_CDAM(score, notebook.activation, notebook.grad, return_raw=True)}

    return explain


@original(
    "LeemSaebom/Attention-Guided-CAM-Visual-Explanations-of-Vision-Transformer-Guided-by-Self-Attention",
    "agcam agcam_layers",
    torch.float32,
)
def agcam(nano: Nano, checkout: Path) -> Explain:
    """AGCAM.generate with the authors' ViT, which detaches the input of attention; its last sum adds the layers."""
    from einops.layers.torch import Reduce
    from Methods.AGCAM.AGCAM import AGCAM
    from Methods.AGCAM.ViT_for_AGCAM.models.vision_transformer import VisionTransformer

    cam = AGCAM(nano.into(VisionTransformer(**SIZES)))

    def explain(image: Tensor, target: int) -> Maps:
        sums = Recorder(lambda pattern, reduction: Recorder(Reduce(pattern, reduction)))
        with patch("Methods.AGCAM.AGCAM.Reduce", sums):
            _, mask = cam.generate(image, target)
        layers = sums.results[0].results[0].reshape(4, -1).flip(0)  # summed over heads; theirs begin with the last
        return {"agcam": mask.flatten(), "agcam_layers": layers}

    return explain


@original("WalBouss/LeGrad", "legrad_cls legrad_cls_layers legrad_mean", torch.float32)
def legrad(nano: Nano, checkout: Path) -> Explain:
    """LeWrapper(layer_index=0).compute_legrad for CLIP, with nano in open_clip's ViT and a one-hot text embedding.

    CLIP's similarity becomes a logit by leaving out what is not of a classifier: features are not divided by their
    length; maps are not enlarged or scaled to 0..1. The original averages all tokens of a layer (mean); cls gives it
    the class token in place of each.
    """
    from legrad import wrapper
    from open_clip.transformer import VisionTransformer

    sizes = {"width": 48, "layers": 4, "heads": 4, "mlp_ratio": 4, "output_dim": 10}
    clip = nn.Module()
    clip.visual = VisionTransformer(224, 16, **sizes, norm_layer=NORM, no_ln_pre=True)
    nano.into(clip.visual, open_clip_names(nano.weights))
    model = wrapper.LeWrapper(clip, layer_index=0)

    def explain(image: Tensor, target: int) -> Maps:
        class_embedding = torch.eye(10, dtype=nano.dtype)[target, None]
        maps = {}
        for readout in ("mean", "cls"):
            model.visual(image)
            if readout == "cls":
                for block in model.visual.transformer.resblocks:
                    block.feat_post_mlp = block.feat_post_mlp[:1].expand_as(block.feat_post_mlp)
            layers = Recorder(lambda one, **_: one)
            plain = {"normalize": lambda features, dim: features, "interpolate": layers}
            functional = SimpleNamespace(one_hot=nn.functional.one_hot, **plain)
            with patch.multiple(wrapper, F=functional, min_max=lambda total: total):
                maps[f"legrad_{readout}"] = model.compute_legrad(class_embedding).flatten()
            maps[f"legrad_{readout}_layers"] = torch.stack(layers.results).reshape(4, -1)
        return maps

    return explain


def open_clip_names(weights: Maps) -> Maps:
    """Weights of timm's ViT by their names in open_clip's, which adds the patches' bias with their positions."""
    position, patches = weights["pos_embed"][0].clone(), weights["patch_embed.proj.weight"]
    position[1:] += weights["patch_embed.proj.bias"]
    new = {"class_embedding": weights["cls_token"][0, 0], "positional_embedding": position, "conv1.weight": patches}
    new |= {"proj": weights["head.weight"].T}  # the bias of the head has no gradient
    names = {
        "blocks.": "transformer.resblocks.", "norm1.": "ln_1.", "norm2.": "ln_2.", "attn.qkv.": "attn.in_proj_",
        "attn.proj.": "attn.out_proj.", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj",
    }  # fmt: skip
    for name, weight in weights.items():
        if name.startswith("norm."):
            new[name.replace("norm.", "ln_post.")] = weight
        elif name.startswith("blocks."):
            for old, theirs in names.items():
                name = name.replace(old, theirs)
            new[name] = weight
    return new


@original("sehyeongjo/GMAR", "gmar_weights_l1 gmar_weights_l2", torch.float64)
def gmar(nano: Nano, checkout: Path) -> Explain:
    """GMAR.weight_generate at the last block's norm1, "l1" and "l2"; its ViT is Hugging Face's, here timm's."""
    text = (checkout / "gmar.py").read_text()
    text = edited(text, "num_heads = 16", "num_heads = 4")
    text = edited(text, "output.logits.argmax(dim=1).item()", "self.target")
    vit = nano.timm()
    weigh = run(text).GMAR(LikeHuggingFace(vit), vit.blocks[-1].norm1)

    def explain(image: Tensor, target: int) -> Maps:
        weigh.target = target
        return {f"gmar_weights_{norm}": torch.tensor(weigh.weight_generate(image, norm)) for norm in ("l1", "l2")}

    return explain


class LikeHuggingFace(nn.Module):
    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, image: Tensor, output_attentions: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.vit(image))


@original(
    "jiaminchen-1031/transformerinterp",
    "head head_start2 head_average token token_start2 token_average",
    torch.float64,
    file="beyond_intuition",
)
def beyond_intuition(nano: Nano, checkout: Path) -> Explain:
    """Baselines.generate_ours (head) and generate_ours_c (token), steps=20, start_layer=1 (their first), 3 in _start2.

    _average: with mae=True and their model with global pooling, which reads the mean of the patches through the norm.
    """
    sys.path.insert(0, str(checkout / "ViT"))
    from baselines.ViT.ViT_explanation_generator import Baselines
    from baselines.ViT.ViT_new import VisionTransformer

    build = partial(VisionTransformer, **LIKE_TIMM)
    renamed = {f"fc_{name}" if name.startswith("norm.") else name: w for name, w in nano.weights.items()}
    plain, average = Baselines(nano.into(build())), Baselines(nano.into(build(global_pooling=True), renamed))

    def explain(image: Tensor, target: int) -> Maps:
        maps = {}
        for perception, method in (("head", "generate_ours"), ("token", "generate_ours_c")):
            call = partial(getattr(plain, method), image, [target], steps=20)
            maps[perception], maps[f"{perception}_start2"] = call(start_layer=1)[0], call(start_layer=3)[0]
            call = partial(getattr(average, method), image, [target], steps=20)
            maps[f"{perception}_average"] = call(start_layer=1, mae=True)[0]
        return maps

    return explain


# ------------------------------------------------------------------------------------------------ running them


class Recorder:
    """A function that remembers what it returned."""

    def __init__(self, function: Callable) -> None:
        self.function, self.results = function, []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.results.append(self.function(*args, **kwargs))
        return self.results[-1]


def cells(notebook: Path, *marks: str) -> str:
    """For each of these, the first cell of a notebook that contains it."""
    texts = ["".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"]]
    return "\n".join(next(text for text in texts if mark in text) for mark in marks)


def edited(text: str, old: str, new: str) -> str:
    """The text with what an original has fixed: its number of heads, and that it explains the predicted class."""
    if old not in text:
        raise UserError(f"The original does not contain '{old}'; it is not the commit that this was written for.")
    return text.replace(old, new)


def run(text: str, **names: Any) -> SimpleNamespace:
    """What the text defines; the notebooks import torch and numpy in other cells."""
    space = {"torch": torch, "np": np, **names}
    exec(text, space)
    return SimpleNamespace(**space)


@contextmanager
def importable(checkout: Path, dtype: torch.dtype) -> Iterator[None]:
    """Import from this folder, and forget it afterwards: several originals call their packages `baselines`."""
    before, paths = set(sys.modules), sys.path.copy()
    sys.path.insert(0, str(checkout))
    torch.set_default_dtype(dtype)  # of their identity matrices and sums
    try:
        with (
            patch.object(torch.Tensor, "cuda", lambda tensor: tensor),  # they move everything to the GPU
            redirect_stdout(StringIO()),
            warnings.catch_warnings(action="ignore"),
        ):
            yield
    except ImportError as error:
        raise UserError(f"{checkout.name}: {error}. It needs: pip install {PACKAGES}") from error
    finally:
        torch.set_default_dtype(torch.float32)
        sys.path[:] = paths
        for name in set(sys.modules) - before:
            if name.split(".")[0] in ("baselines", "modules"):
                del sys.modules[name]


def repeat(entry: Original, folder: Path, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of an original, for both classes of all images."""
    checkout = folder / Path(entry.repository).name
    images = torch.from_numpy(arrays["x"]).to(entry.dtype)
    made = {}
    with importable(checkout, entry.dtype):
        explain = entry.prepare(Nano(arrays, entry.dtype), checkout)
        for which in ("pred", "alt"):
            maps = [explain(images[at, None], target) for at, target in enumerate(arrays[f"class/{which}"].tolist())]
            for name in entry.arrays:
                made[key(name, which)] = np.stack([one[name].detach().double().numpy() for one in maps])
    return made


def key(name: str, which: str) -> str:
    return name if name == "logits" else f"{name}/{which}"


def difference(ours: np.ndarray, golden: np.ndarray) -> float:
    """The largest difference of an image's map, relative to the largest value of that map."""
    ours, golden = ours.reshape(len(ours), -1), golden.reshape(len(golden), -1)
    return float((abs(ours - golden).max(1) / abs(golden).max(1)).max())


def commands() -> str:
    lines = []
    for repository, commit in COMMITS.items():
        arrays = [name for entry in ORIGINALS if entry.repository == repository for name in entry.arrays]
        place = f"../originals/{Path(repository).name}"
        lines += [f"# {', '.join(arrays)}", f"git clone https://github.com/{repository} {place}"]
        lines += [f"git -C {place} checkout {commit}", ""]
    lines += [f"pip install -c constraints.txt {PACKAGES}", "python scripts/golden.py repositories=../originals"]
    return "\n".join(lines)


def check(folder: Path) -> None:
    for repository, commit in COMMITS.items():
        place = folder / Path(repository).name
        found = subprocess.run(["git", "-C", str(place), "rev-parse", "HEAD"], capture_output=True, text=True)
        if found.stdout.strip() != commit:
            raise UserError(f"{place} is not {repository} at {commit}; python scripts/golden.py says how to fetch it.")


@command()
def main(
    repositories: Annotated[Path | None, "folder of the originals' checkouts; without it, how to fetch them"] = None,
    write: Annotated[Path | None, "folder to write both files to"] = None,
) -> int:
    if repositories is None:
        print(commands())
        return 0
    check(repositories)
    golden = {name: dict(np.load(DATA / f"{name}.npz")) for name in ("nano", "beyond_intuition")}
    new = {name: dict(arrays) for name, arrays in golden.items()}
    print(table(["array", "original", "precision", "largest difference", "bound"], []), end="")
    failed = False
    for entry in ORIGINALS:
        made = repeat(entry, repositories, golden["nano"])
        new[entry.file] |= made
        origin, precision = f"{entry.repository}@{COMMITS[entry.repository][:7]}", str(entry.dtype)[len("torch.") :]
        for name in entry.arrays:
            keys = {key(name, which) for which in ("pred", "alt")}
            off = np.max([difference(made[one], golden[entry.file][one]) for one in keys])  # NaN if one is
            failed |= not off <= entry.bound
            print(line([name, origin, precision, f"{off:.1e}", f"{entry.bound:.0e}"]), end="", flush=True)
    if write:
        for name, arrays in new.items():
            with files.replacing(write / f"{name}.npz") as draft, draft.open("wb") as file:
                np.savez_compressed(file, **arrays)
            print(f"wrote {write / name}.npz")
    return int(failed)


if __name__ == "__main__":
    main()
