"""``itm scenes``: build Scenes, look at it, and make its frozen networks again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from itm_utils.errors import input_error

app = typer.Typer(no_args_is_help=True, help="Scenes.")


@app.command()
def build() -> None:
    """Build the dataset if it is missing or damaged, and say where it is."""
    from itm_lab.scenes.build import SPLITS, scenes_folder
    from itm_utils.data.precomp import open_split

    start = time.perf_counter()
    folder = scenes_folder()
    size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
    typer.echo(f"{folder}: {size:.0f} MB, {time.perf_counter() - start:.0f} s")
    for split in SPLITS:
        typer.echo(f"{split:5} fingerprint {open_split(folder, split).identity()['fingerprint'][:16]}")


@app.command()
def show(
    number: Annotated[int, typer.Argument(help="Which image of the split.")] = 0,
    split: Annotated[str, typer.Option(help="train, dev or test.")] = "test",
    out: Annotated[Path, typer.Option(help="Where the figure goes.")] = Path("scene.png"),
) -> None:
    """Draw an image with its family, boxes and captions, and print which captions fit which image."""
    from itm_lab.scenes.load import load_scenes
    from itm_lab.scenes.show import family_figure, family_of, family_text

    data = load_scenes(split)
    if not 0 <= number < len(data.scenes):
        raise input_error("itm scenes show", f"image {number}", f"0 to {len(data.scenes) - 1} in split {split}")
    members = family_of(data, number)
    typer.echo(family_text(data, members))
    family_figure(data, members).savefig(out)
    typer.echo(f"\n{out}")


@app.command("train-regions")
def train_regions() -> None:
    """Make the weights of the region network again (some minutes on one core)."""
    from itm_lab.scenes import features

    for name, share in features.train().items():
        typer.echo(f"{name}: {share:.1%} of unseen boxes named right")
    typer.echo(features.WEIGHTS)


@app.command("train-bert")
def train_bert() -> None:
    """Make the vocabulary and weights of the miniature BERT again (a few minutes on one core)."""
    from itm_lab.scenes import mini_bert

    for name, value in mini_bert.train().items():
        typer.echo(f"{name}: {value:g}")
    typer.echo(mini_bert.FOLDER)


if __name__ == "__main__":
    app()
