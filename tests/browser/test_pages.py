"""Every page of the built book: axe-core in both themes, nothing wider than its column, weight, console."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from itm_lab.publish.build import pages_of

ROOT = Path(__file__).resolve().parents[2]
# Long ones first.
PAGES = sorted(pages_of(ROOT / "_toc.yml"), key=lambda name: (not name.startswith("notebooks/"), name))
GRAVE = ("critical", "serious")
DESKTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
SIMPLE, CHAPTER = 1_000_000, 4_000_000  # bytes of a page with all that it loads; of one with formulas or figures
# In the dark only colours differ: one rule is asked again, all of them in the light.
CONTRAST, ALL_BUT_CONTRAST = {"runOnly": ["color-contrast"]}, {"rules": {"color-contrast": {"enabled": False}}}
ALIKE = 2  # texts of one style whose contrast is computed: the words of code are thousands, in a dozen colours
# Those texts: alike are elements of one tag, class, colour, background and place, in elements that are so, too.
TEXTS = """(alike) => {
  const known = new Map(), numbers = new Map(), counts = new Map(), chosen = new Set();
  const number = (words) => numbers.get(words) ?? (numbers.set(words, numbers.size), numbers.size - 1);
  const style = (node) => {
    if (!node) return -1;
    if (!known.has(node)) {
      const css = getComputedStyle(node);
      known.set(node, number([style(node.parentElement), node.tagName, ...["class", "disabled", "aria-disabled", "aria-hidden"].map(
        (name) => node.getAttribute(name)), css.color, css.backgroundColor, css.backgroundImage, css.opacity, css.position,
        css.fontSize, css.fontWeight, css.textShadow].join("|")));
    }
    return known.get(node);
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement, words = texts.currentNode.textContent.trim();
    if (!words || chosen.has(node) || !node.checkVisibility({visibilityProperty: true})) continue;
    const kind = `${style(node)} ${/[\\p{L}\\p{N}].|.[\\p{L}\\p{N}]/u.test(words)}`;  // axe excuses a single character
    counts.set(kind, (counts.get(kind) ?? 0) + 1);
    if (counts.get(kind) <= alike) chosen.add(node);
  }
  return [...chosen];
}"""
AXE = """([options, texts, alike]) => axe.run(
  texts ? {include: eval(texts)(alike)} : document, {resultTypes: ["violations"], preload: false, ...options})"""
OUTSIDE = """() => {
  const seen = (node) => { const box = node.getBoundingClientRect(); return box.width > 0 && box.height > 0; };
  const scrolls = (node) => node && (/(auto|scroll|hidden)/.test(getComputedStyle(node).overflowX) || scrolls(node.parentElement));
  const column = document.querySelector("article.bd-article").getBoundingClientRect();
  const wide = [...document.querySelectorAll("article.bd-article *")].filter(
    (node) => seen(node) && node.getBoundingClientRect().right > Math.max(column.right, innerWidth) + 1 && !scrolls(node.parentElement));
  const lines = [...document.querySelectorAll(".cell_output pre, .highlight-bash pre")].filter(
    (node) => seen(node) && node.scrollWidth > node.clientWidth + 1);
  return {
    page: document.scrollingElement.scrollWidth - innerWidth,
    wide: wide.slice(0, 3).map((node) => node.outerHTML.slice(0, 120)),
    lines: lines.slice(0, 3).map((node) => node.textContent.slice(0, 80)),
  };
}"""


@cache
def axe_source() -> str:
    """axe-core (MPL-2.0) as the package axe-playwright-python carries it."""
    package = pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed (extra dev)")
    return (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tab(browser: Any) -> Iterator[Any]:
    """One tab for all pages, offline, that remembers errors of the console and what was loaded."""
    context = browser.new_context(viewport=DESKTOP, offline=True, reduced_motion="reduce")
    context.set_default_timeout(120_000)  # a busy machine is no fault of the page
    page = context.new_page()
    page.add_init_script("localStorage.setItem('mode', 'light'); localStorage.setItem('theme', 'light');")
    page.errors = []
    page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.loaded = {}
    page.on("request", lambda request: page.loaded.setdefault(request.url.partition("?")[0].partition("#")[0]))
    yield page
    context.close()


def visit(tab: Any, html: Path, name: str) -> None:
    """Open a page and wait until its formulas are drawn."""
    tab.errors.clear()
    tab.loaded.clear()
    tab.goto((html / f"{name}.html").as_uri())
    tab.evaluate("() => window.MathJax && MathJax.startup ? MathJax.startup.promise.then(() => true) : true")


def grave(tab: Any, options: dict[str, Any], *texts: Any) -> list[str]:
    """Critical and serious findings of axe, a line each with the first places; texts: which ones alone are looked at."""
    found = tab.evaluate(AXE, [options, *(texts or (None, 0))])
    return [
        f"{one['impact']} {one['id']} ({len(one['nodes'])}): "
        + "; ".join(node["html"][:120] for node in one["nodes"][:3])
        for one in found["violations"]
        if one["impact"] in GRAVE
    ]


def too_pale(tab: Any) -> list[str]:
    """Texts of too little contrast, in the theme that is shown: of every style some are looked at."""
    return grave(tab, CONTRAST, TEXTS, ALIKE)


def test_axe_finds_what_is_wrong(tab: Any, html: Path) -> None:
    """The check itself: an image without alt text and grey on grey are found, also where only what is around differs."""
    visit(tab, html, "book/licence")
    tab.evaluate(axe_source())
    assert grave(tab, ALL_BUT_CONTRAST) == too_pale(tab) == []
    fine = "<div><p style='color: #666'>words</p></div>"
    add = "(html) => document.querySelector('article').insertAdjacentHTML('beforeend', html)"
    tab.evaluate(add, "<img src='a.png'>" + 5 * fine)
    assert "image-alt" in " ".join(grave(tab, ALL_BUT_CONTRAST)) and too_pale(tab) == []
    tab.evaluate(add, fine.replace("<div", "<div style='background: #999'"))
    assert "color-contrast (1)" in " ".join(too_pale(tab))


@pytest.mark.parametrize("name", PAGES)
def test_page(tab: Any, html: Path, name: str) -> None:
    tab.set_viewport_size(DESKTOP)
    visit(tab, html, name)
    assert tab.errors == []
    own = ("file:", "data:", "blob:")  # a blob is made by the page itself
    assert all(url.startswith(own) for url in tab.loaded), "something comes from the network"
    weight = sum(size_of(url) for url in tab.loaded)
    kinds = ("tex-chtml", "/_images/", "/_static/explorer/")  # formulas, figures, the data of the explorer
    rich = name.startswith("notebooks/") or any(kind in url for url in tab.loaded for kind in kinds)
    assert weight < (CHAPTER if rich else SIMPLE), f"{weight / 1e6:.2f} MB"
    at_desktop = tab.evaluate(OUTSIDE)
    tab.evaluate(axe_source())
    in_light = grave(tab, ALL_BUT_CONTRAST) + too_pale(tab)
    tab.evaluate(
        "() => { document.documentElement.dataset.theme = 'dark'; document.documentElement.dataset.mode = 'dark'; }"
    )
    in_dark = too_pale(tab)
    tab.set_viewport_size(PHONE)
    on_phone = tab.evaluate(OUTSIDE)
    assert in_light == []
    assert in_dark == []
    for found in (at_desktop, on_phone):
        assert found["page"] <= 0 and not found["wide"] and not found["lines"], json.dumps(found, indent=1)


def size_of(url: str) -> int:
    """Bytes of a file; an address with its data inside counts itself."""
    if url.startswith("data:"):
        return 0
    from urllib.parse import unquote, urlparse

    path = Path(unquote(urlparse(url).path))
    return path.stat().st_size if path.is_file() else 0


def test_first_columns_of_wide_tables_stay_in_sight_on_a_phone(tab: Any, html: Path) -> None:
    tab.set_viewport_size(PHONE)
    visit(tab, html, "book/lab-results")
    moved = tab.evaluate("""() => {
      const box = [...document.querySelectorAll(".pst-scrollable-table-container")].find((one) => one.scrollWidth > one.clientWidth + 40);
      if (!box) return null;
      const cell = box.querySelector("tbody tr > :first-child");
      const before = cell.getBoundingClientRect().left;
      box.scrollLeft = 40;
      return Math.abs(cell.getBoundingClientRect().left - before);
    }""")
    assert moved is not None and moved < 2


def test_folded_code_opens_by_keyboard(tab: Any, html: Path) -> None:
    tab.set_viewport_size(DESKTOP)
    visit(tab, html, "notebooks/02_scan")
    assert tab.evaluate("() => document.querySelectorAll('details.code-fold').length") > 3
    summary = tab.locator("details.code-fold > summary").first
    summary.focus()
    tab.keyboard.press("Enter")
    assert tab.evaluate("() => document.querySelector('details.code-fold').open")


def test_claims_are_named_in_the_contents_of_their_page(tab: Any, html: Path) -> None:
    visit(tab, html, "book/claims")
    named = tab.evaluate(
        "() => [...document.querySelectorAll('#pst-page-toc-nav a')].map((one) => one.textContent.trim())"
    )
    claims = [one for one in named if one.startswith(("MMCA-", "DCPA-", "AOQ-", "CC-"))]
    assert len(claims) == 62 and all(": " in one for one in claims)
