"""AttnLRP: relevance is conserved but for what its rules say, and equals these rules written out."""

from types import SimpleNamespace

import pytest
import torch
from layouts import SIZE, build
from torch import nn
from torch.nn.functional import conv_transpose2d, gelu

from dap_bench import UserError, ViT, load_method
from dap_bench.explainers.attnlrp import _gamma, attnlrp
from dap_bench.vit.loading import blueprint

CLASSES = torch.tensor([0, 6])


@pytest.fixture(scope="module")
def images():
    torch.manual_seed(1)
    return torch.randn(2, 3, *SIZE, dtype=torch.float64)


@pytest.fixture(scope="module")
def pure():
    """A ViT with nothing but the image to be relevant: no biases, no positions, no class token."""
    model = build("average").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or name == "pos_embed":
                parameter.zero_()
    return ViT(model).double()


def logit(vit, images):
    return vit.score(images).gather(1, CLASSES[:, None])[:, 0]


# ---------------------------------------------------------------------- the rules written out


def share(relevance, output):
    """R / y; a token that the head does not read has neither."""
    return relevance / torch.where(output == 0, 1, output)


def linear_back(relevance, x, layer):
    return x * (share(relevance, layer(x)) @ layer.weight)


def norm_back(relevance, x, norm):
    centred = x - x.mean(-1, keepdim=True)
    scale = norm.weight / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    s = scale * share(relevance, norm(x))
    return x * (s - s.mean(-1, keepdim=True))


def forward(block, x):
    """All that a block computes on its way, by name."""
    attention, heads = block.attn, block.attn.num_heads
    normed1 = block.norm1(x)
    q, k, v = attention.qkv(normed1).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-2, -1) * attention.scale
    a = scores.softmax(-1)
    mixed = a @ v
    merged = mixed.transpose(1, 2).flatten(2)
    middle = x + attention.proj(merged)
    normed2 = block.norm2(middle)
    active = gelu(block.mlp.fc1(normed2))
    output = middle + block.mlp.fc2(active)
    return SimpleNamespace(**locals())


def backward(on, relevance):
    """Relevance of a block's output -> of its input, and what softmax absorbs [B]."""
    block, attention = on.block, on.attention
    s = share(relevance, on.output)
    r = linear_back((on.output - on.middle) * s, on.active, block.mlp.fc2)
    r = linear_back(r, on.normed2, block.mlp.fc1)  # GELU passes relevance on as it is
    s = share(on.middle * s + norm_back(r, on.middle, block.norm2), on.middle)
    r = linear_back((on.middle - on.x) * s, on.merged, attention.proj)
    r = share(r.unflatten(2, (on.heads, -1)).transpose(1, 2), on.mixed) / 2
    of_value, of_attention = on.v * (on.a.transpose(-2, -1) @ r), on.a * (r @ on.v.transpose(-2, -1))
    of_scores = on.scores * (of_attention - on.a * of_attention.sum(-1, keepdim=True))
    r = share(of_scores, on.scores) * attention.scale / 2
    parts = torch.stack([on.q * (r @ on.k), on.k * (r.transpose(-2, -1) @ on.q), of_value])
    r = linear_back(parts.permute(1, 3, 0, 2, 4).flatten(2), on.normed1, attention.qkv)
    return on.x * s + norm_back(r, on.x, block.norm1), (of_attention - of_scores).sum((1, 2, 3))


@torch.no_grad()
def written_out(vit, images):
    """Relevance itself, passed back layer by layer: of pixels [B,H*W], and what all softmaxes absorb [B]."""
    model, prefix = vit.model, vit.layout.prefix
    patches = model.patch_embed(images)
    tokens = model._pos_embed(patches)
    steps, x = [], tokens
    for block in model.blocks:
        steps.append(forward(block, x))
        x = steps[-1].output
    relevance, lost = torch.zeros_like(x), 0
    if vit.layout.head == "mean of patches":
        read, norm = x[:, prefix:].mean(1), model.fc_norm
    else:
        read, norm = x[:, 0], model.norm
    z = model.head(norm(read))
    r = torch.zeros_like(z).scatter(1, CLASSES[:, None], z.gather(1, CLASSES[:, None]))
    r = norm_back(linear_back(r, norm(read), model.head), read, norm)
    if vit.layout.head == "mean of patches":
        relevance[:, prefix:] = x[:, prefix:] / vit.patches * share(r, read)[:, None]
    else:
        relevance[:, 0] = r
    for step in reversed(steps):
        relevance, absorbed = backward(step, relevance)
        lost = lost + absorbed
    s = share(relevance, tokens)[:, prefix:].transpose(1, 2).unflatten(2, vit.grid)  # prefix and positions keep theirs
    found = images * conv_transpose2d(s, model.patch_embed.proj.weight, stride=16)
    return found.sum(1).flatten(1), lost


