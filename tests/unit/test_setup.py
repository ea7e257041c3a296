"""The house is in order: one set of requirements, a thin package, commands that explain themselves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def test_conda_and_pip_install_the_same_thing() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    *packages, pip = environment["dependencies"]
    assert packages == [f"python{PROJECT['requires-python']}", "pip"]
    constraint, project = pip["pip"]
    assert (ROOT / constraint.removeprefix("-c ")).is_file()
    extras = re.fullmatch(r"-e \.\[(.+)\]", project).group(1).split(",")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f".[{','.join(extras)}]" in makefile
    assert set(extras) <= set(PROJECT["optional-dependencies"])


def requirement_name(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9_.-]+", requirement).group().lower().replace("_", "-")


def test_every_direct_requirement_has_a_tested_version_and_torch_stays_free() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {requirement_name(line) for line in lines if line and not line.startswith("#")}
    direct = {requirement_name(r) for r in PROJECT["dependencies"]}
    for extra in PROJECT["optional-dependencies"].values():
        direct |= {requirement_name(r) for r in extra}
    assert direct - pinned == {"torch"}
    assert "torch>=2.6" in PROJECT["dependencies"]
    assert not any("+cpu" in line or "@" in line for line in lines)


def test_make_alone_explains_itself() -> None:
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("book", "test", "serve", "export", "lint", "clean"):
        assert f"make {target}" in shown


def test_an_old_python_is_refused_in_one_line(tmp_path: Path) -> None:
    old = tmp_path / "python"
    code = "import sys; sys.version_info = (3, 9, 1, 'final', 0); exec(sys.argv.pop(1))"
    old.write_text(f'#!/bin/sh\nshift\nexec "{sys.executable}" -c "{code}" "$@"\n')
    old.chmod(0o755)
    command = ["make", "install", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode != 0
    assert "needs 3.11 or later" in run.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("target", ["book", "test"])
def test_ci_and_readme_use_the_two_commands(target: str) -> None:
    assert f"make {target}" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_no_pickle_and_no_machine_paths_in_what_is_committed() -> None:
    pickle = re.compile(r"torch\.load\((?!.*weights_only=True)|allow_pickle=Tru[e]|pickle\.load\(")
    machine = re.compile(r"/(wor[k]|roo[t]|hom[e])/")
    for path in tracked():
        if path.suffix in {".py", ".md", ".yml", ".toml", ".ipynb", ".json"} and "golden" not in path.parts:
            text = path.read_text(encoding="utf-8")
            found = pickle.search(text) or ("tests" not in path.parts and machine.search(text))
            assert not found, f"{path.relative_to(ROOT)}: {found.group()}"


def test_a_python_that_does_not_run_is_refused_in_one_line(tmp_path: Path) -> None:
    command = ["make", "install", "PYTHON=/bin/false", f"VENV={tmp_path / 'venv'}"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # not below `make test`
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=alone)
    first, *others = run.stderr.splitlines()
    assert first == "PYTHON=/bin/false does not run: give a Python of 3.11 or later"
    assert len(others) == 1 and others[0].startswith("make: ***") and not run.stdout


def test_cleaning_leaves_runs_alone(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_bytes((ROOT / "Makefile").read_bytes())
    kept = [tmp_path / "runs/scan/__pycache__/a.pyc", tmp_path / "receipts/__pycache__/b.pyc"]
    folders = [tmp_path / name for name in ("benchmarks", "book", "itm_lab", "itm_utils", "notebooks", "tests")]
    gone = [tmp_path / "_build/x", *(folder / "__pycache__/c.pyc" for folder in folders)]
    for path in (*kept, *gone):
        path.parent.mkdir(parents=True)
        path.touch()
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True)
    assert all(path.exists() for path in kept) and not any(path.exists() for path in gone)


def ten_answers() -> list[tuple[str, str]]:
    """Question and answer of each row of CONTRIBUTING's table."""
    text = (
        (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("### Ten questions")[2].partition("\n## ")[0]
    )
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [(question, answer) for question, answer in rows[1:]]


@pytest.mark.parametrize("question", [question for question, _ in ten_answers()])
def test_a_newcomers_question_is_answered_by_paths_and_names_that_exist(question: str) -> None:
    quoted = re.findall(r"`([^`]+)`", dict(ten_answers())[question])
    assert "/" in quoted[0]
    place = ROOT
    for name in quoted:
        if "/" in name:
            place = ROOT / name
            assert place.is_file(), name
        elif "." in name:  # keys that lead to a value
            value = yaml.safe_load(place.read_text(encoding="utf-8"))
            for key in name.split("."):
                value = value[key]
        else:
            assert re.search(rf"\b{re.escape(name)}\b", place.read_text(encoding="utf-8")), f"{name} in {place.name}"


def test_there_are_ten_questions() -> None:
    assert len(ten_answers()) == 10
