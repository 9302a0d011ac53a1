"""Weights and devices: what is asked of whom, and in which order."""

import pytest
import torch
from layouts import build
from safetensors.torch import save_file

from dap_bench import UserError, ViT, hub, load_vit
from dap_bench.vit import choose_device, double_of, load


def test_an_architecture_is_refused_before_the_hub_is_asked(monkeypatch):
    monkeypatch.setattr(hub, "require", lambda *_: pytest.fail("the Hub was asked"))
    with pytest.raises(UserError, match="swin_tiny_patch4_window7_224 cannot be explained"):
        load("swin_tiny_patch4_window7_224.ms_in1k")
    with pytest.raises(UserError, match="difference of two"):
        load("vit_dwee_patch16_reg1_gap_256.sbb_in1k")


def test_an_accepted_architecture_asks_the_hub(monkeypatch):
    asked = []

    def require(repo, *_):
        asked.append(repo)
        raise UserError("no Hub")

    monkeypatch.setattr(hub, "require", require)
    for tag in ("deit_tiny_distilled_patch16_224.fb_in1k", "beit_base_patch16_224.in22k_ft_in22k_in1k"):
        with pytest.raises(UserError, match="no Hub"):
            load(tag)
        assert asked.pop() == f"timm/{tag}"


def test_a_device_that_is_not_there_is_said_before_the_hub_is_asked(monkeypatch):
    monkeypatch.setattr(hub, "require", lambda *_: pytest.fail("the Hub was asked"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="no CUDA here"):
        load("vit_tiny_patch16_224.augreg_in21k_ft_in1k", device="cuda")


def test_weights_in_half_precision_are_loaded_in_single(tmp_path):
    model = build("plain")
    file = tmp_path / "half.safetensors"
    save_file({name: value.half() for name, value in model.state_dict().items()}, file)
    options = {"img_size": [64, 48], "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 7}
    vit = load_vit("vit_tiny_patch16_224", device="cpu", checkpoint=str(file), **options)
    assert vit.dtype == torch.float32
    assert torch.equal(vit.model.head.weight, model.head.weight.half().float())


@pytest.mark.parametrize(
    ("cuda", "mps", "chosen"),
    [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu"), (True, False, "cuda")],
)
def test_auto_takes_the_best_there_is(monkeypatch, cuda, mps, chosen):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert choose_device("auto").type == chosen


@pytest.mark.parametrize(
    ("device", "words"),
    [("cuda", "no CUDA here"), ("mps", "no mps here; use device=auto or device=cpu"), ("gpu", "cuda, cuda:N or mps")],
)
def test_a_device_that_is_not_there(monkeypatch, device, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match=words):
        choose_device(device)


class OnMps(torch.nn.Module):
    """Stands for a module on a device that this machine need not have."""

    device = torch.device("mps")

    def parameters(self, recurse=True):
        return iter([self])

    def cpu(self):
        return torch.nn.Linear(1, 1)


def test_there_is_no_double_precision_on_mps():
    moved = double_of(OnMps())
    assert (moved.weight.device.type, moved.weight.dtype) == ("cpu", torch.float64)
    assert double_of(torch.ones(2)).dtype == torch.float64
    assert ViT(build("plain")).double().device.type == "cpu"
