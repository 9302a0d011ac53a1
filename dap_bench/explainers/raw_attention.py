"""Raw attention: where the tokens that the head reads look in one block.

    map = row of fuse_h A^{l,h}        l: the last block

Nothing is propagated and the class is not looked at: the plainest map of a ViT, and the one to beat. The row is the one
that the head reads, over patches: the class token's; without a class token the mean of the patches' rows.
"""

import torch
from torch import Tensor

from dap_bench.explainers.ar import FUSIONS, fuse
from dap_bench.explainers.base import Explanation, check
from dap_bench.vit import ViT


def raw_attention(
    vit: ViT,
    images: Tensor,
    classes: Tensor,
    layers: bool = False,
    *,
    layer: int = -1,
    head_fusion: str = "mean",
) -> Explanation:
    """Raw attention: where the tokens that the head reads look in one block.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W], as `vit.transform` makes them.
        classes: The class to explain in each image [B].
        layers: Also give the map of each block [B,L,P]. Defaults to False.
        layer: The block; a negative number counts from the last. Defaults to -1.
        head_fusion: How a block's heads are joined: mean, max or min. Defaults to "mean".

    Returns:
        Maps of patches [B,P] on the grid `vit.grid`, not negative. They do not depend on `classes`.

    Raises:
        UserError: If an option, an image or a class is not one that the method and the model take.
    """
    check(vit, images, classes, head_fusion=(head_fusion, FUSIONS))
    number = vit.block_number(layer)
    trace = vit.trace(images)
    chosen = range(vit.depth) if layers else [number]
    maps = {block: trace.layout.map_of(fuse(trace.attention[block], head_fusion)) for block in chosen}
    return Explanation(maps[number], vit.grid, torch.stack(list(maps.values()), 1) if layers else None)
