"""``itm index``: build, extend and search an index. Heavy modules are imported inside the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from itm_utils.errors import input_error, printable

app = typer.Typer(no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="The folder of the index.")]
Kind = Annotated[str, typer.Option(help="auto, flat (exact), ivf (inverted lists) or hnsw (a graph).")]
Split = Annotated[str, typer.Option(help="train, dev or test.")]


@app.command()
def build(
    folder: Folder,
    *,
    data: Annotated[str, typer.Option(help="The dataset folder whose items are indexed, or scenes.")],
    model: Annotated[Path, typer.Option(help="The folder of a run, or one of its checkpoints.")],
    split: Split = "test",
    of: Annotated[str, typer.Option(help="images or captions.")] = "images",
    kind: Kind = "auto",
    trained_on: Annotated[str, typer.Option(help="The run's own dataset folder, if it is not the one indexed.")] = "",
) -> None:
    """Make an index of the images or captions of a split: one vector each."""
    from itm_lab.index.store import ITEMS, check_free
    from itm_lab.photos.retrieve import build_index
    from itm_lab.photos.search import open_run

    check_kind(kind)
    if of not in ITEMS:
        raise input_error("--of", repr(of), f"one of {', '.join(ITEMS)}")
    check_free(folder)  # before the work, not after it
    index = build_index(open_run(model, data, split, trained_on), model, folder, of, kind, trained_on)
    typer.echo(f"{folder}: {index.rows:,} {index.items}, {index.segments[-1].kind}, vectors of width {index.width}")


@app.command()
def add(
    folder: Folder,
    *,
    data: Annotated[str, typer.Option(help="The dataset folder whose items are added, or scenes.")],
    split: Split = "test",
    model: Annotated[Path | None, typer.Option(help="The run that made the index, where it has moved.")] = None,
    kind: Kind = "auto",
) -> None:
    """Add a split to an index. It costs what is added; what is there stays as it is."""
    from itm_lab.photos.retrieve import add_to_index

    check_kind(kind)
    index = add_to_index(folder, data, split, model, kind)
    added = index.segments[-1]
    typer.echo(f"{folder}: {added.rows:,} added, {index.rows:,} {index.items} in {len(index.segments)} segments")


@app.command()
def search(
    folder: Folder,
    query: Annotated[str, typer.Argument(help='A sentence: "two dogs on a beach".')] = "",
    *,
    image: Annotated[str, typer.Option(help="An image of the first split instead, for an index of captions.")] = "",
    top: Annotated[int, typer.Option(min=1, help="How many matches.")] = 8,
    candidates: Annotated[int, typer.Option(min=1, help="How many items the full score orders.")] = 200,
    effort: Annotated[int, typer.Option(min=0, help="Lists read (ivf) or beam width (hnsw); 0: the default.")] = 0,
    model: Annotated[Path | None, typer.Option(help="The run that made the index, where it has moved.")] = None,
) -> None:
    """Retrieve with the index, order the candidates with the model: a line each with both scores."""
    if bool(query.strip()) == bool(image):
        found = "both" if image else "neither"
        raise input_error("itm index search", f"{found} of a sentence and --image", "one of the two")
    from itm_lab.index.store import open_index
    from itm_lab.photos.retrieve import ask_for_captions, ask_for_images
    from itm_lab.photos.search import passing_cache

    index = open_index(folder)
    notes: tuple[str, ...] = ()
    if image:
        matches = ask_for_captions(index, image, top, candidates, effort, model)
    else:
        with passing_cache():
            matches, notes = ask_for_images(index, query, top, candidates, effort, model)
    for note in notes:
        typer.echo(printable(f"note: {note}"))
    for place, match in enumerate(matches, start=1):
        typer.echo(printable(f"{place:3}  {match.full:7.3f}  ({match.cheap:.3f})  {match.name}"))


def check_kind(kind: str) -> None:
    """Refuse an unknown kind before any work."""
    from itm_lab.index.nearest import KINDS

    if kind not in ("auto", *KINDS):
        raise input_error("--kind", repr(kind), f"one of auto, {', '.join(KINDS)}")
