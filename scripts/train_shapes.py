"""Train `vit_shapes` and its siblings, the small ViTs that ship with the project, on `dap_bench.data.shapes`.

They learn from series 1 and are tested on series 0, the one users evaluate on. Some training pictures have parts
erased, with a target as uncertain as what is left of the object: so a model must look at the object itself,
and pictures with holes in them, which explainers and their metrics make, are nothing new to it.

The siblings have other tokens and other heads (registers, average pooling, a distillation token) and learn from the
same pictures in the same way. What a model is made of is said in conf/model, nowhere else.

    python scripts/train_shapes.py                                       # vit_shapes: 15 minutes on two CPU cores
    python scripts/train_shapes.py models=vit_shapes_reg,vit_shapes_avg  # drawn once: 2 GB of temporary disk
"""

from __future__ import annotations

import math
import tempfile
import time
from multiprocessing import Pool
from pathlib import Path
from typing import Annotated

import numpy as np
import timm
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import Tensor, nn

from dap_bench import files
from dap_bench.command import command
from dap_bench.config import compose
from dap_bench.data import shapes

CLASSES = len(shapes.CLASSES)
WEIGHTS = Path(__file__).parents[1] / "dap_bench" / "weights"
FULL = "vit_shapes"  # the one whose weights are stored in single precision; its siblings' in half


def build(name: str) -> nn.Module:
    """The untrained model of conf/model/NAME.yaml."""
    options = OmegaConf.to_container(compose(f"model={name}").model, resolve=True)
    assert isinstance(options, dict)
    ours = ("_target_", "tag", "checkpoint", "class_names")
    timms = {str(key): value for key, value in options.items() if key not in ours}
    return timm.create_model(options["tag"], pretrained=False, **timms)


def _rgbm(job: tuple[int, int]) -> NDArray[np.uint8]:
    """Picture and mask of one (index, seed) as four channels."""
    return np.dstack(shapes.draw(*job))


def render(count: int, seed: int, path: Path) -> NDArray[np.uint8]:
    """Draw the first `count` pictures of a series, in parallel, into a file that is read as one array."""
    data = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(count, shapes.SIZE, shapes.SIZE, 4))
    with Pool(2) as pool:
        for i, item in enumerate(pool.imap(_rgbm, ((i, seed) for i in range(count)), chunksize=64)):
            data[i] = item
    return data


def normalise(batch: Tensor) -> tuple[Tensor, Tensor]:
    """Pictures in [-1, 1] and masks (1 on the object) of a uint8 batch, channels last."""
    planes = batch.permute(0, 3, 1, 2).float()
    return planes[:, :3] / 127.5 - 1, planes[:, 3:] / 255


def widen(mask: Tensor) -> Tensor:
    """The mask grown by 4 pixels, so that no edge of the object is left when it is erased."""
    return F.max_pool2d(F.max_pool2d(mask, (9, 1), 1, (4, 0)), (1, 9), 1, (0, 4))


