"""The `shapes` pictures: one patterned object of 12 classes on a textured background, with its true mask.

Everything is plain float64 arithmetic on a coordinate grid, driven by `np.random.RandomState`, whose stream
NumPy has frozen; so a picture depends on (index, seed) alone and not on the machine or a library's version.
A class is an outline with a surface pattern and a hue. Place, size, turn, phase and shade are random and tell
nothing, nor do the hues of the background and of the things that lie about: they are of every hue.
"""

from __future__ import annotations

import colorsys
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Array = NDArray[np.float64]
Box = tuple[slice, slice]
Points = Sequence[tuple[float, float]]

SIZE = 224
RIM = 2.5  # width in pixels of the line around the object


# Outlines: signed distance to the edge (negative inside) of an object about one unit in radius, y pointing down.


def _disc(x: Array, y: Array, cx: float = 0.0, cy: float = 0.0, r: float = 1.0) -> Array:
    return np.sqrt((x - cx) ** 2 + (y - cy) ** 2) - r


def _polygon(x: Array, y: Array, points: Points) -> Array:
    """Signed distance to any simple polygon: nearest edge, and the even-odd rule for the sign."""
    nearest = np.full(x.shape, np.inf)
    inside = np.zeros(x.shape, dtype=bool)
    for (ax, ay), (bx, by) in zip(points, [*points[1:], points[0]], strict=True):
        ex, ey = bx - ax, by - ay
        px, py = x - ax, y - ay
        along = np.clip((px * ex + py * ey) / (ex * ex + ey * ey), 0, 1)
        nearest = np.minimum(nearest, (px - ex * along) ** 2 + (py - ey * along) ** 2)
        if ay != by:
            inside ^= ((ay > y) != (by > y)) & (px < py * (ex / ey))
    return np.where(inside, -1.0, 1.0) * np.sqrt(nearest)


def _regular(corners: int, inner: float | None = None) -> Points:
    """Corners of a regular polygon or, with an inner radius, of a star."""
    radii = [1.0] * corners if inner is None else [1.0, inner] * corners
    turn = 2 * np.pi / len(radii)
    return [(r * np.sin(i * turn), -r * np.cos(i * turn)) for i, r in enumerate(radii)]


SQUARE = ((-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8))
CROSS = (
    (-0.36, -1),
    (0.36, -1),
    (0.36, -0.36),
    (1, -0.36),
    (1, 0.36),
    (0.36, 0.36),
    (0.36, 1),
    (-0.36, 1),
    (-0.36, 0.36),
    (-1, 0.36),
    (-1, -0.36),
    (-0.36, -0.36),
)
ARROW = ((0, -1), (0.85, -0.05), (0.4, -0.05), (0.4, 0.95), (-0.4, 0.95), (-0.4, -0.05), (-0.85, -0.05))


def _triangle(x: Array, y: Array) -> Array:
    return _polygon(x, y, _regular(3))


def _square(x: Array, y: Array) -> Array:
    return _polygon(x, y, SQUARE)


def _star(x: Array, y: Array) -> Array:
    return _polygon(x, y, _regular(5, 0.5))


def _hexagon(x: Array, y: Array) -> Array:
    return _polygon(x, y, _regular(6))


def _cross(x: Array, y: Array) -> Array:
    return _polygon(x, y, CROSS)


def _arrow(x: Array, y: Array) -> Array:
    return _polygon(x, y, ARROW)


def _ring(x: Array, y: Array) -> Array:
    return np.abs(_disc(x, y, r=0.7)) - 0.3


def _crescent(x: Array, y: Array) -> Array:
    return np.maximum(_disc(x, y), -_disc(x, y, cx=0.55, r=0.75))


def _heart(x: Array, y: Array) -> Array:
    """Two round lobes over a corner; the unit of the formula is turned into ours by `scale`."""
    scale = 0.6
    x, y = np.abs(x) * scale, 0.53 - y * scale
    lobe = np.sqrt((x - 0.25) ** 2 + (y - 0.75) ** 2) - np.sqrt(0.125)
    foot = np.maximum(x + y, 0) / 2
    corner = np.sqrt(np.minimum(x**2 + (y - 1) ** 2, (x - foot) ** 2 + (y - foot) ** 2)) * np.sign(x - y)
    return np.where(x + y > 1, lobe, corner) / scale


