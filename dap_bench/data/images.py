"""Encoded bytes -> an upright RGB picture, or a reason why not."""

import io
import warnings

from PIL import Image, ImageOps

MAX_BYTES = 64 * 2**20
MAX_PIXELS = 100_000_000


class BadImage(ValueError):
    """An image that cannot be used; it becomes a failed row, not the end of the run."""


def decode(data: bytes) -> Image.Image:
    """Decode any mode (CMYK, grey, palette, 16 bit) and EXIF orientation to upright RGB.

    Size is checked on the header, before any pixel is decoded.
    """
    if not data:
        raise BadImage("the image is empty")
    if len(data) > MAX_BYTES:
        raise BadImage(f"the image file has {len(data)} bytes, more than {MAX_BYTES}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image: Image.Image = Image.open(io.BytesIO(data))
        if image.width * image.height > MAX_PIXELS:
            raise BadImage(f"the image has {image.width} x {image.height} pixels, more than {MAX_PIXELS}")
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16-bit grey: Pillow would clip it at 255 instead of scaling
            image = image.point(lambda value: value / 256).convert("L")
        return image.convert("RGB")
    except BadImage:
        raise
    except Exception as error:  # Pillow raises many kinds, SyntaxError and struct.error among them
        raise BadImage(f"the image cannot be decoded ({type(error).__name__}: {error})") from error
