"""``itm classroom``: make a course folder, grade what students handed in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from itm_lab.paths import Paths

app = typer.Typer(no_args_is_help=True, help="A course.")


@app.command()
def make(
    folder: Annotated[Path, typer.Argument(help="A new folder.")] = Path("_build/classroom"),
    chapters: Annotated[list[str] | None, typer.Option("--chapter", help="Only these; may be repeated.")] = None,
    data: Annotated[bool, typer.Option(help="Copy the dataset into the folder.")] = True,
) -> None:
    """Write a course folder for nbgrader: notebooks, images, slides, questions, a list of wheels, the dataset."""
    from itm_lab.classroom.course import make_course

    typer.echo(make_course(Paths.find().root, folder, chapters or [], data))


@app.command()
def grade(
    folder: Annotated[Path, typer.Argument(help="A course folder with submissions.")],
    seconds: Annotated[int, typer.Option(min=1, help="Processor time of one answer.")] = 20,
    megabytes: Annotated[int, typer.Option(min=64, help="Memory of one answer.")] = 2048,
) -> None:
    """Grade every submission apart, under limits, and write grades.csv."""
    from itm_lab.classroom.grading import grade as grade_course
    from itm_lab.classroom.isolation import Limits

    typer.echo(grade_course(folder, Limits(seconds, megabytes)))


@app.command()
def slides(
    folder: Annotated[Path, typer.Argument(help="Where they go.")] = Path("_build/slides"),
    chapters: Annotated[list[str] | None, typer.Option("--chapter", help="Only these; may be repeated.")] = None,
) -> None:
    """Write slides of the chapters that need no network."""
    from itm_lab.classroom.slides import write_slides
    from itm_lab.notebook_io import find_notebooks, is_chapter

    root = Paths.find().root
    for path in filter(is_chapter, find_notebooks(root, chapters or [])):
        typer.echo(write_slides(root, path, folder))
