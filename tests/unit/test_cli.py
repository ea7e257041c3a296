"""The ``itm`` command: exit codes, one-line errors, a quick start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_book import tiny_book
from typer.testing import CliRunner, Result

from itm_lab.cli import app


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_book(tmp_path)
    monkeypatch.chdir(tmp_path / "notebooks")  # every command works from below the root
    return tmp_path


def itm(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def test_export_and_check(project: Path) -> None:
    stale = itm("export", "--check")
    assert stale.exit_code == 1
    assert "itm_utils/models/tiny.py: stale, it is missing: run `itm export`" in stale.stderr
    assert not (project / "itm_utils/models/tiny.py").exists()
    assert "itm_utils/models/tiny.py: written" in itm("export").stdout
    assert itm("export", "--check").exit_code == 0


def test_lint_names_file_cell_and_remedy(project: Path) -> None:
    assert itm("notebooks", "lint").exit_code == 0
    path = project / "notebooks/01_tiny.ipynb"
    path.write_text(path.read_text().replace('"execution_count": null', '"execution_count": 1', 1))
    result = itm("notebooks", "lint", str(path))
    assert result.exit_code == 1
    assert result.stderr == ("01_tiny.ipynb: cell 2 (parameters): an execution count: run `itm notebooks lint --fix`\n")
    assert itm("notebooks", "lint", "--fix").exit_code == 0


def test_errors_are_one_line_and_exit_with_two(project: Path, tmp_path_factory, monkeypatch) -> None:
    result = itm("notebooks", "run", "nosuch")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("itm: nosuch: found no such notebook")
    (project / "_config.yml").unlink()
    assert itm("book", "build").exit_code == 2
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    outside = itm("export")
    assert outside.exit_code == 2 and "inside the book's repository" in outside.stderr


def test_launch(project: Path) -> None:
    result = itm("notebooks", "launch", "copies", "--repository", "https://github.com/o/r/", "--ref", "main")
    assert result.exit_code == 0, result.output
    assert "git+https://github.com/o/r@main" in (project / "notebooks/copies/01_tiny.ipynb").read_text()


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom itm_lab.cli import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'nbformat', 'sphinx', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "[]", result.stdout
