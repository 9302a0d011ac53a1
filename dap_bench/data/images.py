"""Encoded bytes -> an upright RGB picture, or a reason why not."""

import io
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from PIL import Image, ImageOps

FORMATS = {  # by file name; Pillow is asked for these and no others, some of which start programs
    ".bmp": "BMP",
    ".gif": "GIF",
    ".jpeg": "JPEG",
    ".jpg": "JPEG",
    ".png": "PNG",
    ".ppm": "PPM",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".webp": "WEBP",
}
MAX_BYTES = 64 * 2**20
MAX_PIXELS = 64_000_000
LARGE = 8_000_000  # pixels above which pictures are decoded one at a time
_one_by_one = ThreadPoolExecutor(1)  # one thread, because each has memory of its own that it keeps


class BadImage(ValueError):
    """An image that cannot be used; it becomes a failed row, not the end of the run."""


def decode(data: bytes, then: Callable[[Image.Image], Any] | None = None) -> Any:
    """Decode any mode (CMYK, grey, palette, 16 bit, floating point) and EXIF orientation to upright RGB.

    Size is checked on the header, before any pixel is decoded.

    Args:
        data: The picture's file.
        then: What is made of the picture; of large ones only one at a time is in memory until that is done. Defaults
            to None: nothing.

    Returns:
        The picture, or what was made of it.

    Raises:
        BadImage: If the file is none of the formats in FORMATS, damaged or too large.
    """
    if not data:
        raise BadImage("the image is empty")
    if len(data) > MAX_BYTES:
        raise BadImage(f"the image file has {len(data)} bytes, more than {MAX_BYTES}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image: Image.Image = Image.open(io.BytesIO(data), formats=sorted(set(FORMATS.values())))
        pixels = image.width * image.height
        if pixels > MAX_PIXELS:
            raise BadImage(f"the image has {image.width} x {image.height} pixels, more than {MAX_PIXELS}")
        if pixels > LARGE:
            return _one_by_one.submit(_finish, image, then).result()
        return _finish(image, then)
    except BadImage:
        raise
    except Exception as error:  # Pillow raises many kinds, SyntaxError and struct.error among them
        raise BadImage(f"the image cannot be decoded ({type(error).__name__}: {error})") from error


def _finish(image: Image.Image, then: Callable[[Image.Image], Any] | None) -> Any:
    upright = _rgb(ImageOps.exif_transpose(image))
    return then(upright) if then else upright


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey: Pillow would clip it at 255 instead of scaling
        image = image.point(lambda value: value / 256).convert("L")
    if image.mode == "F":  # Pillow would cut 0..1 down to black
        values = np.asarray(image)
        if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= 255):
            raise BadImage("an image of floating-point numbers must hold 0..1 or 0..255")
        image = Image.fromarray((values * (255 if values.max() <= 1 else 1)).round().astype(np.uint8))
    return image.convert("RGB")