def _flower(x: Array, y: Array) -> Array:
    petals = [_disc(x, y, 0.58 * cx, 0.58 * cy, 0.41) for cx, cy in _regular(5)]
    return np.minimum.reduce([_disc(x, y, r=0.45), *petals])


def _drop(x: Array, y: Array) -> Array:
    return np.minimum(_disc(x, y, cy=0.35, r=0.62), _polygon(x, y, ((0, -1), (0.551, 0.065), (-0.551, 0.065))))


# Surface patterns: positive in one colour, negative in the other; k is the wave number, a and b are phases.


def _stripes(x: Array, y: Array, k: float, a: float, b: float) -> Array:
    return np.sin(k * x + a)


def _checks(x: Array, y: Array, k: float, a: float, b: float) -> Array:
    return 1.5 * np.sin(k * x * 0.8 + a) * np.sin(k * y * 0.8 + b)


def _dots(x: Array, y: Array, k: float, a: float, b: float) -> Array:
    return np.cos(k * x + a) + np.cos(k * y + b) - 0.7


def _circles(x: Array, y: Array, k: float, a: float, b: float) -> Array:
    return np.sin(k * np.sqrt(x * x + y * y) + a)


def _waves(x: Array, y: Array, k: float, a: float, b: float) -> Array:
    return np.sin(k * x + a + 1.5 * np.sin(0.8 * k * y + b))


def _spokes(x: Array, y: Array, k: float, a: float, b: float) -> Array:
    return np.sin(10 * np.arctan2(y, x) + a)


def _net(x: Array, y: Array, k: float, a: float, b: float) -> Array:
    u, v = 0.4 * k * (x + y), 0.4 * k * (x - y)
    return 1.5 * (np.minimum(np.abs(np.sin(u + a)), np.abs(np.sin(v + b))) - 0.4)


def _zigzag(x: Array, y: Array, k: float, a: float, b: float) -> Array:
    return np.sin(k * y + a + 1.8 * np.arcsin(np.sin(0.7 * k * x + b)))


def _bricks(x: Array, y: Array, k: float, a: float, b: float) -> Array:
    rows = 0.55 * k * y + a
    shift = np.floor(rows / np.pi) * (np.pi / 2)
    return 1.5 * np.minimum(np.abs(np.sin(rows)) - 0.33, np.abs(np.sin(0.33 * k * x + b + shift)) - 0.2)


def _tiles(x: Array, y: Array, k: float, a: float, b: float) -> Array:
    """Triangles: the sign flips across three families of lines that meet in common points."""
    u, v = 0.7 * k * x + a, 0.7 * k * (0.866 * y - 0.5 * x) + b
    return 2.5 * np.sin(u) * np.sin(v) * np.sin(u + v)


def _spiral(x: Array, y: Array, k: float, a: float, b: float) -> Array:
    return np.sin(0.8 * k * np.sqrt(x * x + y * y) + 3 * np.arctan2(y, x) + a)


def _bubbles(x: Array, y: Array, k: float, a: float, b: float) -> Array:
    """Little rings, on a square lattice and on its cell centres."""
    u, v = 0.6 * k * x + a, 0.6 * k * y + b
    one = (u % (2 * np.pi) - np.pi) ** 2 + (v % (2 * np.pi) - np.pi) ** 2
    two = ((u + np.pi) % (2 * np.pi) - np.pi) ** 2 + ((v + np.pi) % (2 * np.pi) - np.pi) ** 2
    return 0.6 - np.abs(np.sqrt(np.minimum(one, two)) - 1.3)


Outline = Callable[[Array, Array], Array]
Pattern = Callable[[Array, Array, float, float, float], Array]
_KINDS: dict[str, tuple[Outline, Pattern]] = {
    "striped disc": (_disc, _stripes),
    "checked square": (_square, _checks),
    "dotted triangle": (_triangle, _dots),
    "ringed star": (_star, _circles),
    "wavy cross": (_cross, _waves),
    "spoked ring": (_ring, _spokes),
    "netted crescent": (_crescent, _net),
    "zigzag heart": (_heart, _zigzag),
    "bricked hexagon": (_hexagon, _bricks),
    "tiled arrow": (_arrow, _tiles),
    "spiral flower": (_flower, _spiral),
    "bubbled drop": (_drop, _bubbles),
}
CLASSES: tuple[str, ...] = tuple(_KINDS)


