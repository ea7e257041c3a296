"""From a scene to pixels: a place, then the toys with shadow, pattern, shading and outline, then light and noise.

``draw(scene)`` gives the 96 x 96 image of the dataset; ``draw(scene, scale=5)`` the same scene with more
pixels, for the eye. Arithmetic is kept to operations that are exact everywhere (see ``shapes.py``); sines
come from a table of rounded integers.
"""

from __future__ import annotations

import math

import numpy as np

from itm_lab.scenes.portable_random import PortableRandom
from itm_lab.scenes.shapes import OUTLINES, inner, parts
from itm_lab.scenes.world import CANVAS, UNIT, Scene, Toy

Array = np.ndarray

PAINT = {
    "red": (222, 48, 44), "orange": (245, 138, 28), "yellow": (248, 214, 48), "green": (62, 172, 74),
    "blue": (44, 104, 216), "purple": (134, 66, 186), "pink": (246, 142, 186), "white": (244, 244, 240),
}  # fmt: skip
DARK_MARKS = {"yellow", "white", "pink", "orange"}  # their stripes and spots are darker, all others' lighter

# Sine in 1/4096, by degree. Rounding makes it the same whatever the machine's mathematics library says.
SINE = np.array([round(math.sin(math.radians(degree)) * 4096) for degree in range(360)]) / 4096.0


def sine(degrees: Array | int) -> Array:
    """Table sine; fractions of a degree are cut off."""
    return SINE[np.asarray(np.floor(degrees), dtype=np.int64) % 360]


def draw(scene: Scene, scale: int = 1) -> Array:
    """(96 * scale, 96 * scale, 3) uint8."""
    rng = PortableRandom(scene.look)
    size = CANVAS * scale
    canvas = paint_place(scene.place, rng, size, scale)
    for toy in scene.toys:
        _paint_toy(canvas, toy, scale)
    brightness, red, blue = scene.light
    canvas *= np.array([brightness * red, brightness * 100, brightness * blue]) / 10_000.0
    if scale == 1:  # a camera's grain; large drawings are for people
        grain = rng.grid(3, size, size, 3)  # three draws per pixel: nearly a bell curve
        canvas += (grain[0] + grain[1] + grain[2] - 1.5) * 18.0
    return np.floor(np.clip(canvas, 0.0, 255.0) + 0.5).astype(np.uint8)


def toy_boxes(scene: Scene) -> Array:
    """(number of toys, 4) int: tight x1 y1 x2 y2 in pixels of each whole toy, one past the last pixel.

    What another toy hides is counted in, as an annotator does; what leaves the canvas is not.
    """
    return np.array([_tight_box(toy) for toy in scene.toys], dtype=np.int64)


def visible(scene: Scene) -> Array:
    """(number of toys,) share of each toy's pixels on the canvas that no later toy covers."""
    owner = np.full((CANVAS, CANVAS), -1)
    total = np.zeros(len(scene.toys))
    for k, toy in enumerate(scene.toys):
        rows, columns, x, y = _patch(toy, 1)
        mask = OUTLINES[toy.shape](x, y) < 0.0
        owner[rows, columns][mask] = k
        total[k] = mask.sum()
    return np.array([(owner == k).sum() for k in range(len(scene.toys))]) / total


# -- toys ------------------------------------------------------------------------------------------------------


def _patch(toy: Toy, scale: int, margin: float = 0.0) -> tuple[slice, slice, Array, Array]:
    """The pixels around a toy: row and column slices, and their coordinates in the toy's own frame (radii)."""
    cx, cy, radius = toy.x / UNIT * scale, toy.y / UNIT * scale, toy.radius / UNIT * scale
    reach = radius * 1.45 + 2.0 * scale + margin
    columns = slice(max(0, int(cx - reach)), min(CANVAS * scale, int(cx + reach) + 1))
    rows = slice(max(0, int(cy - reach)), min(CANVAS * scale, int(cy + reach) + 1))
    dx = (np.arange(columns.start, columns.stop) + 0.5 - cx)[None, :] / radius
    dy = (np.arange(rows.start, rows.stop) + 0.5 - cy)[:, None] / radius
    cos, sin = sine(toy.turn + 90), sine(toy.turn)
    x, y = cos * dx + sin * dy, cos * dy - sin * dx
    return rows, columns, (-x if toy.flip else x), y


def _tight_box(toy: Toy) -> list[int]:
    rows, columns, x, y = _patch(toy, 1)
    mask = OUTLINES[toy.shape](x, y) < 0.0
    ys, xs = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    left, top = columns.start, rows.start
    return [left + xs[0], top + ys[0], left + xs[-1] + 1, top + ys[-1] + 1]


