"""A control for maps of pixels: uniform noise per pixel.

    map_i ~ U(0, 1), drawn from the image's own generator, i a pixel

Removing scattered pixels changes an image otherwise than removing whole patches, whatever a method says of them. A map
that resolves pixels is therefore held against noise that does so too, a map of patches against `random`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dap_bench.errors import require_int
from dap_bench.explainers.base import Explanation, check
from dap_bench.isolation import content, generator
from dap_bench.vit import ViT


def random_pixels(
    vit: ViT, images: Tensor, classes: Tensor, layers: bool = False, ids: Sequence[str] = (), *, seed: int = 0
) -> Explanation:
    """A control that knows nothing: a number drawn uniformly from 0..1 for each pixel, by each image's own generator.

    Args:
        vit: The model.
        images: Normalised images [B,3,H,W], as `vit.transform` makes them.
        classes: The class to explain in each image [B].
        layers: Without effect: there are no layers. Defaults to False.
        ids: Names of the images, which their draws depend on; without names, their content. Defaults to ().
        seed: Another seed draws other maps. Defaults to 0.

    Returns:
        Maps of pixels [B,H*W]. They do not depend on `classes`.

    Raises:
        UserError: If an option, an image or a class is not one that the method and the model take.
    """
    check(vit, images, classes)
    require_int("seed", seed, least=0)
    height, width = vit.image_size
    names = list(ids) or list(map(content, images))
    draws = [torch.rand(height * width, generator=generator(f"{name}/{seed}")) for name in names]
    return Explanation(torch.stack(draws).to(images), vit.image_size)