@pytest.mark.parametrize("layout", ["plain", "registers", "average", "average, registers", "average, class token"])
def test_attnlrp_is_its_rules_written_out(images, layout):
    vit = ViT(build(layout).eval()).double()
    found, expected = load_method("attnlrp")(vit, images, CLASSES).maps, written_out(vit, images)[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9 * expected.abs().max().item())


# ---------------------------------------------------------------------- conservation


def test_what_pixels_have_and_what_softmax_absorbs_is_the_logit(pure, images):
    maps, absorbed = load_method("attnlrp")(pure, images, CLASSES).maps, written_out(pure, images)[1]
    assert absorbed.abs().min() > 1e-3
    torch.testing.assert_close(maps.sum(1) + absorbed, logit(pure, images), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("gammas", [(0.0, 0.0), (0.3, 0.0), (0.05, 2.0)])
def test_cp_lrp_conserves_the_logit(pure, images, gammas):
    maps = load_method("attnlrp", attention="cp", gamma=gammas[0], gamma_patches=gammas[1])(pure, images, CLASSES).maps
    torch.testing.assert_close(maps.sum(1), logit(pure, images), rtol=1e-9, atol=1e-9)


def test_without_attention_it_is_the_same_whatever_becomes_of_softmax(pure, images):
    """Where nothing is projected back, attention has no relevance to lose."""
    vit = ViT(build("average").eval()).double()
    vit.model.load_state_dict(pure.model.state_dict())
    with torch.no_grad():
        for block in vit.blocks:
            block.attn.proj.weight.zero_()
    both = [load_method("attnlrp", attention=way)(vit, images, CLASSES).maps for way in ("uniform", "cp")]
    torch.testing.assert_close(*both)
    torch.testing.assert_close(both[0].sum(1), logit(vit, images))


# ---------------------------------------------------------------------- gamma, refusals


def test_the_gamma_rule_by_hand():
    """x = (1, -2, 3), w = (2, 1, -1): contributions 2, -2, -3 of the output -3; with gamma 1 they count 2, -4, -6."""
    layer, x = nn.Linear(3, 1, bias=False).double(), torch.tensor([[1.0, -2.0, 3.0]], dtype=torch.float64)
    layer.weight.data = torch.tensor([[2.0, 1.0, -1.0]], dtype=torch.float64)
    x.requires_grad_()
    y = _gamma(1.0)(layer, (x,), layer(x).detach())
    assert y.item() == pytest.approx(-3)
    (gradient,) = torch.autograd.grad(y, x)  # relevance of the output is the output: -3 = sum of x * gradient
    expected = torch.tensor([[2.0, -4.0, -6.0]], dtype=torch.float64) * -3 / -8
    torch.testing.assert_close((x * gradient).detach(), expected)


def test_gamma_changes_the_map_and_no_gamma_does_not(images):
    vit = ViT(build("plain").eval()).double()
    plain = attnlrp(vit, images, CLASSES).maps
    tiny = attnlrp(vit, images, CLASSES, gamma=1e-9, gamma_patches=1e-9).maps
    torch.testing.assert_close(tiny, plain, rtol=1e-4, atol=1e-6 * plain.abs().max().item())
    assert not torch.allclose(attnlrp(vit, images, CLASSES, gamma=0.25).maps, plain)
    assert not torch.allclose(attnlrp(vit, images, CLASSES, gamma_patches=0.25).maps, plain)


def test_models_without_a_rule_are_refused_and_left_alone(images):
    hybrid = ViT(blueprint("vit_tiny_r_s16_p8_224", depth=1))
    zeros = torch.zeros(1, 3, 224, 224)
    with pytest.raises(UserError, match=r"AttnLRP has no rule for \w+ in the model\."):
        attnlrp(hybrid, zeros, CLASSES[:1])
    vit = ViT(build("plain").eval()).double()
    vit.blocks[1].attn.gate = nn.Linear(24, 24)
    with pytest.raises(UserError, match="no rule for gated attention"):
        attnlrp(vit, images, CLASSES)
    vit = ViT(build("plain").eval()).double()
    vit.model.blocks[0].mlp = nn.Sequential(nn.Linear(24, 24))
    with pytest.raises(UserError, match="no rule for an MLP of the kind Sequential"):
        attnlrp(vit, images, CLASSES)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in vit.model.modules())


def test_the_model_is_as_before_after_an_exception(images):
    vit = ViT(build("plain").eval()).double()

    def fails(*_):
        raise RuntimeError("on purpose")

    handle = vit.model.head.register_forward_hook(fails)
    with pytest.raises(RuntimeError, match="on purpose"):
        attnlrp(vit, images, CLASSES, gamma=0.1)
    handle.remove()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in vit.model.modules())
    assert all(parameter.requires_grad for parameter in vit.model.parameters())
