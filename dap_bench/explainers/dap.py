"""DAP, Decision-Aware Attention Propagation, and the variants of its ablation.

    s = prior(image, class), by default Grad-CAM        d = [1 .. 1, min-max(s)]        B^l = mean_h A^{l,h} + I

    variant     transition T^l                map: j of R's row r
    pairwise    RowNorm(B_ij d_i d_j)         R[r, j]            DAP
    source      RowNorm(B_ij d_j)             R[r, j]            equal to pairwise: d_i cancels within its row
    target      RowNorm(B_ij d_i)             R[r, j]            see `target`
    final       RowNorm(B_ij)                 R[r, j] * d_j
    uniform     RowNorm(B_ij)                 R[r, j]            equal to AR

The prior is 1 on every prefix token. Row r is the one that the head reads: the class token's, or without one the mean
of the patches' rows, which all count alike, also those to which the prior gives nothing.

Min-max makes some d_i exactly 0, and their literal pairwise rows 0/0. No step leads to such a row, because its column
is 0 too, so pairwise is computed in its source form. By the same cancellation `target` would be uniform;
two readings differ from it: `no_renorm` applies d_i after RowNorm, `zero_rows` leaves rows with d_i = 0 empty.

`smooth: true` takes the prior from its heatmap: enlarged to the image's pixels, and averaged over each patch again.
Where the prior is constant it says nothing: d = 1, the map is AR's, and `fallback` marks the image.
"""

from torch import Tensor

from dap_bench.explainers.ar import fuse, residual, rollout, row_norm
from dap_bench.explainers.base import Explainer, Explanation, check, checked, min_max
from dap_bench.vit import ViT

VARIANTS = ("pairwise", "source", "target", "final", "uniform")
TARGETS = ("no_renorm", "zero_rows")


def dap(
    vit: ViT,
    images: Tensor,
    classes: Tensor,
    layers: bool = False,
    *,
    prior: Explainer,
    variant: str = "pairwise",
    target: str = "no_renorm",
    smooth: bool = False,
) -> Explanation:
    """Decision-Aware Attention Propagation: attention rollout, each step weighed by how much a prior gives its tokens.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W], as `vit.transform` makes them.
        classes: The class to explain in each image [B].
        layers: Also give the map as far as each layer, and what each adds by itself [B,L,P]. Defaults to False.
        prior: The explainer whose map, scaled to 0..1, weighs the patches; `conf/method/dap.yaml` takes Grad-CAM.
        variant: Where the weights enter: at both tokens of a step (pairwise), which is DAP, or as in its ablation
            at the one attended to (source), at the one attending (target), at the final map alone (final), or
            nowhere (uniform), which is Attention Rollout. Layer maps of final are without the weights. Defaults to
            "pairwise".
        target: How target applies its weights: after each row was normalised (no_renorm), or by leaving rows of
            weight 0 empty (zero_rows). Defaults to "no_renorm".
        smooth: Take the prior from its heatmap: enlarged to pixels and averaged over each patch again. Defaults to
            False.

    Returns:
        Maps of patches [B,P] on the grid `vit.grid`, not negative. `fallback` [B] marks images whose prior is
        constant: their map is Attention Rollout's.

    Raises:
        UserError: If the prior does not return maps of the model's patches or pixels, or if an option, an image or
            a class is not one that the method and the model take.
    """
    check(vit, images, classes, variant=(variant, VARIANTS), target=(target, TARGETS))
    with vit.shared_traces():
        found = checked(prior(vit, images, classes), vit.grid, images)
        trace = vit.trace(images)
    if smooth:
        found = Explanation(found.heatmaps(vit.image_size).flatten(1).to(images), vit.image_size)
    scores = found.on(vit.grid).to(images.device)
    layout = trace.layout
    constant = scores.amax(1) == scores.amin(1)
    weights = layout.with_prefix(min_max(scores).masked_fill(constant[:, None], 1), 1)  # d [B,N]

    transitions = []
    for step in (residual(fuse(a, "mean")) for a in trace.attention):
        if variant in ("pairwise", "source"):
            transitions.append(row_norm(step * weights[:, None, :]))
        elif variant == "target":
            rows = weights if target == "no_renorm" else (weights > 0).to(weights)
            transitions.append(row_norm(step) * rows[:, :, None])
        else:
            transitions.append(row_norm(step))
    maps, layer_maps, single = rollout(transitions, layers, layout)
    if variant == "final":
        maps = maps * layout.patches_of(weights)
    return Explanation(maps, vit.grid, layer_maps, single, fallback=constant)
