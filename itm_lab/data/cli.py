"""``itm data``: check, fetch and convert datasets. Heavy modules are imported inside the commands."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Check, fetch and convert datasets.")


class Checked(StrEnum):
    f30k = "f30k"
    coco = "coco"
    entities = "entities"


class Fetched(StrEnum):
    f30k = "f30k"
    coco = "coco"


DataRoot = Annotated[Path, typer.Option(help="The folder that holds the dataset folders.")]
KarpathyFile = Annotated[Path, typer.Option(help="dataset_coco.json, dataset_flickr30k.json or dataset_flickr8k.json.")]
Most = Annotated[int, typer.Option(min=0, help="Captions of an image, at most (the papers' COCO: 5); 0: all.")]


@app.command()
def check(
    dataset: Annotated[Checked, typer.Argument(help="What to look at.")],
    data_root: DataRoot = Path("data"),
    quick: Annotated[bool, typer.Option("--quick", help="Do not read the features.")] = False,
) -> None:
    """Say what is there, what is missing or damaged, and where to get it; exit with 1 unless all is whole."""
    from itm_lab.data.check import check_dataset
    from itm_lab.data.check_entities import check_entities
    from itm_lab.data.registry import KNOWN
    from itm_lab.data.report import table

    if dataset is Checked.entities:
        findings, sentence, whole = check_entities(data_root)
    else:
        findings, sentence, whole = check_dataset(KNOWN[dataset], dataset.value, data_root, quick)
    for line in table(findings):
        typer.echo(line)
    typer.echo(f"\n{sentence}")
    raise typer.Exit(not whole)


@app.command()
def fetch(
    dataset: Annotated[Fetched, typer.Argument(help="What to fetch.")],
    data_root: DataRoot = Path("data"),
) -> None:
    """Fetch SCAN's features from Kaggle (needs an account). Called again after an interruption, it goes on."""
    from itm_lab.data import fetch as fetching
    from itm_lab.data.registry import KNOWN

    typer.echo(fetching.announced(KNOWN[dataset]))
    typer.echo(f"{fetching.fetch(KNOWN[dataset], dataset.value, data_root)}: whole")


@app.command()
def ids(
    folder: Annotated[Path, typer.Argument(help="A dataset folder.")],
    split: Annotated[str, typer.Argument(help="train, dev, test or testall.")],
    karpathy: KarpathyFile,
    names: Annotated[
        bool | None, typer.Option("--names/--numbers", help="By default names for Flickr, numbers for COCO.")
    ] = None,
    set_aside: Annotated[bool, typer.Option("--set-aside", help="Rename an ids file that says otherwise.")] = False,
) -> None:
    """Write which image each row is, after comparing the captions line by line."""
    from itm_lab.data.disk import counted
    from itm_lab.data.ids import write_ids
    from itm_lab.data.karpathy import read_karpathy

    count, written = write_ids(folder, split, read_karpathy(karpathy), names, set_aside)
    for path in written:
        typer.echo(f"{path}: written")
    typer.echo(f"{split}: {counted(count, 'image')}, every caption as in {karpathy.name}")


@app.command("convert-tsv")
def convert_tsv(
    files: Annotated[list[Path], typer.Argument(help="TSV files of bottom-up attention.")],
    out: Annotated[Path, typer.Option(help="Dataset folder to write to.")],
    split: Annotated[str, typer.Option(help="train, dev, test or testall; a name of your own without --captions.")],
    captions: Annotated[Path | None, typer.Option(help="Karpathy's JSON: images, their order, captions.")] = None,
    id_list: Annotated[Path | None, typer.Option("--ids", help="Images and their order, one a line.")] = None,
    most: Most = 0,
    swap_sizes: Annotated[bool, typer.Option("--swap-sizes", help="The files give heights as widths.")] = False,
) -> None:
    """Convert bottom-up features to the precomputed format, with boxes. After an interruption it goes on."""
    from itm_lab.data.bottom_up import convert
    from itm_lab.data.disk import counted
    from itm_lab.data.karpathy import read_karpathy
    from itm_lab.data.selection import wanted_from_karpathy, wanted_from_list
    from itm_utils.errors import input_error

    if captions and id_list:
        raise input_error("--captions and --ids", "both", "one of them: each says which images are wanted")
    wanted = None
    if captions:
        splits = read_karpathy(captions)
        wanted = wanted_from_karpathy(splits, split, most)
        _echo_remarks(splits.remarks)
    elif id_list:
        wanted = wanted_from_list(id_list)
    done = convert(files, out, split, wanted, swap_sizes)
    typer.echo(
        f"{out}, {split}: {counted(done.rows, 'image')} x {done.regions} regions x {done.width:,} numbers, with boxes"
    )
    if done.already:
        typer.echo("It was there already, from the same files.")
    if done.unwanted:
        typer.echo(f"{counted(done.unwanted, 'other image')} in the files")
    if done.repeated:
        typer.echo(
            f"{counted(len(done.repeated), 'image')} stood again with the same numbers, first {done.repeated[0]}: skipped"
        )
    if not captions and not (out / f"{split}_caps.txt").exists():
        typer.echo(f"The split opens once {split}_caps.txt is there: --captions writes it from Karpathy's JSON.")


@app.command("split-captions")
def split_captions(
    json_file: Annotated[Path, typer.Argument(metavar="JSON", help="Karpathy's file of splits.")],
    out: Annotated[Path, typer.Option(help="Dataset folder to write to.")],
    most: Most = 0,
) -> None:
    """Write captions and ids of every split, and whose caption is whose where the numbers differ."""
    from itm_lab.data.disk import counted
    from itm_lab.data.karpathy import write_split_captions

    splits, written = write_split_captions(json_file, out, most)
    for path in written:
        typer.echo(f"{path}: written")
    for split in splits.ours():
        images = splits.images_of(split)
        captions = sum(len(image.captions[: most or None]) for image in images)
        typer.echo(f"{split}: {counted(len(images), 'image')}, {counted(captions, 'caption')}")
    _echo_remarks(splits.remarks)


@app.command()
def vocabulary(
    folder: Annotated[Path, typer.Argument(help="A dataset folder with train and dev captions.")],
    threshold: Annotated[int, typer.Option(min=1, help="How often a word must occur.")] = 4,
) -> None:
    """Build the vocabulary that the recipes look for, as the public code does."""
    from itm_lab.data.fetch import write_vocabulary

    typer.echo(f"{write_vocabulary(folder, threshold)}: written")


def _echo_remarks(remarks: list[str]) -> None:
    for remark in remarks:
        typer.echo(remark)


if __name__ == "__main__":
    app()
