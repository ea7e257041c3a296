"""Make the folder of a course: nbgrader's source and release, slides, questions, what to install offline, the dataset."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from itm_lab.classroom.grading import SALT, nbgrader_api
from itm_lab.classroom.questions import write_questions
from itm_lab.classroom.slides import write_slides
from itm_lab.notebook_io import find_notebooks, is_chapter, refuse_chapters, write_notebook
from itm_lab.publish.student_copies import Images, copy_of
from itm_utils.errors import input_error
from itm_utils.files import write_text

CONFIG = """\
# nbgrader reads this file. Grade with `itm classroom grade`: nbgrader itself runs submissions in your own account.
c = get_config()  # noqa: F821
c.CourseDirectory.course_id = "itm"
c.ClearSolutions.code_stub = {"python": "..."}
"""
README = """\
# A course on image-text matching

| folder | what it holds |
|---|---|
| `release/` | what students get: one folder a chapter, with images |
| `source/` | yours: solutions and hidden tests |
| `submitted/` | put submissions here: `submitted/ID/CHAPTER/CHAPTER.ipynb` |
| `slides/`, `questions/` | slides that need no network; recall questions, and their answers apart |
| `wheels.txt` | exact versions of all packages: `pip download -r wheels.txt -d wheels` once, then `pip install --no-index --find-links wheels itm-utils` |
| `cache/` | the dataset: students set the environment variable ITM_CACHE to their copy of it |

`itm classroom grade .` grades all submissions and writes `grades.csv`. Keep `salt` and `source/` to yourself.
"""


def make_course(root: Path, folder: Path, names: list[str], with_data: bool = True) -> Path:
    """Write a new course folder; one that exists is left alone."""
    refuse_chapters(root, folder)
    if folder.exists() and any(folder.iterdir()):
        raise input_error(folder, "a folder that is not empty", "a new one", "Move it away first.")
    for path in filter(is_chapter, find_notebooks(root, names)):
        place, images = folder / "source" / path.stem, Images(root)
        write_notebook(place / path.name, copy_of(root, path, "instructor", images))
        images.write(place)
        write_slides(root, path, folder / "slides")
    write_questions(root, folder / "questions", names)
    write_text(folder / "nbgrader_config.py", CONFIG)
    write_text(folder / "README.md", README)
    write_text(folder / SALT, secrets.token_hex(16))
    write_text(folder / "wheels.txt", "".join(f"{line}\n" for line in wheels("itm-utils")))
    (folder / "submitted").mkdir()
    if with_data:
        from itm_lab.scenes import scenes_folder

        built = scenes_folder()
        shutil.copytree(built, folder / "cache" / built.name)
    release(folder)
    return folder


def release(folder: Path) -> None:
    """Let nbgrader make what students get, and note all cells in its gradebook."""
    api = nbgrader_api(folder)
    for place in sorted((folder / "source").iterdir()):
        result = api.generate_assignment(place.name, force=True, create=True)
        if not result["success"]:
            said = re.sub(r"\s+", " ", str(result.get("error") or result.get("log") or "")).strip()[-300:]
            raise input_error(place, f"a notebook that nbgrader does not take ({said})", "an instructor's copy")


def wheels(package: str) -> Iterator[str]:
    """Exact versions of all that a package needs and is installed here, itself left out."""
    needed, seen = [package], set()
    while needed:
        name = re.sub(r"[-_.]+", "-", needed.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        wanted = [Requirement(line) for line in found.requires or []]
        needed += [r.name for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]
    versions = {
        name: metadata.version(name) for name in seen - {re.sub(r"[-_.]+", "-", package).lower()} if is_installed(name)
    }
    for name, version in sorted(versions.items()):
        yield f"{name}=={version.split('+')[0]}"  # +cpu is no version that an index has


def is_installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False
