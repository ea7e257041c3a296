"""Build the HTML book: gather its sources in one folder, then let Jupyter Book work there, strictly."""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from itm_utils.errors import input_error

# Jupyter Book has no `python -m`; its command may not be on the PATH.
JUPYTER_BOOK = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()"]
STRICT = ["--path-output", ".", "-W", "--keep-going", "-n", "-q"]
SPHINX_PAGES = {"index", "genindex", "search", "py-modindex"}


def sources(root: Path, executed: bool, closed: bool = False) -> Iterator[tuple[Path, Path]]:
    """Every file of the book, with its place in the stage. closed: without solutions."""
    for name in ("_config.yml", "_toc.yml"):
        if not (root / name).is_file():
            raise input_error(root / name, "no such file", "the book's configuration")
        yield root / name, Path(name)
    folders = {"book": "book", "notebooks": "notebooks"}
    if executed:  # what the last run gave, and its records, instead of what is committed
        for path in sorted((root / "notebooks").glob("*.ipynb")):
            if not (root / "_build/notebooks" / path.name).is_file():
                raise input_error(path.name, "no executed copy", "one under _build/", "Run `itm notebooks run` first.")
        folders |= {"notebooks": "_build/notebooks", "book/data/executions": "_build/executions"}
    if closed:
        folders["notebooks"] = close(root, root / folders["notebooks"])
    for place, folder in folders.items():
        for path in sorted((root / folder).rglob("*")):
            target = Path(place) / path.relative_to(root / folder)
            hidden = any(part.startswith(".") or part == "__pycache__" for part in target.parts)
            shadowed = executed and place == "book" and target.is_relative_to("book/data/executions")
            if path.is_file() and not hidden and not shadowed:
                yield path, target


def close(root: Path, notebooks: Path) -> str:
    """Write copies of the notebooks without solutions and answers; returns their folder."""
    from itm_lab.notebook_io import is_chapter, read_notebook, write_notebook
    from itm_lab.publish.student_copies import without_solutions

    folder = root / "_build/closed"
    shutil.rmtree(folder, ignore_errors=True)
    for path in sorted(notebooks.glob("*.ipynb")):
        notebook = read_notebook(path)
        write_notebook(
            folder / path.name, without_solutions(notebook, keep_outputs=True) if is_chapter(path) else notebook
        )
    return "_build/closed"


def stage(root: Path, executed: bool, closed: bool = False) -> list[Path]:
    """Bring ``_build/stage`` in line with the sources; untouched files keep their time. Returns what changed."""
    folder = root / "_build/stage"
    wanted = {target: path for path, target in sources(root, executed, closed)}
    found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    changed = [target for target in found if target not in wanted and "__pycache__" not in target.parts]
    for target in changed:
        (folder / target).unlink()
    for target, path in wanted.items():
        copy = folder / target
        if not copy.is_file() or not filecmp.cmp(path, copy, shallow=False):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            changed.append(target)
    return changed


def pages_of(toc: Path) -> set[str]:
    """The pages a table of contents names, without suffix."""
    import yaml
    from sphinx_external_toc.parsing import MalformedError, parse_toc_yaml

    try:
        return {name.removesuffix(".md").removesuffix(".ipynb") for name in parse_toc_yaml(toc)}
    except (yaml.YAMLError, MalformedError) as error:
        raise input_error(toc, " ".join(str(error).split()), "a table of contents") from None


def has_stale_pages(root: Path) -> bool:
    """Whether the HTML holds a page that the table of contents no longer names."""
    html = root / "_build/html"
    built = {path.relative_to(html).with_suffix("").as_posix() for path in html.rglob("*.html")}
    known = pages_of(root / "_toc.yml") | SPHINX_PAGES
    return any(page not in known and not page.startswith("_") for page in built)


def build(root: Path, executed: bool, solutions_from: date | None = None) -> bool:
    """Build ``_build/html``; any warning is a failure. Returns whether it worked.

    solutions_from: before this day solutions and answers are left out.
    """
    changed = stage(root, executed, solutions_from is not None and date.today() < solutions_from)
    # Sphinx warns only about pages it reads anew, and trusts whatever HTML it finds. So after a build
    # that failed or was cut short, after a change of layout or of our extension, it starts afresh.
    unfinished = root / "_build/.unfinished"
    extension_changed = any(path.is_relative_to("book/_ext") for path in changed)
    if has_stale_pages(root) or unfinished.exists() or extension_changed:
        for name in ("html", ".doctrees"):
            shutil.rmtree(root / "_build" / name, ignore_errors=True)
    unfinished.touch()
    command = [*JUPYTER_BOOK, "build", "_build/stage", *STRICT]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}  # keep the stage free of caches
    result = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)
    if result.returncode or not (root / "_build/html/index.html").is_file():
        return False
    unfinished.unlink()
    return True
