"""README, companion pages and the status page say what receipts, records and the notebooks say."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache, partial
from pathlib import Path

import pytest
import yaml
from nbformat import v4
from tiny_book import PNG, code, tiny_notebook

from itm_lab.evidence.ledger import Ledger
from itm_lab.experiments.experiment_files import read_experiments
from itm_lab.notebook_io import find_notebooks, is_chapter, write_notebook
from itm_lab.publish import chapters_table, companion_page, front, status_page
from itm_lab.publish.claims_page import chapter_of
from itm_lab.publish.ledger_pages import heading, open_ledger
from itm_lab.publish.parity_record import FILE, read_record, write_record
from itm_lab.records.parameters import notebook_model
from itm_utils.errors import ItmError

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = [path.stem for path in find_notebooks(ROOT) if is_chapter(path)]
PAPERS = [chapter for chapter in CHAPTERS if int(chapter[:2]) < 12]  # part III has no paper to read
NUMBERED = {"09_dcpa": ("D", 21), "10_aoq": ("A", 23), "11_ccr_ccs": ("C", 27), "08_mmca": ("M", 24)}


@cache
def companion(chapter: str) -> str:
    return "\n".join(companion_page.fragment(ROOT, chapter))


@cache
def ledger() -> Ledger:
    return open_ledger(ROOT)


# ---------------------------------------------------------------------------------------------- README


def test_readme_says_what_receipts_say_today() -> None:
    assert front.is_current(ROOT), "README.md is behind receipts or results: run `itm book front`"


def test_readme_is_short_and_has_what_a_reader_looks_for() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 600
    for chapter in CHAPTERS:
        assert f"(notebooks/{chapter}.ipynb)" in text
    for heading_ in ("Two commands", "Chapters", "Three findings", "Limits", "Four doors", "Cite"):
        assert f"## {heading_}\n" in text
    limits = text.split("## Limits\n")[1].split("##")[0].strip().splitlines()
    assert len(limits) == 3
    doors = text.split("## Four doors\n")[1].split("##")[0]
    assert doors.count("\n- **") == 4
    findings = text.split("<!-- generated: findings -->")[1].split("<!-- end -->")[0].strip().splitlines()
    assert len(findings) == 3 and all(re.match(r"- \*(Synthetic|Photographs) \(", line) for line in findings)


def test_every_link_and_image_of_readme_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = [*re.findall(r"\]\(([^)#]+)\)", text), *re.findall(r'src="([^"]+)"', text)]
    assert len(links) > 20
    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


def test_counts_of_readme_are_the_ledgers() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    told = sum(int(number) for number in re.findall(r"\b(\d+) (?:not run|reproduced|partly|level|not reproduced|inconclusive|not comparable)\b", text.split("<!-- generated: chapters -->")[1].split("<!-- end -->")[0]))  # fmt: skip
    assert told == len(ledger().claims | ledger().foundations)


def written_here(block, root: Path, book: Ledger) -> str:
    """A block about this checkout, wherever README lies."""
    return block(ROOT, book)


def test_a_readme_that_fell_behind_is_seen_and_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text(text.replace("not run", "reproduced"), encoding="utf-8")
    known = dict(front.BLOCKS)
    monkeypatch.setattr(front, "open_ledger", lambda root: ledger())
    monkeypatch.setattr(front, "BLOCKS", {name: partial(written_here, of) for name, of in known.items()})
    notebook = tiny_notebook()
    shown = {"figure": {"name": front.FIGURE, "caption": "a"}, "image": {"alt": "b"}}
    notebook.cells.append(code("1", "figure", [v4.new_output("display_data", {"image/png": PNG})], mystnb=shown))
    (tmp_path / "notebooks").mkdir()
    write_notebook(tmp_path / front.SHOWN_IN, notebook)
    (tmp_path / "book/img").mkdir(parents=True)
    assert not front.is_current(tmp_path)
    assert front.refresh(tmp_path) and not front.refresh(tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == text
    assert (tmp_path / front.IMAGE_FILE).read_bytes().startswith(b"\xff\xd8")  # a JPEG
    (tmp_path / "README.md").write_text("<!-- generated: chapters -->\n<!-- end -->", encoding="utf-8")
    with pytest.raises(ItmError, match="no block claims, findings"):
        front.refreshed(tmp_path)


# ---------------------------------------------------------------------------------------------- companions


@pytest.mark.parametrize("chapter", PAPERS)
def test_every_chapter_has_a_companion_page_in_the_contents(chapter: str) -> None:
    text = (ROOT / f"book/companions/{chapter}.md").read_text(encoding="utf-8")
    assert f"```{{companion}} {chapter}\n```" in text and f"/notebooks/{chapter}`" in text
    assert f"file: book/companions/{chapter}\n" in (ROOT / "_toc.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("chapter", PAPERS)
def test_a_companion_begins_with_a_heading_and_names_every_parameter(chapter: str) -> None:
    text = companion(chapter)
    assert text.startswith("## ")
    listed = re.findall(r"^\| `(\w+)` \|", text.split("## All parameters")[1].split("## Costs")[0], re.MULTILINE)
    assert listed == list(notebook_model(ROOT / f"notebooks/{chapter}.ipynb").model_fields)


def test_all_numbered_readings_of_the_four_papers_are_there() -> None:
    rows = yaml.safe_load((ROOT / companion_page.READINGS).read_text(encoding="utf-8"))
    assert set(rows) <= set(CHAPTERS)
    for chapter, (letter, count) in NUMBERED.items():
        found = {name.strip() for row in rows[chapter] for name in row["about"].split(",")}
        assert {f"{letter}{number}" for number in range(1, count + 1)} <= found
    assert all(all(row.values()) or row["about"] == "" for of in rows.values() for row in of)
    assert all(text.isprintable() for of in rows.values() for row in of for text in row.values())
    assert "## Readings" not in companion("00_keeping_score") and companion("02_scan").count("## Readings") == 1


def test_every_search_of_a_chapter_is_listed_with_its_grid() -> None:
    for chapter in PAPERS[1:]:
        text = companion(chapter)
        for name, one in read_experiments(ROOT, chapter.partition("_")[2]).items():
            if one.select is not None:
                row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
                assert all(setting in row for setting in one.select.grid)


def test_every_claim_stands_on_the_companion_of_its_chapter() -> None:
    claims = ledger().claims | ledger().foundations
    for name, claim in claims.items():
        assert f"<claim-{name.lower()}>" in companion(chapter_of(claim)), name
        decided = [one for one in ledger().verdicts(name) if one.verdict != "not run"]
        assert (f"(evidence-{name.lower()})=" in companion(chapter_of(claim))) == bool(decided), name


def test_every_comparison_behind_a_verdict_has_a_row() -> None:
    claims = ledger().claims | ledger().foundations
    for name, claim in claims.items():
        for one in ledger().verdicts(name):
            if one.verdict != "not run":
                text = companion(chapter_of(claim)).split(f"(evidence-{name.lower()})=")[1].split("\n(evidence-")[0]
                assert len(re.findall(r"^\| [✓✗?=≠] \|", text, re.MULTILINE)) >= len(one.findings) > 0


def test_an_unknown_chapter_is_refused() -> None:
    with pytest.raises(ItmError, match="expected the name of a chapter's notebook"):
        "".join(companion_page.fragment(ROOT, "99_nothing"))


def test_headings_of_tables_are_the_papers() -> None:
    assert heading("table_IV") == "Table IV" and heading("table_3") == "Table 3"


# ---------------------------------------------------------------------------------------------- parity


def test_the_record_of_parity_is_of_these_reference_cases() -> None:
    record = read_record(ROOT)
    assert all(0 <= row["difference"] <= row["allowed"] for row in record["rows"])
    cases = {path.stem for path in (ROOT / "tests/golden").rglob("*.npz")}
    assert {row["case"].rpartition("/")[2] for row in record["rows"]} == cases


def test_a_record_of_other_cases_is_refused(tmp_path: Path) -> None:
    (tmp_path / "book/data").mkdir(parents=True)
    shutil.copy(ROOT / FILE, tmp_path / FILE)
    (tmp_path / "tests/golden").mkdir(parents=True)
    with pytest.raises(ItmError, match="other reference cases"):
        read_record(tmp_path)
    with pytest.raises(ItmError, match="the record is of all cases"):
        write_record(ROOT, ROOT / "tests/golden/scan", [])


# ---------------------------------------------------------------------------------------------- status


@cache
def status() -> str:
    return "\n".join(status_page.fragment(ROOT))


def test_status_has_its_four_groups_and_the_capabilities() -> None:
    heads = re.findall(r"^## (.+)$", status(), re.MULTILINE)
    assert heads == ["Correct", "Fast", "Evidence", "Not run", "Capabilities, entry by entry"]
    groups = status_page.read_capabilities(ROOT)
    listed = re.findall(r"^\| (F\d+\.\d+) \|", status(), re.MULTILINE)
    assert listed == [entry["id"] for group in groups for entry in group["entries"]] and len(listed) == 123


def test_a_capability_is_done_or_says_what_is_missing_and_names_what_exists() -> None:
    experiments = read_experiments(ROOT)
    for group in status_page.read_capabilities(ROOT):
        for entry in group["entries"]:
            assert (entry["state"] == "partial") == ("missing" in entry), entry["id"]
            assert entry["state"] in ("done", "partial") and entry["need"] in ("named", "implied", "fair")
            for name in entry["where"]:
                place, _, experiment = name.partition(status_page.RUN)
                assert experiment in experiments if experiment else (ROOT / place).exists(), (entry["id"], name)


def test_everything_that_status_says_is_proved_exists() -> None:
    assert all((ROOT / place).exists() for place in status_page.PROVED.values())


def test_status_counts_receipts_and_claims() -> None:
    counted = status().split("## Evidence")[1].split("## Not run")[0]
    rows = re.findall(r"^\| \{doc\}`/notebooks/\w+` \| [^|]+ \| (\d+) \| (\d+) \|$", counted, re.MULTILINE)
    assert sum(int(new) + int(old) for new, old in rows) == sum(map(len, ledger().receipts.values()))
    waiting = sum(ledger().verdict(name).verdict == "not run" for name in ledger().rules)
    told = re.findall(r"^\| \{doc\}`/notebooks/\w+` \| (\d+|–) \|", status().split("## Not run")[1], re.MULTILINE)
    assert sum(int(number) for number in told if number != "–") == waiting


# ---------------------------------------------------------------------------------------------- parts


def test_chapters_of_the_parts_are_all_chapters_with_their_claims() -> None:
    text = "".join(line for part in "123" for line in chapters_table.fragment(ROOT, part))
    assert re.findall(r"\{doc\}`/notebooks/(\w+)`", text) == CHAPTERS
    total = sum(number for chapter in CHAPTERS for number in chapters_table.verdicts(ledger(), chapter).values())
    assert total == len(ledger().claims | ledger().foundations)
    with pytest.raises(ItmError, match="one of 1, 2, 3"):
        "".join(chapters_table.fragment(ROOT, "4"))


def test_pages_do_not_promise() -> None:
    for path in (ROOT / "book").glob("*.md"):
        text = path.read_text(encoding="utf-8")
        assert "being written" not in text and "will build" not in text, path.name


# ---------------------------------------------------------------------------------------------- questions


def test_messages_of_the_faq_are_messages_of_the_code() -> None:
    text = (ROOT / "book/faq.md").read_text(encoding="utf-8").split("## Messages of this book")[1]
    messages = re.findall(r"^\| `([^`]+)` \|", text.split("## Messages of other")[0], re.MULTILINE)
    assert len(messages) >= 20
    code = "\n".join(path.read_text(encoding="utf-8") for room in ("itm_utils", "itm_lab") for path in (ROOT / room).rglob("*.py"))  # fmt: skip
    code = code.replace("`", "")
    assert [message for message in messages if message not in code] == []


def test_the_faq_leads_to_every_section_of_the_clinic_that_it_names() -> None:
    text = (ROOT / "book/faq.md").read_text(encoding="utf-8")
    clinic = json.loads((ROOT / "notebooks/clinic.ipynb").read_text(encoding="utf-8"))
    labels = {label for cell in clinic["cells"] for label in re.findall(r"^\((clinic-\w+)\)=", "".join(cell["source"]), re.MULTILINE)}  # fmt: skip
    assert set(re.findall(r"<(clinic-\w+)>", text)) <= labels