def label_of(index: int) -> int:
    """Class of picture `index`; the classes take turns, so any run of 12 pictures holds each of them once.

    Args:
        index: The picture's number.

    Returns:
        A class of `CLASSES`, by number.
    """
    return index % len(CLASSES)


def draw(index: int, seed: int = 0) -> tuple[Image.Image, Image.Image]:
    """Draw a picture and the mask of its object.

    Args:
        index: The picture's number, which decides its class.
        seed: The series it belongs to. Defaults to 0.

    Returns:
        The RGB picture of 224 x 224 pixels, and the mask (mode L, 0 or 255).
    """
    _, picture, mask = layers(index, seed)
    return Image.fromarray(picture), Image.fromarray(mask)


def layers(index: int, seed: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]:
    """Draw a picture, and the same scene without its object.

    Args:
        index: The picture's number.
        seed: The series it belongs to. Defaults to 0.

    Returns:
        The scene [H,W,3] without its object, the picture [H,W,3] and the mask [H,W], as uint8.
    """
    rs = np.random.RandomState([seed, index])  # both numbers are kept whole, so no two pairs share a stream
    radius = rs.uniform(34, 63)
    cx, cy = rs.uniform(radius + 5, SIZE - radius - 5, 2)
    canvas = _background(rs)
    for _ in range(rs.randint(2, 5)):
        _add_distractor(canvas, rs, cx, cy, radius)
    grain = rs.randint(-7, 8, (SIZE, SIZE))
    empty = _to_bytes(canvas + grain)
    box, alpha = _add_object(canvas, rs, label_of(index), cx, cy, radius)
    picture, mask = empty.copy(), np.zeros((SIZE, SIZE), np.uint8)
    picture[box] = _to_bytes(canvas[:, *box] + grain[box])
    mask[box] = np.where(alpha >= 0.5, 255, 0)
    return empty, picture, mask


def _to_bytes(canvas: Array) -> NDArray[np.uint8]:
    return np.ascontiguousarray(np.clip(np.rint(canvas), 0, 255).astype(np.uint8).transpose(1, 2, 0))


def _colour(hue: float, saturation: float, value: float) -> Array:
    return 255 * np.array(colorsys.hsv_to_rgb(hue, saturation, value)).reshape(3, 1, 1)


def _field(rs: np.random.RandomState, waves: int, shortest: float, longest: float) -> Array:
    """Smooth random surface of mean 0 and scale 1: plane waves, each made of two outer products for speed."""
    t = np.arange(SIZE)
    total = np.zeros((SIZE, SIZE))
    for _ in range(waves):
        turn, phase = rs.uniform(0, 2 * np.pi, 2)
        k = 2 * np.pi / rs.uniform(shortest, longest)
        u, v = k * np.cos(turn) * t + phase, k * np.sin(turn) * t
        total += np.outer(np.cos(v), np.cos(u)) - np.outer(np.sin(v), np.sin(u))
    return total / np.sqrt(waves / 2)


def _background(rs: np.random.RandomState) -> Array:
    """Muted texture, colour channel first: three soft colours mixed by smooth fields, with fine ripples on top."""
    hue, value = rs.uniform(), rs.uniform(0.4, 0.75)
    first, second, third = (
        _colour((hue + rs.uniform(-0.25, 0.25)) % 1, rs.uniform(0.15, 0.45), value + rs.uniform(-0.15, 0.15))
        for _ in range(3)
    )
    mix = np.clip(0.5 + 0.35 * _field(rs, 4, 70, 260), 0, 1)
    extra = np.clip(0.35 + 0.35 * _field(rs, 4, 50, 160), 0, 1)
    ripples = _field(rs, 5, 12, 40)
    base = first + mix * (second - first)
    return base + extra * (third - base) + 4 * ripples


