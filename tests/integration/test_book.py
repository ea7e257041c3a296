"""The book builds strictly, shows what ran, and leaves nothing behind from an older layout."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tiny_book import tiny_book

from itm_lab.publish.build import build, has_stale_pages, stage
from itm_utils.errors import ItmError


@pytest.fixture
def project(tmp_path: Path) -> Path:
    tiny_book(tmp_path)
    return tmp_path


RECORD = {
    "chapter": "01_tiny",
    "finished": "2026-01-02T03:04:05+00:00",
    "seconds": 6.5,
    "cells": [
        {"cell": "a", "section": "Warm up", "seconds": 0.5},
        {"cell": "b", "section": "Train with $x^2$", "seconds": 4.0},
        {"cell": "c", "section": "Train with $x^2$", "seconds": 1.0},
        {"cell": "d", "section": "Look", "seconds": 0.9},
        {"cell": "e", "section": "Quick one", "seconds": 0.1},
    ],
    "cpu_count": 2,
    "machine": "x86_64",
    "python": "3.11.2",
    "torch": "2.13.0",
    "key": "0",
}


def test_stage_copies_only_what_changed_and_removes_what_vanished(project: Path) -> None:
    assert stage(project, executed=False)
    page = project / "_build/stage/book/index.md"
    before = page.stat().st_mtime_ns
    assert stage(project, executed=False) == []
    (project / "book/execution.md").write_text("# Changed\n")
    (project / "book/new.md").write_text("# New\n")
    (project / "book/.hidden.md").write_text("# Hidden\n")
    assert sorted(map(str, stage(project, executed=False))) == ["book/execution.md", "book/new.md"]
    (project / "book/new.md").unlink()
    assert [str(path) for path in stage(project, executed=False)] == ["book/new.md"]
    assert not (project / "_build/stage/book/new.md").exists()
    assert page.stat().st_mtime_ns == before


def test_executed_stage_takes_notebooks_and_records_of_the_last_run(project: Path) -> None:
    for folder, words in (("_build/executions", "run"), ("book/data/executions", "committed")):
        (project / folder).mkdir(parents=True)
        (project / folder / "01_tiny.json").write_text(words)
    with pytest.raises(ItmError, match="no executed copy"):
        stage(project, executed=True)
    (project / "_build/notebooks").mkdir()
    (project / "_build/notebooks/01_tiny.ipynb").write_text("executed")
    (project / "book/data/executions/02_old.json").write_text("committed only")
    stage(project, executed=True)
    staged = project / "_build/stage"
    assert (staged / "notebooks/01_tiny.ipynb").read_text() == "executed"
    assert (staged / "book/data/executions/01_tiny.json").read_text() == "run"
    assert not (staged / "book/data/executions/02_old.json").exists()
    stage(project, executed=False)
    assert (staged / "book/data/executions/01_tiny.json").read_text() == "committed"


def test_missing_or_malformed_contents_is_one_clear_error(project: Path) -> None:
    (project / "_toc.yml").unlink()
    with pytest.raises(ItmError, match=r"_toc.yml: found no such file"):
        stage(project, executed=False)
    (project / "_toc.yml").write_text("root: [")
    with pytest.raises(ItmError, match=r"_toc.yml: found while parsing"):
        build(project, executed=False)


def test_pages_of_an_older_layout_are_seen(project: Path) -> None:
    html = project / "_build/html"
    (html / "_static").mkdir(parents=True)
    for name in ("index.html", "search.html", "_static/webpack.html"):
        (html / name).touch()
    assert not has_stale_pages(project)
    (html / "intro.html").touch()
    assert has_stale_pages(project)


def test_a_build_after_a_failed_one_starts_afresh(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sphinx would not warn again about pages that have not changed."""
    html = project / "_build/html"
    html.mkdir(parents=True)
    (html / "index.html").touch()
    stage(project, executed=False)
    seen: list[bool] = []

    def jupyter_book(*args: object, **kwargs: object) -> subprocess.CompletedProcess:
        seen.append(html.exists())
        return subprocess.CompletedProcess([], returncode=1)

    monkeypatch.setattr(subprocess, "run", jupyter_book)
    assert not build(project, executed=False)
    assert not build(project, executed=False)
    assert seen == [True, False]


@pytest.mark.slow
def test_strict_build(project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    """From a half-written state without a repository; then with one, and a broken reference."""
    html = project / "_build/html"
    (project / "book/data/executions").mkdir(parents=True)
    (project / "book/data/executions/01_tiny.json").write_text(json.dumps(RECORD))
    html.mkdir(parents=True)
    (html / "old.html").write_text("from an older layout")
    (project / "_build/.doctrees").mkdir()
    (project / "_build/.doctrees/environment.pickle").write_bytes(b"half of a pickle")
    monkeypatch.delenv("BOOK_REPOSITORY_URL", raising=False)
    assert build(project, executed=False), capfd.readouterr().err
    assert not (html / "old.html").exists()
    chapter = (html / "notebooks/01_tiny.html").read_text()
    assert "thebe" not in chapter.lower()
    assert "colab" not in chapter.lower() and "github.com" not in chapter
    table = (html / "book/execution.html").read_text()
    for words in ("A tiny chapter", "2026-01-02", "6.5", "(5.0); Look (0.9); Warm up (0.5)", "2 cores, x86_64"):
        assert words in table
    assert "Quick one" not in table and '<th class="stub">' in table and "<caption>" in table

    monkeypatch.setenv("BOOK_REPOSITORY_URL", "https://github.com/o/r")
    (project / "book/data/executions/01_tiny.json").unlink()
    (project / "book/index.md").write_text("# Tiny\n\n{ref}`nowhere`\n")
    assert not build(project, executed=False)
    assert "nowhere" in capfd.readouterr().err
    chapter = (html / "notebooks/01_tiny.html").read_text()
    for link in (
        "https://colab.research.google.com/github/o/r/blob/launch/notebooks/01_tiny.ipynb",
        "https://github.com/o/r/edit/main/notebooks/01_tiny.ipynb",
        "https://github.com/o/r/issues/new",
        'href="https://github.com/o/r"',
    ):
        assert link in chapter, link
    assert "colab" not in (html / "book/index.html").read_text().lower()
    assert "no record" in (html / "book/execution.html").read_text()