def _paint_toy(canvas: Array, toy: Toy, scale: int) -> None:
    rows, columns, x, y = _patch(toy, scale)
    pixel = UNIT / toy.radius / scale  # one pixel in radii
    distance = OUTLINES[toy.shape](x, y)
    view = canvas[rows, columns]
    _paint_shadow(view, distance / pixel, scale)
    colour = np.clip(np.array(PAINT[toy.colour], dtype=float) + np.array(toy.tint), 0.0, 255.0)
    surface = _surface(toy, colour, x, y, pixel)
    surface = surface * _shading(toy, x, y, distance, pixel * scale)[..., None]
    surface += _gloss(toy, x, y)[..., None]
    rim = np.clip(1.0 + distance / (pixel * scale * 1.1), 0.0, 1.0)[..., None]
    surface = surface * (1.0 - 0.55 * rim)
    cover = inner(distance, pixel)[..., None]
    view *= 1.0 - cover
    view += np.clip(surface, 0.0, 255.0) * cover


def _paint_shadow(view: Array, pixels: Array, scale: int) -> None:
    """Darken what lies two pixels down and one to the right of the toy."""
    soft = 3.0 * scale
    shade = 0.38 * np.clip(0.7 - pixels / soft, 0.0, 1.0)
    down, right = 2 * scale, scale
    view[down:, right:] *= 1.0 - shade[:-down, :-right, None]


def _surface(toy: Toy, colour: Array, x: Array, y: Array, pixel: float) -> Array:
    """(rows, columns, 3) colour of the toy before light: pattern first, then its details."""
    if toy.colour in DARK_MARKS:
        marks = colour * 0.42
    else:
        marks = colour * 0.22 + 255.0 * 0.78
    marked = _pattern(toy.pattern, x, y, pixel)[..., None]
    surface = colour * (1.0 - marked) + marks * marked
    for mask, tone in parts(toy.shape, x, y, pixel):
        mask = mask[..., None]
        painted = surface * tone if isinstance(tone, float) else np.array(tone, dtype=float)
        surface = surface * (1.0 - mask) + painted * mask
    return surface


def _pattern(pattern: str, x: Array, y: Array, pixel: float) -> Array:
    """Coverage 0 .. 1 of the toy's marks."""
    if pattern == "striped":
        return inner(_sawtooth((x + y) / 0.56) * 0.56 - 0.14, pixel * 1.4)
    if pattern == "checked":
        a, b = _sawtooth(x / 0.84) - 0.25, _sawtooth(y / 0.84) - 0.25
        return inner(np.where((a < 0.0) == (b < 0.0), 1.0, -1.0) * np.minimum(abs(a), abs(b)) * 0.84, pixel)
    if pattern == "spotted":
        row = np.floor(y / 0.46 + 0.5)
        shift = 0.5 * (row - 2.0 * np.floor(row / 2.0))  # every other row is moved by half a step
        u, v = _sawtooth(x / 0.5 + shift), _sawtooth(y / 0.46)
        return inner(np.sqrt(u * u + v * v) * 0.48 - 0.145, pixel)
    return np.zeros(x.shape)


def _sawtooth(value: Array) -> Array:
    """Distance to the nearest integer, 0 .. 0.5."""
    return abs(value - np.floor(value + 0.5))


def _shading(toy: Toy, x: Array, y: Array, distance: Array, pixel: float) -> Array:
    """Light from the upper left: a sphere for the ball, a rounded edge for the others."""
    if toy.shape == "ball":
        height = np.sqrt(np.clip(1.0 - x * x - y * y, 0.0, 1.0))
        return 0.62 + 0.5 * np.clip(height * 0.75 - 0.4 * _upright(toy, x) - 0.5 * y, 0.0, 1.0)
    gy, gx = np.gradient(distance)
    length = np.sqrt(gx * gx + gy * gy) + 1e-9
    edge = np.clip(1.0 + distance / (0.34 if toy.shape == "ring" else 0.26), 0.0, 1.0)
    facing = -(0.55 * gx + 0.83 * gy) / length
    return 1.0 + 0.30 * edge * facing + 0.05 * (0.3 - y)


def _gloss(toy: Toy, x: Array, y: Array) -> Array:
    """A highlight on the ball."""
    if toy.shape != "ball":
        return np.zeros(x.shape)
    dx, dy = _upright(toy, x) + 0.34, y + 0.4
    return 120.0 * np.clip(1.0 - (dx * dx + dy * dy) / 0.06, 0.0, 1.0)


def _upright(toy: Toy, x: Array) -> Array:
    """x as seen on the canvas: light does not flip with the toy."""
    return -x if toy.flip else x


# -- places ----------------------------------------------------------------------------------------------------


