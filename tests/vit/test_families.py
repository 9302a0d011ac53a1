"""What is accepted, what is refused and why; and blocks put together from their parts."""

from types import SimpleNamespace

import pytest
import timm
import torch
from layouts import LAYOUTS, SIZE, build
from timm.models.vision_transformer import ParallelScalingBlock

from dap_bench import UserError, ViT
from dap_bench.vit.families import after_attention, refusal
from dap_bench.vit.loading import blueprint

KINDS = {"VisionTransformer", "VisionTransformerDistilled", "Eva", "Beit", "VisionTransformerRelPos"}
HOMES = {"vision_transformer", "vision_transformer_hybrid", "deit", "eva", "beit", "vision_transformer_relpos"}
DIFFERENCE, NO_BRANCHES = "is a difference of two", "are not norm, attention, norm, MLP with residual sums"
REFUSED = {  # of timm's names with weights for ImageNet-1k and global attention, all others are accepted
    "vit_dlittle_patch16_reg1_gap_256.sbb_nadamuon_in1k": DIFFERENCE,
    "vit_dwee_patch16_reg1_gap_256.sbb_in1k": DIFFERENCE,
    "vit_dwee_patch16_reg1_gap_256.sbb_nadamuon_in1k": DIFFERENCE,
    "vit_dpwee_patch16_reg1_gap_256.sbb_in1k": NO_BRANCHES,
    "vit_dpwee_patch16_reg1_gap_256.sbb_nadamuon_in1k": NO_BRANCHES,
    "vit_pwee_patch16_reg1_gap_256.sbb_in1k": NO_BRANCHES,
}


def names():
    """timm's models with weights for ImageNet-1k, in the modules whose attention may be global."""
    homes = {name: timm.model_entrypoint(name).__module__.rpartition(".")[2] for name in timm.list_models()}
    tags = [tag for tag in timm.list_models(pretrained=True) if homes[tag.split(".")[0]] in HOMES]
    return [tag for tag in tags if timm.get_pretrained_cfg(tag).num_classes == 1000]


def judge(tags, **changes):
    """Each tag's reason against it, or None; tags of one architecture are judged once."""
    models = {name: blueprint(name, num_classes=1000, **changes) for name in {tag.split(".")[0] for tag in tags}}
    assert {type(model).__name__ for model in models.values()} == KINDS
    return {tag: refusal(models[tag.split(".")[0]]) for tag in tags}


@pytest.mark.parametrize(
    "changes", [{"depth": 1}, pytest.param({}, marks=pytest.mark.slow)], ids=["one block", "all blocks"]
)
def test_how_many_of_timms_names_are_accepted(changes):
    found = judge(names(), **changes)
    assert len(found) >= 178
    assert {tag for tag, reason in found.items() if reason} == set(REFUSED)
    assert all(words in found[tag] for tag, words in REFUSED.items())
    assert sum(reason is None for reason in found.values()) >= 172


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("vit_tiny_patch16_224", {"num_classes": 0}, "no class head"),
        ("vit_tiny_patch16_224", {"global_pool": "max"}, "global_pool='max'"),
        ("vit_tiny_patch16_224", {"global_pool": "avgmax"}, "no weighted mean of tokens"),
        ("vit_tiny_patch16_224", {"global_pool": "prr"}, "global_pool='prr'"),
        ("vit_tiny_patch16_224", {"block_fn": ParallelScalingBlock}, "ParallelScalingBlock"),
        ("vit_dwee_patch16_reg1_gap_256", {}, "difference of two"),
        ("swin_tiny_patch4_window7_224", {}, "not a timm ViT with global attention"),
        ("resnet18", {}, "not a timm ViT with global attention"),
        ("cait_xxs24_224", {}, "not a timm ViT with global attention"),
        ("xcit_nano_12_p16_224", {}, "not a timm ViT with global attention"),
        ("samvit_base_patch16", {}, "cannot be explained"),
        ("mvitv2_tiny", {}, "cannot be explained"),
        ("naflexvit_base_patch16_gap", {}, "cannot be explained"),
    ],
)
def test_a_model_that_cannot_be_explained_is_refused(name, changes, words):
    with pytest.raises(UserError, match=words):
        ViT(blueprint(name, **changes))


def test_a_model_of_transformers_is_sent_to_timm():
    model = type("DeiTForImageClassification", (torch.nn.Module,), {"__module__": "transformers.models.deit"})()
    model.config = SimpleNamespace(model_type="deit")
    with pytest.raises(UserError, match="use timm's weights of the same kind, such as deit_base_distilled_patch16_224"):
        ViT(model)


def test_attention_in_windows_is_found_by_its_shape():
    """A model may have every part and still not attend globally; then its attention says so."""
    model = build("plain")

    class Windows(type(model.blocks[0].attn)):
        def forward(self, x, **options):
            return torch.cat([super().forward(x[:, :1]), super().forward(x[:, 1:])], 1)

    model.blocks[1].attn.__class__ = Windows
    with pytest.raises(UserError, match="it is not global"):
        ViT(model).trace(torch.randn(1, 3, *SIZE))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_block_is_the_sum_of_its_parts(name):
    """Queries, keys, values, positions and the rest, against what the block itself did."""
    vit = ViT(build(name)).double()
    trace = vit.trace(torch.randn(2, 3, *SIZE, dtype=torch.float64))
    for layer, block in enumerate(vit.blocks):
        tokens, normed = trace.tokens[layer], trace.norm1[layer]
        scores = vit.attention_scores(layer, normed)
        attention = trace.attention[layer]
        torch.testing.assert_close(scores.softmax(-1), vit.layout.rows_of(attention))
        mixed = attention @ vit.qkv(layer, normed)[2]
        torch.testing.assert_close(after_attention(block, tokens, normed, mixed), trace.tokens[layer + 1])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_trace_from_the_middle_is_the_rest_of_the_whole(name):
    vit = ViT(build(name)).double()
    whole = vit.trace(torch.randn(2, 3, *SIZE, dtype=torch.float64))
    rest = vit.trace_from(whole.tokens[1], 1)
    torch.testing.assert_close(rest.logits, whole.logits)
    torch.testing.assert_close(rest.attention[-1], whole.attention[-1])