def elsewhere(mask: Tensor) -> Tensor:
    """The mask moved by half the picture both ways, round the border: as large, and never on the object."""
    return mask.roll((shapes.SIZE // 2, shapes.SIZE // 2), (2, 3))


def augment(batch: Tensor) -> Tensor:
    """Mirror and shift a uint8 batch; neither changes a class."""
    if torch.rand(()) < 0.5:
        batch = batch.flip(2)
    return batch.roll(torch.randint(-16, 17, (2,)).tolist(), (1, 2))


def erase_some(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Fill a region of every second picture; return the pictures and what is still seen of the objects."""
    n = len(x) // 2
    part, wide = x[:n], widen(mask[:n])
    holes = (torch.rand(n, 1, 14, 14) < torch.rand(n, 1, 1, 1)).float()
    regions = (wide, elsewhere(wide), 1 - wide, F.interpolate(holes, scale_factor=16))
    fills = (
        part.mean((2, 3), keepdim=True).expand_as(part),
        torch.zeros_like(part),
        (2 * torch.rand(n, 3, 1, 1) - 1).expand_as(part),
        F.interpolate(F.avg_pool2d(part, 32), scale_factor=32, mode="bilinear"),
    )
    region = torch.stack([regions[i % 4][i] for i in range(n)])
    fill = torch.stack([fills[i // 4 % 4][i] for i in range(n)])
    return torch.cat([torch.lerp(part, fill, region), x[n:]]), torch.cat([mask[:n] * (1 - region), mask[n:]])


class Keep(nn.Module):
    """In the place of a ViT's patch dropout: keep the prefix tokens and the patches named by `index`."""

    index: Tensor

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix

    def forward(self, tokens: Tensor) -> Tensor:
        first, patches = tokens[:, : self.prefix], tokens[:, self.prefix :]
        return torch.cat([first, patches.gather(1, self.index[..., None].expand(-1, -1, tokens.shape[2]))], 1)


def loss_of(model: nn.Module, x: Tensor, mask: Tensor, labels: Tensor, patches: int) -> Tensor:
    """Cross entropy of what the head reads, whose target fades to "any class" as less than half the object is seen,
    plus that of the patches on the object, which a small ViT needs to learn fast. Uses so many `patches`: those
    where the object is or was, then others at random. Of two heads, each learns for itself."""
    x, seen = erase_some(x, mask)
    covered = F.avg_pool2d(mask, 16).flatten(1)
    model.patch_drop.index = ((covered > 0.1) + torch.rand_like(covered)).topk(patches).indices
    tokens = model.forward_features(x)
    sure = (2 * seen.sum((1, 2, 3)) / mask.sum((1, 2, 3))).clamp(max=1)[:, None]
    target = torch.lerp(torch.full((len(x), CLASSES), 1 / CLASSES), F.one_hot(labels, CLASSES).float(), sure)
    weight = F.avg_pool2d(seen, 16).flatten(1).gather(1, model.patch_drop.index)
    expected = labels[:, None].expand_as(weight)
    of_patches = model.head(model.fc_norm(tokens[:, model.num_prefix_tokens :]))
    each = F.cross_entropy(of_patches.transpose(1, 2), expected, reduction="none")
    logits = model.forward_head(tokens)
    heads = logits if isinstance(logits, tuple) else (logits,)
    whole = sum(F.cross_entropy(head, target) for head in heads) / len(heads)
    return whole + (weight * each).sum() / weight.sum()


def train(model: nn.Module, data: NDArray[np.uint8], steps: int, batch: int, lr: float) -> None:
    """AdamW under a cosine schedule, on a third of the patches for speed and on all of them in the last eighth."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.05},
    ]
    optimizer = torch.optim.AdamW(groups, lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / 60, 0.5 + 0.5 * math.cos(math.pi * s / steps))
    )
    model.train()
    model.patch_drop = Keep(model.num_prefix_tokens)
    model.distilled_training = True  # a model with two heads now gives the logits of both; others do not look at it
    start, total = time.time(), 0.0
    for step in range(steps):
        indices = torch.randint(len(data), (batch,))
        x, mask = normalise(augment(torch.from_numpy(data[indices.numpy()])))
        loss = loss_of(model, x, mask, indices % CLASSES, 64 if step < steps * 7 // 8 else 196)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total += loss.item()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}/{steps}  loss {total / 50:.3f}  {time.time() - start:.0f} s", flush=True)
            total = 0.0
    model.patch_drop = nn.Identity()


@torch.no_grad()
def report(model: nn.Module, data: NDArray[np.uint8]) -> None:
    """Print accuracy and mean p(class) of the pictures as they are, without object, and without some background."""
    model.eval()
    scores: dict[str, list[tuple[float, float]]] = {}
    for indices in np.array_split(np.arange(len(data)), math.ceil(len(data) / 100)):
        x, mask = normalise(torch.from_numpy(data[indices]))
        labels = torch.from_numpy(indices % CLASSES)
        wide, mean = widen(mask), x.mean((2, 3), keepdim=True)
        views = {
            "as it is": x,
            "object -> mean colour": torch.lerp(x, mean.expand_as(x), wide),
            "object -> grey": x * (1 - wide),
            "background piece -> mean colour": torch.lerp(x, mean.expand_as(x), elsewhere(wide)),
            "background piece -> grey": x * (1 - elsewhere(wide)),
        }
        for name, view in views.items():
            p = model(view).softmax(1)
            sure = p.gather(1, labels[:, None])[:, 0]
            scores.setdefault(name, []).extend(zip((p.argmax(1) == labels).tolist(), sure.tolist(), strict=True))
    for name, values in scores.items():
        accuracy, confidence = np.mean(values, axis=0)
        print(f"{name:32s} accuracy {accuracy:.4f}  mean p(class) {confidence:.4f}")


def store(model: nn.Module, path: Path, dtype: torch.dtype) -> None:
    """Write the weights in `dtype`, and leave the model with what a reader of the file will get."""
    rounded = {name: value.to(dtype).contiguous() for name, value in model.state_dict().items()}
    with files.replacing(path) as draft:
        save_file(rounded, draft)
    model.load_state_dict(rounded)


@command()
def main(
    models: Annotated[tuple[str, ...], "of conf/model"] = (FULL,),
    images: Annotated[int, "training pictures to draw"] = 9600,
    steps: Annotated[int, "of the optimiser"] = 1000,
    batch: Annotated[int, "pictures in a step"] = 64,
    lr: Annotated[float, "the highest learning rate"] = 1.5e-3,
    tests: Annotated[int, "unseen pictures to test on"] = 2000,
    threads: Annotated[int, "of torch"] = 2,
    out: Annotated[Path, "folder of the weights"] = WEIGHTS,
) -> None:
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        start = time.time()
        data = render(images, 1, Path(folder) / "train.npy")
        unseen = render(tests, 0, Path(folder) / "test.npy")
        print(f"drew {images} + {tests} pictures in {time.time() - start:.0f} s", flush=True)
        for name in models:
            start, path = time.time(), out / f"{name}.safetensors"
            torch.manual_seed(0)
            model = build(name)
            train(model, data, steps, batch, lr)
            store(model, path, torch.float32 if name == FULL else torch.float16)
            print(f"saved {path.name}, {path.stat().st_size / 1e6:.2f} MB; {(time.time() - start) / 60:.1f} minutes")
            report(model, unseen)


if __name__ == "__main__":
    main()
