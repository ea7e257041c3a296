"""One image file to pixels: upright, in colour, with eight bits, or a sentence that says why not."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

# What cameras, phones and browsers write. Formats that run another program to be read (EPS, WMF) stay out.
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".jpe", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".jp2", ".avif")
)
SMALLEST = 16  # pixels of the shorter side: of less, a grid of 6 x 6 cells would only repeat itself
LARGEST = 100_000_000  # pixels in memory at once
ORIENTATION = 0x0112  # the EXIF tag
# How to turn what the camera stored, by EXIF orientation; 1 is upright already.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
ON_ITS_SIDE = (5, 6, 7, 8)


class UnreadableError(Exception):
    """An image that cannot be used; the message says why."""


@dataclass(frozen=True, eq=False)
class ImageFile:
    """pixels: (h, w, 3) uint8, upright. size: width and height of the whole image, upright. notes: what was changed."""

    pixels: np.ndarray
    size: tuple[int, int]
    notes: tuple[str, ...] = ()


@cache
def formats() -> tuple[str, ...]:
    """Those of our formats that this build of Pillow can read."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def read_image(path: Path, side: int, squash: bool = False) -> ImageFile:
    """Read an image small. side: of the square it is squashed to, or its longest side, in pixels.

    Only as much is decoded as that asks for: a JPEG of 50 megapixels costs a few.
    """
    try:
        if path.stat().st_size == 0:
            raise UnreadableError("an empty file")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # large images have their own limit below, odd tags do no harm
            with Image.open(path, formats=formats()) as image:
                return _read(image, side, squash)
    except UnreadableError:
        raise
    except UnidentifiedImageError:
        raise UnreadableError("no image inside: its content is in none of the formats that are read") from None
    except Image.DecompressionBombError:
        raise UnreadableError("more pixels than can be decoded safely") from None
    except OSError as error:  # from the system if it has a number, from a decoder if not
        why = f"damaged ({_first_line(error)})" if error.errno is None else f"cannot be read ({error.strerror})"
        raise UnreadableError(why) from None
    except Exception as error:  # decoders fail in many ways on damaged bytes; each concerns this one image only
        raise UnreadableError(f"damaged ({_first_line(error)})") from None


def _read(image: Image.Image, side: int, squash: bool) -> ImageFile:
    """From an opened file to pixels."""
    (width, height), notes = image.size, []
    frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)  # an MPO is one photograph and its extras
    if frames > 1:
        notes.append(f"the first of {frames} frames")
    if min(width, height) < SMALLEST:
        raise UnreadableError(f"{width} x {height} pixels, fewer than {SMALLEST} on a side")
    image.draft(None, (2 * side, 2 * side))  # a JPEG can be decoded at an eighth of its size
    if image.width * image.height > LARGEST:
        raise UnreadableError(f"{width} x {height} pixels, more than {LARGEST // 10**6} million")
    image.load()
    turn, unreadable = _orientation(image)
    notes += unreadable
    if squash:
        target = (side, side)
    else:
        scale = min(1.0, side / max(image.size))
        target = max(1, round(scale * image.width)), max(1, round(scale * image.height))
    small = in_colour(image).resize(target, Image.Resampling.BICUBIC, reducing_gap=3.0)
    if turn in UPRIGHT:
        small = small.transpose(UPRIGHT[turn])  # after shrinking: the image is small by now
    size = (height, width) if turn in ON_ITS_SIDE else (width, height)
    return ImageFile(np.array(small), size, tuple(notes))


def _orientation(image: Image.Image) -> tuple[int, list[str]]:
    """The EXIF orientation, and a note where the EXIF data cannot be read: that is no reason to lose an image."""
    try:
        return int(image.getexif().get(ORIENTATION, 1)), []
    except Exception as error:  # EXIF is parsed from whatever bytes stand there
        return 1, [f"its EXIF data is damaged ({_first_line(error)}), so it is taken as it is stored"]


def in_colour(image: Image.Image) -> Image.Image:
    """Any mode as RGB: grey, palette, CMYK, 16 bits; what is transparent becomes white."""
    if image.mode.startswith("I"):
        image = _eight_bits(image)
    if image.mode == "F":
        raise UnreadableError("pixels that are measurements (mode F), not brightness")
    if image.has_transparency_data:
        behind = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(behind, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Sixteen bits scaled to eight; Pillow's own conversion would clip them, and nearly all would be white."""
    values = np.asarray(image).astype(np.int64)
    if image.mode != "I" or values.max() > 255:  # mode I has 32 bits, and files of 8 or 16 in them
        values = values // 257
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
