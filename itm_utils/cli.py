"""The ``itm`` command. Heavy modules are imported inside the commands, so that ``itm --help`` is quick.

What makes the book (running, checking and building its chapters) is in :mod:`itm_book.cli`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from itm_book.cli import app as making
from itm_book.cli import project_root
from itm_utils.errors import ItmError
from itm_utils.scenes.cli import app as scenes


class Group(TyperGroup):
    """Shows what a reader can put right as one line instead of a traceback."""

    def invoke(self, ctx: typer.Context) -> object:
        try:
            return super().invoke(ctx)
        except (ItmError, OSError) as error:
            typer.echo(f"itm: {error}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(cls=Group, no_args_is_help=True, add_completion=False, help="Tools of the book.")
app.add_typer(scenes, name="scenes", help="Build and show the embedded dataset.")
app.add_typer(making)


@app.command()
def parity(
    folder: Annotated[Path, typer.Argument(help="Golden cases, e.g. tests/golden.")],
) -> None:
    """Compare our models with what the public implementations computed; fail beyond the tolerances."""
    from itm_book.golden import run_folder

    beyond = cases = 0
    for row in run_folder(folder):
        typer.echo(str(row))
        cases, beyond = cases + 1, beyond + (not row.ok)
    typer.echo(f"parity: {cases - beyond} of {cases} within the tolerances")
    raise typer.Exit(bool(beyond))


@app.command()
def ledger(
    as_json: Annotated[bool, typer.Option("--json", help="Everything behind each verdict, as JSON.")] = False,
    foundations: Annotated[bool, typer.Option("--foundations", help="The claims of part I instead.")] = False,
    check: Annotated[list[Path] | None, typer.Option("--check", help="Receipts to check; may be repeated.")] = None,
    files: Annotated[list[Path] | None, typer.Argument(help="More receipts for --check.")] = None,
) -> None:
    """Print every claim with its verdict, or check receipts before they join the others."""
    import json
    from collections import Counter

    from itm_utils.ledger import Ledger

    if check or files:
        from itm_book.ledger_check import check_receipts

        for line in check_receipts(project_root(), [*(check or []), *(files or [])]):
            typer.echo(line)
        return
    book = Ledger(project_root())
    claims = book.foundations if foundations else book.claims
    if as_json:
        typer.echo(json.dumps([book.entry(claim) for claim in claims], indent=1, ensure_ascii=False))
        return
    for line in book.lines(claims):
        typer.echo(line)
    count = Counter(book.verdict(claim).verdict for claim in claims)
    typer.echo(f"{len(claims)} claims: " + ", ".join(f"{number} {word}" for word, number in count.most_common()))


@app.command(name="eval")
def evaluate(
    public: Annotated[Path, typer.Option(help="A published checkpoint (*.pth.tar).")],
    model: Annotated[str, typer.Option(help="Which model it is, e.g. scan.")],
    data: Annotated[Path, typer.Option(help="A dataset folder in the precomputed format.")],
    vocabulary: Annotated[Path, typer.Option(help="The vocabulary JSON that came with the checkpoint.")],
    split: Annotated[str, typer.Option(help="dev, test or testall.")] = "test",
    folds: Annotated[int, typer.Option(min=1, help="5 for COCO's 1K protocol on testall.")] = 1,
) -> None:
    """Evaluate published weights with our model of the same name."""
    from itm_book.published import evaluate_published

    typer.echo(str(evaluate_published(public, model, data, vocabulary, split, folds)))


@app.command()
def mine(
    checkpoint: Annotated[Path, typer.Argument(help="The folder of a run, or one of its checkpoints.")],
    data: Annotated[str, typer.Option(help="The dataset folder it was trained on, or scenes.")],
    out: Annotated[Path, typer.Option(help="Where the lists go.")],
    texts: Annotated[int, typer.Option(help="Wrong captions for each image.")] = 300,
    images: Annotated[int, typer.Option(help="Wrong images for each caption.")] = 60,
    part: Annotated[float, typer.Option(help="The run's train_part: the first pictures only.")] = 1.0,
    megabytes: Annotated[int, typer.Option(min=1, help="Memory for encodings and scores.")] = 1024,
) -> None:
    """List the hardest wrong captions and images of a training set. Called again, it goes on."""
    from itm_book.mine import mine_checkpoint

    lists = mine_checkpoint(checkpoint, data, out, texts, images, part, megabytes)
    (i, h_t), (c, h_i) = lists.texts.shape, lists.images.shape
    typer.echo(f"{out}: {h_t} captions for each of {i} images, {h_i} images for each of {c} captions")
