"""A forest plot of claims: the paper's effect and ours on one line, as an SVG with the book's style."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from itm_lab.evidence.statistics import Interval
from itm_lab.evidence.verdicts import VERDICTS
from itm_lab.teaching.figures import INK, use_style

# Colours of Okabe and Ito, as in all figures; the same order as the words.
COLOURS: dict[str, str] = dict(
    zip(VERDICTS, ("#009e73", "#e69f00", "#0072b2", "#d55e00", "#cc79a7", "#56b4e9", "#6b7a8f"), strict=True)
)
STEP = 0.32  # inches for one claim
APART = 0.5  # how far several effects of one claim spread over its line, in lines


@dataclass(frozen=True)
class Row:
    """One claim. printed: effects of the paper's tables. ours: effects with their intervals."""

    name: str
    metric: str
    verdict: str
    printed: Sequence[float]
    ours: Sequence[Interval]


def forest(rows: Sequence[Row]) -> str:
    """The rows from top to bottom as SVG text; the same text for the same rows."""
    with mpl.rc_context(), plt.ioff():
        use_style()
        plt.rcParams |= {"svg.hashsalt": "forest", "svg.fonttype": "none"}
        figure, axes = plt.subplots(figsize=(7.6, 1.3 + STEP * len(rows)))
        for place, row in enumerate(rows):
            draw_row(axes, place, row)
        axes.axvline(0, color=INK, linewidth=0.9)
        axes.set(yticks=range(len(rows)), ylim=(len(rows) - 0.4, -0.6), xlabel="effect in points")
        axes.set_yticklabels([f"{row.name}, {row.metric}" for row in rows])
        axes.set_xscale("symlog", linthresh=5, linscale=1.4)
        axes.set_xlim(*limits(rows))
        axes.set_xticks(ticks := [t for t in TICKS if axes.get_xlim()[0] <= t <= axes.get_xlim()[1]])
        axes.set_xticklabels([f"{t:+d}".replace("-", "−") if t else "0" for t in ticks])
        axes.minorticks_off()
        axes.grid(visible=True, axis="y", linewidth=0.6)
        figure.legend(handles=legend(rows), loc="outside upper center", ncols=4, handletextpad=0.4, columnspacing=1.4)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        plt.close(figure)
    return text.getvalue()


TICKS = (-200, -100, -50, -20, -10, -5, -2, 0, 2, 5, 10, 20, 50, 100, 200)


def draw_row(axes: Axes, place: int, row: Row) -> None:
    """Diamonds of the paper a little above the middle of the line, our intervals a little below."""
    axes.scatter(
        row.printed, [place - 0.16] * len(row.printed), marker="D", s=24, facecolor="none", edgecolor=INK, linewidth=1.1, zorder=3
    )  # fmt: skip
    colour = COLOURS[row.verdict]
    for number, (value, low, high) in enumerate(row.ours):
        y = place + 0.12 + APART * (number / max(1, len(row.ours)))
        axes.plot([low, high], [y, y], color=colour, linewidth=2, alpha=0.6, solid_capstyle="round", zorder=2)
        axes.plot(value, y, "o", color=colour, markersize=5, zorder=3)


def limits(rows: Sequence[Row]) -> tuple[float, float]:
    """Both ends of the axis: zero, and every effect with some room."""
    ends = [0.0, *(value for row in rows for value in row.printed)]
    ends += [end for row in rows for one in row.ours for end in (one.low, one.high)]
    low, high = min(ends), max(ends)
    return min(-2.5, 1.25 * low), max(2.5, 1.25 * high)


def legend(rows: Sequence[Row]) -> list[Line2D]:
    """The paper's mark, and a dot for each verdict that has one."""
    known = [Line2D([], [], marker="D", linestyle="none", markerfacecolor="none", color=INK, label="the paper")]
    words = [word for word in VERDICTS if any(row.verdict == word and row.ours for row in rows)]
    ours = [Line2D([], [], marker="o", color=COLOURS[word], linewidth=2, label=f"ours, {word}") for word in words]
    return known + (ours or [Line2D([], [], linestyle="none", label="ours: no run yet")])
