"""Commands that make the book: run, check, copy and build its chapters. Part of ``itm``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from itm_book.data.cli import app as data
from itm_book.photos.cli import app as photos
from itm_utils.errors import ItmError

app = typer.Typer()
notebooks = typer.Typer(no_args_is_help=True, help="Check, run and copy the chapters.")
book = typer.Typer(no_args_is_help=True, help="Build the HTML book.")
app.add_typer(notebooks, name="notebooks")
app.add_typer(book, name="book")
app.add_typer(data, name="data")
app.add_typer(photos)


def project_root() -> Path:
    """The repository around the current folder."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "pyproject.toml").is_file() and (folder / "notebooks").is_dir():
            return folder
    raise ItmError("No notebooks/ beside a pyproject.toml here or above: run itm inside the book's repository.")


@app.command()
def export(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a module is stale.")] = False,
) -> None:
    """Copy the chapters' `#| export` cells to itm_utils/models/."""
    from itm_book import export as exporter

    root = project_root()
    if not check:
        for path in exporter.export(root):
            typer.echo(f"{path.relative_to(root)}: {'written' if path.exists() else 'removed'}")
        return
    stale = exporter.stale_modules(root, exporter.render_all(root))
    for path, difference in sorted(stale.items()):
        typer.echo(f"{path.relative_to(root)}: stale, {difference}: run `itm export`", err=True)
    raise typer.Exit(bool(stale))


@app.command(name="run")
def run_recipes(
    recipes: Annotated[list[str] | None, typer.Argument(help="Recipes, by name or file.")] = None,
    parameter: Annotated[list[str] | None, typer.Option("-p", help="name=value, over the recipe's.")] = None,
    table: Annotated[str, typer.Option(help="All rows of a table and their ensembles, e.g. scan/table_1.")] = "",
    seeds: Annotated[str, typer.Option(help="e.g. 0-4; otherwise the recipe's.")] = "",
    search: Annotated[list[str] | None, typer.Option(help="name=a,b,c: each value alone, judged on dev.")] = None,
    grid: Annotated[
        list[str] | None, typer.Option(help="name=a,b: every combination, on dev; seeds 100, 101, …")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only the plan: arithmetic, memory, disk, hours.")] = False,
    gpu: Annotated[str, typer.Option(help="The GPU that a plan is for.")] = "RTX 3090",
    measure: Annotated[
        bool, typer.Option("--measure", help="With --dry-run: hours on this machine, from a few timed steps.")
    ] = False,
    show: Annotated[bool, typer.Option("--print", help="Only the papermill command of each run.")] = False,
    jobs: Annotated[int, typer.Option(min=0, help="Runs side by side; 0: two on a CPU, one on a GPU.")] = 0,
    results: Annotated[Path, typer.Option(help="Where receipts go.")] = Path("results"),
) -> None:
    """Run recipes with papermill to a receipt each. Called again after an interruption, it goes on."""
    from itm_book import plan as planner
    from itm_book import run as runner
    from itm_book.ensembles import run_ensembles

    root = project_root()
    planned = planner.plan(root, recipes or [], table, seeds, parameter or [], search or [], grid or [])
    if show or dry_run:
        plan = planner.described(planned, gpu, root / results, measure)
        for line in map(runner.shown, planned) if show else plan:
            typer.echo(line)
        return
    at_a_time = jobs or (2 if all(job.parameters["device"] == "cpu" for job in planned) else 1)
    failed = runner.run_jobs(planned, root / results, at_a_time)
    if not failed and not search and not grid:
        for line in runner.table_of(root / results, run_ensembles(planned, root / results)):
            typer.echo(line)
    if results != Path("results"):
        for line in runner.compared(root / results, root / "results"):
            typer.echo(line)
    raise typer.Exit(bool(failed))


@app.command()
def ensemble(
    arm: Annotated[str, typer.Argument(help="Name of the ensemble.")],
    folders: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")],
    results: Annotated[Path, typer.Option(help="Where the receipt goes.")] = Path("results"),
) -> None:
    """Average the scores of finished runs and write the receipt of the mean."""
    from itm_book.ensembles import ensemble_of

    ensemble_of(folders, arm, project_root() / results)


@notebooks.command()
def lint(
    files: Annotated[list[str] | None, typer.Argument(help="Chapters or paths; all chapters if none.")] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Repair counts, metadata and cell ids.")] = False,
) -> None:
    """Check the rules every committed notebook keeps."""
    from itm_book.lint import lint_file
    from itm_book.notebooks import find_notebooks

    findings = [text for path in find_notebooks(project_root(), files or []) for text in lint_file(path, fix)]
    for text in findings:
        typer.echo(text, err=True)
    raise typer.Exit(bool(findings))


@notebooks.command()
def run(
    names: Annotated[list[str] | None, typer.Argument(help="Chapters, e.g. 01_vsepp; all if none.")] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Store the outputs in notebooks/.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Notebooks run at the same time.")] = 2,
) -> None:
    """Run chapters on the embedded data; copies under _build/ are kept while nothing changes."""
    from itm_book.notebooks import run_notebooks

    start = time.perf_counter()
    failed = run_notebooks(project_root(), names or [], in_place, jobs)
    if failed:
        typer.echo(f"failed: {', '.join(failed)}", err=True)
        raise typer.Exit(1)
    typer.echo(f"notebooks: {time.perf_counter() - start:.0f} s")


@notebooks.command()
def launch(
    folder: Annotated[Path, typer.Argument(help="Where the copies go.")],
    repository: Annotated[str, typer.Option(help="Address of the repository the package is installed from.")],
    ref: Annotated[str, typer.Option(help="Branch, tag or commit of it.")],
) -> None:
    """Write copies for launch buttons: no outputs, plain Markdown, a cell that installs the package."""
    from itm_book.launch import launch_copies

    copies = launch_copies(project_root(), folder, repository.rstrip("/"), ref)
    typer.echo(f"{folder}: {len(copies)} notebooks")


@notebooks.command()
def student(
    folder: Annotated[Path, typer.Argument(help="Where the copies go.")] = Path("_build/student"),
) -> None:
    """Write copies for a class, without solutions, answers and outputs."""
    from itm_book.student import student_copies

    typer.echo(f"{folder}: {len(student_copies(project_root(), folder))} notebooks")


@book.command()
def build(
    executed: Annotated[bool, typer.Option("--executed", help="Show the copies run under _build/.")] = False,
) -> None:
    """Build _build/html/index.html; warnings are errors."""
    from itm_book import build as builder

    start = time.perf_counter()
    if not builder.build(project_root(), executed):
        typer.echo("book: the build failed; the warnings stand above", err=True)
        raise typer.Exit(1)
    typer.echo(f"pages: {time.perf_counter() - start:.0f} s; _build/html/index.html")
