"""The book's style is seaborn's theme, written out so that a run that draws nothing does without seaborn."""

from __future__ import annotations

import subprocess
import sys

import matplotlib as mpl
import pytest
from matplotlib.colors import colorConverter

from itm_lab.teaching import figures
from itm_lab.teaching.figures import INK, PAPER, use_style

OWN = {
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "figure.figsize": (6.4, 3.6),
    "figure.dpi": 110,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": "#c9c5bb",
    "grid.color": "#e6e2d8",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def test_the_style_is_the_theme_of_seaborn(monkeypatch: pytest.MonkeyPatch) -> None:
    import seaborn as sns  # here: no other test needs it to be collected

    for name in ("colors", "cache"):
        monkeypatch.setattr(colorConverter, name, dict(getattr(colorConverter, name)))
    with mpl.rc_context():
        mpl.rcdefaults()
        sns.set_theme(context="notebook", style="whitegrid", rc=OWN)
        theirs, letters = dict(mpl.rcParams), dict(colorConverter.colors)
        mpl.rcdefaults()
        sns.set_color_codes("reset")
        use_style()
        differing = {name for name, value in mpl.rcParams.items() if value != theirs[name]}
    assert differing == {"image.cmap"}  # "rocket" is there only after seaborn; the book names every colour map
    assert colorConverter.colors == letters


def test_colour_maps_come_when_they_are_asked_for() -> None:
    assert figures.WEIGHTS(0.0) != figures.WEIGHTS(1.0) and figures.SCORES(0.0) != figures.SCORES(1.0)
    with pytest.raises(AttributeError, match="NONE"):
        _ = figures.NONE


def test_what_a_chapter_imports_before_it_draws_is_without_seaborn_and_statistics() -> None:
    """Together they take longer to import than a small run trains, and every run is a process of its own."""
    modules = ("records.chapter", "evidence.ledger", "evidence.tables", "photos.sheet", "photos.panels", "scenes.show")
    code = "".join(f"import itm_lab.{module}\n" for module in modules) + (
        "import sys; from itm_lab.teaching.figures import use_style; use_style()\n"
        "print(sorted({'seaborn', 'pandas', 'scipy.stats', 'nltk', 'transformers'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said == "[]\n"
