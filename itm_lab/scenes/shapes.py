"""The twelve toys as distance functions: how far a point is from the outline, negative inside.

Coordinates are in units of the toy's radius, y pointing down. Only ``+ - * /``, square roots, minima and
comparisons are used: IEEE 754 fixes those to the last bit, so every machine draws the same toy.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Array = np.ndarray
Part = tuple[Array, float | tuple[int, int, int]]  # a mask in [0, 1] and a tone: a factor, or a colour of its own

CREAM = (250, 238, 212)
INK = (38, 34, 52)


def circle(x: Array, y: Array, cx: float, cy: float, radius: float) -> Array:
    """Distance to a circle."""
    return np.sqrt((x - cx) * (x - cx) + (y - cy) * (y - cy)) - radius


def box(x: Array, y: Array, cx: float, cy: float, half_w: float, half_h: float, corner: float = 0.0) -> Array:
    """Distance to a box with rounded corners."""
    dx = abs(x - cx) - (half_w - corner)
    dy = abs(y - cy) - (half_h - corner)
    px, py = np.maximum(dx, 0.0), np.maximum(dy, 0.0)
    return np.sqrt(px * px + py * py) + np.minimum(np.maximum(dx, dy), 0.0) - corner


def oval(x: Array, y: Array, cx: float, cy: float, rx: float, ry: float) -> Array:
    """Distance to an ellipse, good enough near its outline."""
    px, py = (x - cx) / rx, (y - cy) / ry
    return (np.sqrt(px * px + py * py) - 1.0) * min(rx, ry)


def polygon(x: Array, y: Array, corners: list[tuple[float, float]]) -> Array:
    """Distance to a closed polygon (exact, inside and out)."""
    nearest = np.full(x.shape, 1e9)
    inside = np.zeros(x.shape, dtype=bool)
    for (ax, ay), (bx, by) in zip(corners, corners[1:] + corners[:1], strict=True):
        ex, ey, px, py = bx - ax, by - ay, x - ax, y - ay
        along = np.clip((px * ex + py * ey) / (ex * ex + ey * ey), 0.0, 1.0)
        qx, qy = px - ex * along, py - ey * along
        nearest = np.minimum(nearest, qx * qx + qy * qy)
        crosses = (ay > y) != (by > y)
        inside ^= crosses & ((px * ey - py * ex > 0.0) == (ey < 0.0))
    distance = np.sqrt(nearest)
    return np.where(inside, -distance, distance)


def ball(x: Array, y: Array) -> Array:
    return circle(x, y, 0.0, 0.0, 0.95)


def cube(x: Array, y: Array) -> Array:
    return polygon(x, y, [(0, -1), (0.88, -0.54), (0.88, 0.48), (0, 0.98), (-0.88, 0.48), (-0.88, -0.54)])


def ring(x: Array, y: Array) -> Array:
    return abs(circle(x, y, 0.0, 0.0, 0.67)) - 0.29


def star(x: Array, y: Array) -> Array:
    corners = [
        (0, -0.98), (0.26, -0.36), (0.93, -0.30), (0.42, 0.14), (0.58, 0.79),
        (0, 0.44), (-0.58, 0.79), (-0.42, 0.14), (-0.93, -0.30), (-0.26, -0.36),
    ]  # fmt: skip
    return polygon(x, y, corners) - 0.05


def heart(x: Array, y: Array) -> Array:
    lobes = np.minimum(circle(x, y, -0.44, -0.34, 0.5), circle(x, y, 0.44, -0.34, 0.5))
    tip = polygon(x, y, [(-0.9, -0.1), (0, -0.5), (0.9, -0.1), (0, 0.9)]) - 0.02
    return np.minimum(lobes, tip)


def moon(x: Array, y: Array) -> Array:
    return np.maximum(circle(x, y, -0.05, 0.0, 0.95), -circle(x, y, 0.42, -0.14, 0.72))


def flower(x: Array, y: Array) -> Array:
    petals = [(0.0, -0.56), (0.53, -0.17), (0.33, 0.45), (-0.33, 0.45), (-0.53, -0.17)]
    shape = circle(x, y, 0.0, 0.0, 0.4)
    for cx, cy in petals:
        shape = np.minimum(shape, circle(x, y, cx, cy, 0.38))
    return shape


def house(x: Array, y: Array) -> Array:
    return np.minimum(box(x, y, 0.0, 0.36, 0.62, 0.54), polygon(x, y, [(-0.92, -0.06), (0, -0.95), (0.92, -0.06)]))


def fish(x: Array, y: Array) -> Array:
    tail = polygon(x, y, [(0.35, 0.0), (0.95, -0.5), (0.82, 0.0), (0.95, 0.5)])
    fin = polygon(x, y, [(-0.35, -0.42), (0.15, -0.8), (0.3, -0.35)])
    return np.minimum(np.minimum(oval(x, y, -0.2, 0.0, 0.76, 0.52), tail), fin)


def boat(x: Array, y: Array) -> Array:
    hull = polygon(x, y, [(-0.95, 0.3), (0.95, 0.3), (0.6, 0.85), (-0.6, 0.85)])
    sail = polygon(x, y, [(-0.02, -0.95), (0.78, 0.14), (-0.02, 0.14)])
    jib = polygon(x, y, [(-0.16, -0.6), (-0.16, 0.14), (-0.66, 0.14)])
    mast = box(x, y, -0.08, -0.25, 0.06, 0.62)
    return np.minimum(np.minimum(hull, sail), np.minimum(jib, mast))


def mushroom(x: Array, y: Array) -> Array:
    cap = np.maximum(oval(x, y, 0.0, 0.1, 0.95, 1.0), y - 0.12)
    return np.minimum(cap, box(x, y, 0.0, 0.5, 0.3, 0.45, 0.15))


def cup(x: Array, y: Array) -> Array:
    body = box(x, y, -0.18, 0.05, 0.62, 0.8, 0.2)
    handle = abs(circle(x, y, 0.5, 0.05, 0.34)) - 0.11
    return np.minimum(body, handle)


OUTLINES: dict[str, Callable[[Array, Array], Array]] = {
    "ball": ball, "cube": cube, "ring": ring, "star": star, "heart": heart, "moon": moon,
    "flower": flower, "house": house, "fish": fish, "boat": boat, "mushroom": mushroom, "cup": cup,
}  # fmt: skip


def inner(distance: Array, softness: float) -> Array:
    """Coverage 0 .. 1 of what lies inside an outline; ``softness`` is one pixel in radii."""
    return np.clip(0.5 - distance / softness, 0.0, 1.0)


def parts(shape: str, x: Array, y: Array, pixel: float) -> list[Part]:
    """Details inside the outline, painted in order: faces of the cube, a door, an eye, a stem."""
    if shape == "cube":
        top = (y < 0.02 - 0.52 * abs(x)).astype(float)
        return [(top, 1.18), ((1.0 - top) * (x >= 0.0), 0.66)]
    if shape == "flower":
        return [(inner(circle(x, y, 0.0, 0.0, 0.27), pixel), CREAM)]
    if shape == "house":
        roof = inner(polygon(x, y, [(-0.92, -0.06), (0, -0.95), (0.92, -0.06)]), pixel)
        return [
            (roof, 0.68),
            (inner(box(x, y, -0.22, 0.58, 0.17, 0.34), pixel), INK),
            (inner(box(x, y, 0.28, 0.34, 0.15, 0.15), pixel), CREAM),
        ]
    if shape == "fish":
        return [
            (inner(circle(x, y, -0.55, -0.12, 0.15), pixel), CREAM),
            (inner(circle(x, y, -0.57, -0.12, 0.075), pixel), INK),
        ]
    if shape == "boat":
        return [(inner(np.maximum(0.22 - y, -9.0), pixel), 0.62)]
    if shape == "mushroom":
        return [(inner(0.13 - y, pixel), CREAM)]
    if shape == "cup":
        return [(inner(oval(x, y, -0.18, -0.6, 0.46, 0.13), pixel), 0.45)]
    return []
