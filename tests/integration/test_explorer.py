"""The attention explorer: its data from models, and its page in a browser, opened from the disk."""

from __future__ import annotations

import base64
import json
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from PIL import Image

from itm_lab.paths import Paths
from itm_lab.publish import explorer
from itm_lab.publish.explorer import chosen_families, write_explorer
from itm_lab.records.kept import KeptModel, kept_records
from itm_lab.records.receipts import read_receipt
from itm_lab.scenes import ScenesSpec, load_scenes, scenes_folder
from itm_utils.data.batches import WordCaptions, image_batch
from itm_utils.data.precomp import open_split
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.errors import ItmError
from itm_utils.matcher import Matcher
from itm_utils.models.bfan import BFAN
from itm_utils.models.scan import SCAN, NoAttention

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "book/_static/explorer"
SPEC = ScenesSpec(train=40, dev=10, test=60)


def untrained(kind: type[Matcher], name: str, **options: Any) -> KeptModel:
    """A kept model that has learned nothing, on a small Scenes."""
    folder = scenes_folder(SPEC)
    split, vocabulary = open_split(folder, "test"), Vocabulary.of_folder(folder)
    torch.manual_seed(len(name))
    model: Any = kind(vocabulary_size=len(vocabulary), image_dim=split.feature_dim, width=16, word_dim=8, **options)
    record = {"variant": name, "chapter": "02_scan", "seed": 5, "metrics": {"rsum": {"value": 12.34}}}
    record["inputs"] = {"weights": "a" * 64}
    return KeptModel(model.eval(), {"texts": vocabulary.fingerprint}, record, folder / name)


