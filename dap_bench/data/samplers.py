"""Which images: exact, and repeatable by seed on every machine and with every library version.

Nothing is shuffled. Each position (and each class) gets the SHA-256 of its number and the seed as a lottery
ticket, and the lowest tickets win; so the draw depends on the labels and the seed alone.
"""

from collections import defaultdict
from collections.abc import Sequence
from hashlib import sha256

from dap_bench.errors import UserError, require_int


def _lowest(kind: str, numbers: Sequence[int], count: int, seed: int) -> list[int]:
    """The `count` numbers that drew the lowest tickets, in increasing order."""
    tickets = sorted((sha256(f"{kind}/{seed}/{number}".encode()).digest(), number) for number in numbers)
    return sorted(number for _, number in tickets[:count])


def non_balanced(labels: Sequence[int], n: int, seed: int) -> list[int]:
    """Positions of `n` images drawn at random from all of them.

    Args:
        labels: The class of every image, by position.
        n: How many images to draw.
        seed: Another seed draws other images.

    Returns:
        The positions drawn, in increasing order.

    Raises:
        UserError: If there are fewer images, or a number is not positive.
    """
    _positive(n=n)
    if n > len(labels):
        raise UserError(f"sampler.n={n} asks for more images than the source has ({len(labels)}); lower sampler.n.")
    return _lowest("image", range(len(labels)), n, seed)


def balanced(labels: Sequence[int], classes: int, per_class: int, seed: int) -> list[int]:
    """Positions of `per_class` images from each of `classes` classes drawn at random.

    Args:
        labels: The class of every image, by position.
        classes: How many classes to draw.
        per_class: How many images to draw of each.
        seed: Another seed draws other classes and images.

    Returns:
        The positions drawn, in increasing order.

    Raises:
        UserError: If there are fewer classes, a class has fewer images, or a number is not positive.
    """
    _positive(classes=classes, per_class=per_class)
    members: dict[int, list[int]] = defaultdict(list)
    for position, label in enumerate(labels):
        members[int(label)].append(position)
    if classes > len(members):
        raise UserError(
            f"sampler.classes={classes} asks for more classes than the source has ({len(members)}); "
            f"use sampler.classes={len(members)} or fewer."
        )
    drawn: list[int] = []
    for label in _lowest("class", sorted(members), classes, seed):
        if len(members[label]) < per_class:
            raise UserError(
                f"class {label} has {len(members[label])} images, fewer than sampler.per_class={per_class}; "
                "lower sampler.per_class or choose another sampler.seed."
            )
        drawn += _lowest("image", members[label], per_class, seed)
    return sorted(drawn)


def _positive(**counts: int) -> None:
    for name, count in counts.items():
        require_int(f"sampler.{name}", count)