def paint_place(place: str, rng: PortableRandom, size: int, scale: int) -> Array:
    """(size, size, 3) float64 background."""
    return PLACE_PAINTERS[place](rng, size, scale)


def clouds(rng: PortableRandom, size: int, rows: int, columns: int) -> Array:
    """(size, size) smooth random field in [0, 1): a coarse lattice, blended with a cubic."""
    lattice = rng.grid(rows + 2, columns + 2)
    return _stretch(_stretch(lattice, size, rows).T, size, columns).T


def _stretch(lattice: Array, size: int, cells: int) -> Array:
    """Blend axis 0 of a lattice to ``size`` samples."""
    at = (np.arange(size) + 0.5) * cells / size
    low = np.floor(at).astype(np.int64)
    t = at - low
    t = (t * t * (3.0 - 2.0 * t))[:, None]
    return lattice[low] * (1.0 - t) + lattice[low + 1] * t


def _blend(bottom: tuple[int, ...], top: tuple[int, ...], amount: Array) -> Array:
    """(size, size, 3) from one colour to the other."""
    low, high = np.array(bottom, dtype=float), np.array(top, dtype=float)
    return low + (high - low) * amount[..., None]


def _grass(rng: PortableRandom, size: int, scale: int) -> Array:
    meadow = 0.6 * clouds(rng, size, 5, 5) + 0.4 * clouds(rng, size, 12, 48)
    canvas = _blend((104, 152, 78), (158, 196, 106), meadow)
    for _ in range(14):  # daisies
        row, column = rng.below(CANVAS) * scale, rng.below(CANVAS) * scale
        canvas[row : row + scale, column : column + scale] = (240, 240, 214)
    return canvas


def _sea(rng: PortableRandom, size: int, scale: int) -> Array:
    rows = np.arange(size)[:, None] / scale
    columns = np.arange(size)[None, :] / scale
    sway = 2.4 * sine(columns * 9.0 + rng.below(360)) + 3.0 * clouds(rng, size, 3, 3)
    crest = np.clip(1.0 - abs(_sawtooth((rows + sway) / 11.0) * 11.0) / 1.6, 0.0, 1.0)
    depth = 0.5 * rows / CANVAS + 0.5 * clouds(rng, size, 4, 4)
    return _blend((118, 190, 206), (58, 136, 172), depth) + 34.0 * crest[..., None]


def _night(rng: PortableRandom, size: int, scale: int) -> Array:
    rows = np.arange(size)[:, None] / size
    glow = np.clip(0.7 * rows + 0.5 * clouds(rng, size, 4, 4) - 0.1, 0.0, 1.0)
    canvas = _blend((22, 24, 58), (78, 66, 122), glow)
    for _ in range(30):  # far stars
        row, column, light = rng.below(CANVAS) * scale, rng.below(CANVAS) * scale, rng.between(40, 130)
        canvas[row : row + max(1, scale // 2), column : column + max(1, scale // 2)] += light
    return canvas


def _sand(rng: PortableRandom, size: int, scale: int) -> Array:
    rows = np.arange(size)[:, None] / scale
    columns = np.arange(size)[None, :] / scale
    drift = columns * 0.22 + 9.0 * clouds(rng, size, 3, 3)
    ripple = _sawtooth((rows + drift) / 9.0)
    grains = clouds(rng, size, 48, 48)
    return _blend((206, 178, 130), (238, 216, 170), 0.9 * ripple + 0.55 * grains)


def _wall(rng: PortableRandom, size: int, scale: int) -> Array:
    row = np.arange(size)[:, None] // scale + rng.below(12)
    course = row // 12
    column = np.arange(size)[None, :] // scale + 12 * (course % 2) + rng.below(24)
    tones = rng.grid(10, 8)[course % 10, (column // 24) % 8]
    bricks = _blend((158, 96, 78), (192, 128, 102), 0.7 * tones + 0.3 * clouds(rng, size, 24, 24))
    mortar = ((row % 12) < 1) | ((column % 24) < 1)
    return np.where(mortar[..., None], np.array([206.0, 192.0, 178.0]), bricks)


def _sky(rng: PortableRandom, size: int, scale: int) -> Array:
    rows = np.arange(size)[:, None] / size
    fluff = 0.65 * clouds(rng, size, 4, 3) + 0.35 * clouds(rng, size, 10, 7)
    canvas = _blend((142, 190, 232), (206, 228, 242), rows * np.ones((1, size)))
    white = np.clip((fluff - 0.52) * 5.0, 0.0, 1.0)[..., None]
    return canvas * (1.0 - 0.8 * white) + 250.0 * 0.8 * white


PLACE_PAINTERS = {"grass": _grass, "sea": _sea, "night": _night, "sand": _sand, "wall": _wall, "sky": _sky}