MODELS = (
    (SCAN, "SCAN", {}),
    (BFAN, "BFAN", {}),
    (NoAttention, "no attention", {}),
    (SCAN, "SCAN i2t", {"direction": "i2t"}),
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the explorer with data of three models that attend, and one that does not."""
    out = tmp_path_factory.mktemp("explorer")
    kept = [untrained(kind, name, **options) for kind, name, options in MODELS]
    said = write_explorer(kept, load_scenes("test", SPEC), open_split(scenes_folder(SPEC), "test"), out)
    assert "3 models" in said
    return out


def read_data(folder: Path) -> dict[str, Any]:
    """All that the page reads, as one tree."""
    whole = assigned(folder / "data.js")
    for number, model in enumerate(whole["models"]):
        model["attention"] = assigned(folder / f"attention/{number}.js")
    return whole


def assigned(path: Path) -> Any:
    """The JSON that a script assigns."""
    return json.loads(path.read_text(encoding="utf-8").partition(" = ")[2].removesuffix(";\n"))


@pytest.fixture(scope="module")
def data(written: Path) -> dict[str, Any]:
    return read_data(written)


def test_models_without_attention_are_left_out(data: dict[str, Any]) -> None:
    assert [model["name"] for model in data["models"]] == ["SCAN", "BFAN", "SCAN i2t"]


def test_families_have_a_base_and_edits_and_each_adds_a_kind() -> None:
    scenes, seen = load_scenes("test", SPEC).scenes, set[str]()
    families = chosen_families(scenes)
    assert 0 < len(families) <= explorer.FAMILIES
    for family in families:
        roles = [scenes[image].role for image in family]
        assert roles[0] == "base" and len(roles) == 3 and not {"alone", "retake"} & set(roles)
        assert set(roles) - seen
        seen |= set(roles)


def test_words_and_gaps_are_the_caption_and_twins_are_false_of_their_image(data: dict[str, Any]) -> None:
    captions = set(load_scenes("test", SPEC).folder.joinpath("test_caps.txt").read_text(encoding="utf-8").splitlines())
    for number, caption in enumerate(data["captions"]):
        text = caption["gaps"][0] + "".join(w + g for w, g in zip(caption["words"], caption["gaps"][1:], strict=True))
        assert (text in captions) == (caption["of"] == number) == (caption["kind"] == "")
        assert (caption["image"] in caption["true"]) == (caption["of"] == number)
        assert data["captions"][caption["of"]]["image"] == caption["image"]
    assert {caption["kind"] for caption in data["captions"]} >= {"", "attribute"}


def test_attention_scores_and_ranks_are_those_of_the_model(data: dict[str, Any]) -> None:
    kept, split, scenes = untrained(SCAN, "SCAN"), open_split(scenes_folder(SPEC), "test"), load_scenes("test", SPEC)
    images = [int(Path(image["file"]).stem) for image in data["images"]]
    shown, model = data["models"][0], kept.model
    for pair in range(0, len(data["pairs"]), 7):
        image, number = data["pairs"][pair]
        caption = data["captions"][number]
        if caption["kind"]:
            continue
        text = caption["gaps"][0] + "".join(w + g for w, g in zip(caption["words"], caption["gaps"][1:], strict=True))
        c = [one.text for one in scenes.captions].index(text)
        texts = WordCaptions(split, Vocabulary.of_folder(split.root)).batch(np.array([c]))
        with torch.inference_mode():
            sides = model.encode_images(image_batch(split, np.array([images[image]]))), model.encode_texts(texts)
            weights = model.attention(*sides)["t2i"].weights[0, 1:-1].numpy()
            every = model.encode_images(image_batch(split, np.arange(split.n_images)))
            scores = model.score(every, sides[1]).t2i[:, 0].numpy()
        stored = np.frombuffer(base64.b64decode(shown["attention"][pair]), dtype=np.uint8).reshape(
            len(caption["words"]), -1
        )
        real = [place for place, word in enumerate(text.replace(",", " ,").split()) if word != ","]
        np.testing.assert_allclose(stored / 255, weights[real], atol=0.6 / 255)
        assert shown["scores"][pair] == pytest.approx(scores[images[image]], rel=1e-3)
        assert abs(shown["ranks"][pair] - 1 - int((scores > scores[images[image]]).sum())) <= 1


def test_images_lie_beside_the_data_and_regions_are_named(written: Path, data: dict[str, Any]) -> None:
    for image in data["images"]:
        with Image.open(written / image["file"]) as opened:
            assert opened.size == (image["side"] * explorer.SCALE,) * 2
        assert len(image["boxes"]) == len(image["holds"]) == SPEC.knobs.regions
        assert "background" in image["holds"] and set(image["holds"]) - {"background"} <= set(
            re.split(", |; ", image["shows"])
        )


def test_too_much_data_and_no_model_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = load_scenes("test", SPEC), open_split(scenes_folder(SPEC), "test"), tmp_path
    with pytest.raises(ItmError, match="found no kept model that attends"):
        write_explorer([untrained(NoAttention, "none")], *place)
    monkeypatch.setattr(explorer, "LARGEST", 1_000)
    with pytest.raises(ItmError, match=r"bytes of data, expected at most 1,000"):
        write_explorer([untrained(SCAN, "SCAN")], *place)
    assert not list(tmp_path.iterdir())


def test_committed_data_are_those_of_the_kept_models() -> None:
    weights = {read_receipt(path)["inputs"]["weights"] for path in kept_records(Paths(ROOT).weights)}
    shown = "book/explorer" in (ROOT / "_toc.yml").read_text(encoding="utf-8")
    assert shown == (SOURCES / "data.js").is_file()
    if not shown:
        pytest.skip("the page is not in the book yet: its models have not been kept")
    scripts = [SOURCES / "data.js", *(SOURCES / "attention").iterdir()]
    assert sum(path.stat().st_size for path in scripts) <= explorer.LARGEST
    assert {model["weights"] for model in read_data(SOURCES)["models"]} <= weights


# ------------------------------------------------------------------------------------- in a browser

PAGE = """<!doctype html>
<html lang="en" data-theme="light"><head><meta charset="utf-8"><title>Explorer</title>
<style>:root {{ --pst-color-text-base: #222832; --pst-color-background: #ffffff; --pst-color-border: #7d8690;
--pst-color-text-muted: #48566b; --pst-color-primary: #0a7d91; --pst-color-surface: #f3f4f5; }}</style>
</head><body><main><h1>Attention explorer</h1>{raw}</main></body></html>
"""


def raw_html() -> str:
    """What the page of the book has in its block of raw HTML, for a file beside the explorer's."""
    text = (ROOT / "book/explorer.md").read_text(encoding="utf-8")
    block = text.partition("```{raw} html\n")[2].partition("```")[0]
    assert block.count("../_static/explorer/") == 4
    return block.replace("../_static/explorer/", "./")


def skip_loudly(reason: str) -> NoReturn:
    """Skip, with a line that shows up even where skips are not listed."""
    warnings.warn(f"the explorer was not looked at: {reason}", stacklevel=2)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def page(written: Path) -> Iterator[Any]:
    """The page, opened from the disk; whatever the console says of errors fails the test."""
    try:
        import playwright.sync_api as browsers
    except ImportError:
        skip_loudly("playwright is not installed")
    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if executable is None:
        skip_loudly("no Chromium is installed (Debian: apt-get install chromium)")
    for name in ("explorer.js", "explorer.css"):
        shutil.copy(SOURCES / name, written)
    (written / "page.html").write_text(PAGE.format(raw=raw_html()), encoding="utf-8")
    with browsers.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        opened = browser.new_page()
        errors: list[str] = []
        opened.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        opened.on("pageerror", lambda error: errors.append(str(error)))
        opened.on("requestfailed", lambda request: errors.append(request.url))
        opened.goto((written / "page.html").as_uri())
        yield opened
        browser.close()
    assert not errors


@pytest.fixture
def fresh(page: Any) -> Any:
    """The page as it opens."""
    page.reload()
    page.wait_for_selector("[data-shown='0']")
    return page


def shares(page: Any) -> list[float]:
    """How much each region is lit."""
    return page.eval_on_selector_all(
        ".explorer-overlay rect", "found => found.map(one => Number(one.style.getPropertyValue('--share')))"
    )


def stored(data: dict[str, Any], model: int, image: int, caption: int, word: int) -> np.ndarray:
    pair = data["pairs"].index([image, caption])
    rows = np.frombuffer(base64.b64decode(data["models"][model]["attention"][pair]), dtype=np.uint8)
    weights = rows.reshape(len(data["captions"][caption]["words"]), -1)[word]
    return weights / weights.max()


def test_hovering_a_word_lights_its_regions(fresh: Any, data: dict[str, Any]) -> None:
    for word in (1, 2):
        fresh.hover(f".explorer-words button:nth-of-type({word + 1})")
        np.testing.assert_allclose(shares(fresh), stored(data, 0, 0, 0, word), atol=1e-3)
        said = fresh.text_content(".explorer-said")
        weights = stored(data, 0, 0, 0, word)
        held = np.array(data["images"][0]["holds"])
        share = {what: 100 * weights[held == what].sum() / weights.sum() for what in set(held)}
        most = max(share, key=share.__getitem__)
        found = re.search(rf"“{data['captions'][0]['words'][word]}” attends to (\d+) % {most}[,.]", said)
        assert found and abs(int(found[1]) - share[most]) < 3  # stored weights are rounded


def test_the_keyboard_alone_reaches_every_word(fresh: Any, data: dict[str, Any]) -> None:
    fresh.focus(".explorer-words button[tabindex='0']")
    last = len(data["captions"][0]["words"]) - 1
    for key, word in (
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("ArrowLeft", 1),
        ("End", last),
        ("ArrowRight", last),
        ("Home", 0),
    ):
        fresh.keyboard.press(key)
        assert fresh.evaluate("document.activeElement.textContent") == data["captions"][0]["words"][word]
        np.testing.assert_allclose(shares(fresh), stored(data, 0, 0, 0, word), atol=1e-3)
    assert fresh.locator(".explorer-words button[tabindex='0']").count() == 1  # one stop for Tab
    assert fresh.get_attribute(".explorer-said", "role") == "status"


def test_another_model_shows_its_own_attention_of_the_same_word(fresh: Any, data: dict[str, Any]) -> None:
    fresh.hover(".explorer-words button:nth-of-type(2)")
    assert fresh.evaluate("window.attentionExplorer.models.map(one => Boolean(one.attention))") == [True, False, False]
    fresh.select_option("#explorer-model", label="BFAN")
    fresh.wait_for_selector("[data-shown='1']")
    np.testing.assert_allclose(shares(fresh), stored(data, 1, 0, 0, 1), atol=1e-3)
    assert fresh.text_content("tr.explorer-current th") == "BFAN"
    assert "seed 5, rsum 12.3" in fresh.text_content("#explorer-about")


def test_a_twin_changes_the_word_and_the_table(fresh: Any, data: dict[str, Any]) -> None:
    twin = next(n for n, caption in enumerate(data["captions"]) if caption["of"] == 0 and caption["kind"])
    assert fresh.locator(".explorer-scores thead th").count() == 3
    fresh.check(f"input[name='explorer-twin'][value='{twin}']")
    words = fresh.eval_on_selector_all(".explorer-words button", "found => found.map(one => one.textContent)")
    assert words == data["captions"][twin]["words"]
    changed = fresh.eval_on_selector_all(".explorer-replaced", "found => found.map(one => one.textContent)")
    assert changed == [a for a, b in zip(words, data["captions"][0]["words"], strict=True) if a != b] != []
    cells = fresh.eval_on_selector_all(
        ".explorer-scores tbody tr:first-child td", "all => all.map(one => one.textContent)"
    )
    before, now = (data["pairs"].index([0, caption]) for caption in (0, twin))
    model = data["models"][0]
    assert cells[1] == f"{model['ranks'][before]} of {data['candidates']}"
    assert cells[3] == f"{model['ranks'][now]} of {data['candidates']}"
    difference = float(cells[4].replace("−", "-"))
    assert difference == pytest.approx(model["scores"][now] - model["scores"][before], rel=0.01, abs=1e-6)
    assert "it is false" in fresh.text_content(".explorer-scores caption")
    assert fresh.evaluate("document.activeElement.value") == str(twin)  # the focus stays where it was


def test_another_image_brings_its_captions_and_a_twin_stays_with_its_near_duplicate(
    fresh: Any, data: dict[str, Any]
) -> None:
    twin = next(n for n, caption in enumerate(data["captions"]) if caption["of"] == 0 and caption["kind"])
    fresh.check(f"input[name='explorer-twin'][value='{twin}']")
    fresh.check("input[name='explorer-image'][value='1']")
    words = fresh.eval_on_selector_all(".explorer-words button", "found => found.map(one => one.textContent)")
    assert words == data["captions"][twin]["words"]
    last = len(data["images"]) - 1
    fresh.check(f"input[name='explorer-image'][value='{last}']")
    own = next(caption for caption in data["captions"] if caption["image"] == last)
    words = fresh.eval_on_selector_all(".explorer-words button", "found => found.map(one => one.textContent)")
    assert words == own["words"]
    assert fresh.get_attribute(".explorer-picture", "alt").startswith(f"Image {last + 1}: ")
    assert fresh.evaluate("document.querySelector('.explorer-picture').naturalWidth") > 0


def test_nothing_is_wider_than_a_phone(fresh: Any) -> None:
    fresh.set_viewport_size({"width": 390, "height": 800})
    assert fresh.evaluate("document.documentElement.scrollWidth") <= 390
    fresh.set_viewport_size({"width": 1280, "height": 800})


def test_axe_finds_nothing(fresh: Any) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="no axe: the explorer is not tested with it"
    )
    for theme in ("light", "dark"):
        fresh.evaluate("theme => { document.documentElement.dataset.theme = theme; }", theme)
        # "preload" would fetch the style sheet, which a page on a disk may not
        found = axe.Axe().run(fresh, options={"preload": False}).response["violations"]
        assert [one["id"] for one in found] == []
