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
    """LeGrad: the positive gradient by attention of what the head would say after each block, summed over blocks.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W], as `vit.transform` makes them.
        classes: The class to explain in each image [B].
        layers: Also give the map as far as each layer, and what each adds by itself [B,L,P]. Defaults to False.
        readout: What the gradient is taken of: the head's logit of the class token (cls), or of the mean of all
            tokens (mean), as the authors do, after each block; or the model's own logit (final). Defaults to "cls".
        last_layers: How many of the last blocks are summed, or all; the authors' code takes 2. Defaults to "all".

    Returns:
        Maps of patches [B,P] on the grid `vit.grid`, not negative.

    Raises:
        UserError: If an option, an image or a class is not one that the method and the model take.
    """
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