def _add_distractor(canvas: Array, rs: np.random.RandomState, cx: float, cy: float, radius: float) -> None:
    """Put a small plain thing of no class (blob, line or polygon) on the canvas, beside the object to come."""
    size = rs.uniform(9, 19)
    for _ in range(20):
        x0, y0 = rs.uniform(size, SIZE - size, 2)
        if np.hypot(x0 - cx, y0 - cy) > radius + 0.8 * size:
            break
    turn = rs.uniform(0, 2 * np.pi)
    box, x, y = _local(x0, y0, size * 1.1 + 2, turn)
    kind = rs.randint(3)
    if kind == 0:
        flat = rs.uniform(0.55, 1)
        distance = (np.sqrt(x * x + (y / flat) ** 2) - size) * flat
    elif kind == 1:
        half = size - 3
        distance = np.sqrt(np.maximum(np.abs(x) - half, 0) ** 2 + y * y) - rs.uniform(1.5, 3)
    else:
        corners = rs.randint(3, 6)
        angles = (np.arange(corners) + rs.uniform(-0.25, 0.25, corners)) * (2 * np.pi / corners)
        distance = _polygon(x, y, [(size * np.cos(t), size * np.sin(t)) for t in angles])
    _paint(canvas[:, *box], _coverage(distance), _colour(rs.uniform(), rs.uniform(0.2, 0.9), rs.uniform(0.2, 1)))


def _add_object(
    canvas: Array, rs: np.random.RandomState, label: int, cx: float, cy: float, radius: float
) -> tuple[Box, Array]:
    """Put the patterned object of class `label` on the canvas; return where, and how much of each pixel it covers."""
    outline, pattern = _KINDS[CLASSES[label]]
    box, x, y = _local(cx, cy, radius * 1.15 + 2, rs.uniform(-0.5, 0.5))
    x, y = x / radius, y / radius
    ground = canvas[:, *box].mean(axis=(1, 2), keepdims=True)
    for _ in range(50):  # a light and a dark shade of the class's hue, both unlike the ground they lie on
        hue = (label / len(CLASSES) + rs.uniform(-0.02, 0.02)) % 1
        light = _colour(hue, rs.uniform(0.25, 0.55), rs.uniform(0.88, 1))
        dark = _colour(hue, rs.uniform(0.75, 1), rs.uniform(0.3, 0.6))
        if min(np.abs(light - ground).sum(), np.abs(dark - ground).sum()) > 150 and (light - dark).sum() > 300:
            break
    colours = (light, dark) if rs.uniform() < 0.5 else (dark, light)
    rim = 20.0 if ground.mean() > 110 else 245.0
    distance = outline(x, y) * radius
    k = 2 * np.pi / rs.uniform(0.36, 0.46)
    a, b = rs.uniform(0, 2 * np.pi, 2)
    surface = np.clip(0.5 + 2 * pattern(x, y, k, a, b), 0, 1)
    skin = colours[0] + surface * (colours[1] - colours[0])
    _paint(skin, _coverage(-RIM - distance), np.full((3, 1, 1), rim))
    alpha = _coverage(distance)
    _paint(canvas[:, *box], alpha, skin)
    return box, alpha


def _local(cx: float, cy: float, reach: float, turn: float) -> tuple[Box, Array, Array]:
    """The part of the canvas within `reach` of a centre, and its pixels' coordinates turned about that centre."""
    rows, columns = (slice(max(0, int(c - reach)), min(SIZE, int(c + reach) + 1)) for c in (cy, cx))
    y, x = np.mgrid[rows, columns]
    u, v = x + 0.5 - cx, y + 0.5 - cy
    return (rows, columns), u * np.cos(turn) + v * np.sin(turn), v * np.cos(turn) - u * np.sin(turn)


def _coverage(distance: Array) -> Array:
    """How much of a pixel lies inside an edge at this signed distance in pixels: an antialiased edge."""
    return np.clip(0.5 - distance, 0, 1)


def _paint(canvas: Array, alpha: Array, colour: Array) -> None:
    """Blend a colour, or a picture of the same size, into the canvas in place."""
    canvas += alpha * (colour - canvas)
