"""Whatever an image file is, it becomes upright RGB or a reason."""

import io
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dap_bench.data import images
from dap_bench.data.images import BadImage, decode


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def quarters(mode="RGB"):
    """A 20 x 10 picture, its left half red and its right half blue."""
    image = Image.new("RGB", (20, 10), (255, 0, 0))
    image.paste((0, 0, 255), (10, 0, 20, 10))
    return image.convert(mode)


@pytest.mark.parametrize(
    ("mode", "kind"), [("RGB", "PNG"), ("P", "PNG"), ("P", "GIF"), ("RGBA", "PNG"), ("CMYK", "TIFF")]
)
def test_colour_modes_keep_their_colours(mode, kind):
    image = decode(encoded(quarters(mode), kind))
    assert (image.mode, image.size) == ("RGB", (20, 10))
    left, right = np.asarray(image, dtype=int)[5, [2, 17]]
    assert np.abs(left - [255, 0, 0]).max() <= 60
    assert np.abs(right - [0, 0, 255]).max() <= 60


def test_cmyk_jpeg():
    image = decode(encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95))
    red = np.asarray(image, dtype=int)[8, 8]
    assert image.mode == "RGB"
    assert red[0] > 200
    assert red[1:].max() < 60


@pytest.mark.parametrize("mode", ["L", "LA", "1"])
def test_grey_modes_become_three_equal_channels(mode):
    image = decode(encoded(Image.new("L", (8, 8), 255).convert(mode)))
    assert image.mode == "RGB"
    assert image.getpixel((3, 3)) == (255, 255, 255)


def test_sixteen_bit_grey_is_scaled_not_clipped():
    image = Image.fromarray(np.full((8, 8), 128 * 256, dtype=np.uint16))
    assert decode(encoded(image)).getpixel((0, 0)) == (128, 128, 128)


def test_exif_rotation_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees clockwise to see it upright
    image = decode(encoded(quarters(), "JPEG", exif=exif, quality=95))
    assert image.size == (10, 20)
    assert image.getpixel((5, 2))[0] > 200  # red is now above
    assert image.getpixel((5, 17))[2] > 200


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"not an image", "cannot be decoded"),
        (encoded(quarters())[:60], "cannot be decoded"),
        (encoded(Image.effect_noise((64, 64), 50), "JPEG")[:400], "cannot be decoded"),
    ],
)
def test_a_corrupt_image_has_a_reason(data, words):
    with pytest.raises(BadImage, match=words):
        decode(data)


def test_a_bomb_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(images, "MAX_PIXELS", 100)
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    with pytest.raises(BadImage, match="20 x 10 pixels, more than 100"):
        decode(encoded(Image.new("RGB", (20, 10))))


def test_a_huge_file_is_refused(monkeypatch):
    monkeypatch.setattr(images, "MAX_BYTES", 10)
    with pytest.raises(BadImage, match="more than 10"):
        decode(encoded(Image.new("RGB", (20, 10))))


def test_pillow_is_asked_for_no_format_that_starts_a_program(monkeypatch):
    """Encapsulated PostScript would be drawn by Ghostscript."""
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was started"))
    with pytest.raises(BadImage, match="cannot be decoded"):
        decode(encoded(quarters(), "EPS"))


@pytest.mark.parametrize("scale", [1.0, 255.0])
def test_floating_point_pictures_are_not_black(scale):
    values = np.tile(np.array([0.0, 0.2, 0.6, 1.0], dtype=np.float32) * scale, (4, 1))
    image = decode(encoded(Image.fromarray(values), "TIFF"))
    assert [image.getpixel((at, 0))[0] for at in range(4)] == [0, 51, 153, 255]


@pytest.mark.parametrize("value", [-1.0, 300.0, np.nan])
def test_floating_point_pictures_of_another_range_have_a_reason(value):
    values = np.full((4, 4), value, dtype=np.float32)
    with pytest.raises(BadImage, match="must hold 0..1 or 0..255"):
        decode(encoded(Image.fromarray(values), "TIFF"))


BOMBS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from dap_bench.data.images import decode

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) // 1024

before, data = peak(), Path(sys.argv[1]).read_bytes()
with ThreadPoolExecutor(8) as pool:
    list(pool.map(lambda _: decode(data, lambda image: image.resize((8, 8)).tobytes()), range(8)))
print(peak() - before)
"""


def test_many_small_files_of_many_pixels_are_decoded_one_at_a_time(tmp_path):
    """Eight files of some kilobytes, 7,000 pixels square: 150 MB each as pixels."""
    Image.new("P", (7000, 7000)).save(tmp_path / "bomb.png", optimize=True)
    assert (tmp_path / "bomb.png").stat().st_size < 50_000
    out = subprocess.run([sys.executable, "-c", BOMBS, str(tmp_path / "bomb.png")], capture_output=True, text=True)
    assert int(out.stdout) < 500, out.stderr


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 200), st.sampled_from(["PNG", "GIF", "JPEG", "TIFF", "BMP"]))
def test_damaged_files_never_raise_anything_else(garbage, at, kind):
    whole = encoded(Image.new("RGB", (9, 7), (1, 2, 3)), kind)
    for data in (garbage, whole[:at] + garbage + whole[at + len(garbage) :]):
        with suppress(BadImage):
            assert decode(data).mode == "RGB"
