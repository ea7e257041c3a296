"""The book's one visual style and its recurring figures.

Figures have an opaque light background: they read the same on the light and the dark page. Colours are those of
Okabe and Ito, which stay apart for colour-blind readers; a method keeps its colour through the whole book.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.colors import colorConverter, to_rgb

from itm_utils.errors import input_error

INK = "#22303c"
PAPER = "#fdfcf9"
METHOD_COLOURS = {
    "chance": "#9a9a9a",
    "mean-pool": "#6b7a8f",
    "VSE++": "#999933",
    "SCAN": "#0072b2",
    "BFAN": "#56b4e9",
    "PFAN": "#117733",
    "VSRN": "#e69f00",
    "SAEM": "#882255",
    "SGRAF": "#44aa99",
    "MMCA": "#cc79a7",
    "DCPA": "#d55e00",
    "AOQ": "#332288",
    "CCR/CCS": "#009e73",
    "oracle": "#000000",
}
# The theme "whitegrid" of seaborn with its palette "deep", written out: a run that draws nothing goes without seaborn,
# pandas and scipy, which take longer to import than a small run trains. Colour maps are named where they are used.
SERIES = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974", "#64b5cd")
LETTERS = {"b": SERIES[0], "g": SERIES[2], "r": SERIES[3], "m": SERIES[4], "y": SERIES[8], "c": SERIES[9]}
STYLE = {
    "figure.facecolor": PAPER,
    "figure.figsize": (6.4, 3.6),
    "figure.dpi": 110,
    "figure.constrained_layout.use": True,
    "savefig.facecolor": PAPER,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["Arial", "DejaVu Sans", "Liberation Sans", "Bitstream Vera Sans", "sans-serif"],
    "font.size": 10,
    "text.color": INK,
    "axes.axisbelow": True,
    "axes.edgecolor": "#c9c5bb",
    "axes.facecolor": PAPER,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 10,
    "axes.linewidth": 1.25,
    "axes.prop_cycle": cycler(color=[to_rgb(colour) for colour in SERIES]),
    "axes.spines.left": True,
    "axes.spines.bottom": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "grid.color": "#e6e2d8",
    "grid.linestyle": "-",
    "grid.linewidth": 1.0,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.title_fontsize": 12,
    "lines.linewidth": 1.5,
    "lines.markersize": 6.0,
    "lines.solid_capstyle": "round",
    "patch.edgecolor": "w",
    "patch.force_edgecolor": True,
    "patch.linewidth": 1.0,
}
TICKS = {
    "color": INK,
    "direction": "out",
    "labelsize": 9,
    "major.size": 6,
    "major.width": 1.25,
    "minor.size": 4,
    "minor.width": 1.0,
    **dict.fromkeys(("bottom", "top", "left", "right"), False),
}


def __getattr__(name: str) -> Any:
    """WEIGHTS, the colours of attention weights and of whatever starts at zero; SCORES, of scores, which have a sign."""
    if name not in ("WEIGHTS", "SCORES"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import seaborn as sns  # here: see STYLE

    light = sns.light_palette("#0072b2", as_cmap=True)
    return light if name == "WEIGHTS" else sns.diverging_palette(30, 245, s=85, l=55, as_cmap=True)


def use_style() -> None:
    """Set the style for every figure that follows."""
    known: Any = matplotlib.rcParams  # its stubs want one type for all values
    ticks = {f"{axis}tick.{name}": value for axis in "xy" for name, value in TICKS.items()}
    known.update(STYLE | {name: value for name, value in ticks.items() if name in known})
    converter: Any = colorConverter
    for letter, colour in (LETTERS | {"k": (0.1, 0.1, 0.1)}).items():
        converter.colors[letter] = converter.cache[letter] = to_rgb(colour)


def method_colour(name: str) -> str:
    """The colour of a method; variants (``"SCAN t2i"``) share that of their method."""
    for method, colour in METHOD_COLOURS.items():
        if name == method or name.startswith(method + " "):
            return colour
    raise input_error("method", repr(name), f"one of {', '.join(METHOD_COLOURS)}, or one of them and a space and more")


def matrix(
    values: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    what: str,
    ax: Axes | None = None,
    signed: bool = True,
) -> Axes:
    """Annotated heat map of a small matrix: scores (``signed``) or attention weights.

    values: (rows, columns). what: the label of the colour bar.
    """
    import seaborn as sns  # here: see STYLE

    values = np.asarray(values)
    limit = float(np.abs(values).max()) or 1.0
    cell = max(0.9, 0.1 * max(len(name) for name in columns))  # inches: labels must not run into each other
    ax = ax or plt.subplots(figsize=(1.8 + cell * len(columns), 1.0 + 0.55 * len(rows)))[1]
    sns.heatmap(
        values,
        annot=True,
        fmt=".2f",
        cmap=__getattr__("SCORES" if signed else "WEIGHTS"),
        vmin=-limit if signed else 0.0,
        vmax=limit,
        xticklabels=list(columns),
        yticklabels=list(rows),
        linewidths=1.5,
        linecolor=PAPER,
        cbar_kws={"label": what},
        ax=ax,
    )
    ax.tick_params(axis="y", rotation=0)
    return ax


def training_curves(
    log: Sequence[Mapping[str, Any]], *, metric: str = "rsum", name: str = "mean-pool"
) -> tuple[Axes, Axes]:
    """Training loss per step (thin) with its running mean (thick), and a validation metric where it was measured."""
    loss = np.array([[record["step"], record["loss"]] for record in log if "loss" in record])
    measured = np.array([[record["step"], record[f"val_{metric}"]] for record in log if f"val_{metric}" in record])
    _, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.2))
    colour = method_colour(name)
    left.plot(*loss.T, color=colour, alpha=0.25, linewidth=0.8, label="one batch")
    window = max(1, len(loss) // 25)
    smooth = np.convolve(loss[:, 1], np.full(window, 1 / window), mode="valid")
    left.plot(loss[window - 1 :, 0], smooth, color=colour, label=f"running mean of {window} batches")
    left.set(xlabel="training step", ylabel="loss", ylim=(0, None))
    left.legend()
    right.plot(*measured.T, color=colour, marker="o", markersize=4)
    right.set(xlabel="training step", ylabel=f"{metric} on dev")
    return left, right


def intervals(values: Mapping[str, tuple[float, float, float]], *, what: str, ax: Axes | None = None) -> Axes:
    """Dot plot with one row per method: its value as a dot, its interval as a line.

    values: method → (value, low, high).
    """
    ax = ax or plt.subplots(figsize=(6.4, 0.9 + 0.45 * len(values)))[1]
    for row, (name, (value, low, high)) in enumerate(values.items()):
        ax.plot(
            [low, high],
            [row, row],
            color=method_colour(name),
            linewidth=3,
            alpha=0.45,
            solid_capstyle="round",
        )
        ax.plot(value, row, "o", color=method_colour(name), markersize=7)
        ax.annotate(f"{value:.1f}", (high, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9)
    ax.set(yticks=range(len(values)), yticklabels=list(values), xlabel=what, ylim=(len(values) - 0.5, -0.5))
    ax.grid(axis="y", visible=False)
    return ax


def rsum_and_r1(recalls: Mapping[str, float]) -> tuple[float, float]:
    """rsum, and R@1 of both directions added, of recalls by name."""
    return recalls["rsum"], recalls["i2t_r1"] + recalls["t2i_r1"]


def draw_two_axes(curve: Mapping[float, tuple[float, float]], what: str, chosen: float, name: str) -> Axes:
    """Draw rsum (left axis) and R@1 of both directions added (right axis) against a setting; return the left axis.

    curve: setting → :func:`rsum_and_r1`. what: the setting. chosen: its value in the run, dotted. name: of the method.
    """
    _, left = plt.subplots(figsize=(6.4, 3.4))
    right = left.twinx()
    lines = []
    for ax, column, style, label in ((left, 0, "o-", "rsum"), (right, 1, "s--", "R@1 of i2t + R@1 of t2i")):
        values = [numbers[column] for numbers in curve.values()]
        colour = method_colour(name) if ax is left else INK
        lines += ax.plot(list(curve), values, style, color=colour, label=label)
        ax.set_ylabel(label)
    right.grid(visible=False)
    left.axvline(chosen, color="0.6", linestyle=":")
    left.set(xlabel=what)
    left.legend(handles=lines)
    return left
