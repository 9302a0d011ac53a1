"""LeGrad (Bousselham et al., 2025).

    y^l = head(norm(readout(Y^l)))_c        E^l_j = mean_h mean_i relu(d y^l / d A^{l,h}[i, j])        map = sum_l E^l

Each layer is asked what the head would already say after it; attention itself is not multiplied in. `readout` is the
class token (cls), the mean of all tokens as in the original (mean), or the model's own logit for all layers (final).
Without a class token `cls` is what the head reads instead: the mean of the patches, whose rows then all have gradients.
The paper sums all layers, its code by default the last two: `last_layers`.
"""

import torch
from torch import Tensor

from dap_bench.explainers.base import Explanation, check
from dap_bench.vit import ViT


def legrad(
    vit: ViT,
    images: Tensor,
    classes: Tensor,
    layers: bool = False,
    *,
    readout: str = "cls",
    last_layers: str | int = "all",
) -> Explanation:
    check(vit, images, classes, readout=(readout, ("cls", "mean", "final")))
    trace = vit.trace(images, grad=["attention"])
    if readout == "final":
        gradients = trace.gradients(classes, "attention")
    else:
        gradients = trace.layer_gradients(classes, "attention", readout)
    maps = torch.stack([vit.layout.patches_of(gradient.relu().mean((1, 2))) for gradient in gradients], 1)
    first = 0 if last_layers == "all" else max(0, vit.depth - int(last_layers))
    maps[:, :first] = 0
    return Explanation(maps.sum(1), vit.grid, *((maps.cumsum(1), maps) if layers else ()))
