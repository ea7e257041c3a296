"""``itm features`` and ``itm search``: from your own folder of photographs to a model that searches it.

Heavy modules are imported inside the commands, so that ``itm --help`` is quick.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from itm_lab.photos.index_cli import app as index_app
from itm_utils.errors import input_error, printable

if TYPE_CHECKING:
    from itm_lab.photos.extract import Made
    from itm_lab.photos.regions import Source

app = typer.Typer()
app.add_typer(index_app, name="index", help="Search a large collection: build an index, add to it, ask it.")
MinCount = Annotated[int, typer.Option(min=1, help="How often a word must occur to be in the vocabulary.")]
Regions = Annotated[bool, typer.Option("--regions", help="Cells, a detector's boxes, the image; else cells alone.")]
DetectorFile = Annotated[str, typer.Option(help="With --regions: yolox_nano, or the path of a YOLOX .onnx file.")]
NetworkFile = Annotated[str, typer.Option(help="With --regions: lite0, lite2, or the path of a .onnx file.")]
Layers = Annotated[
    int,
    typer.Option(min=1, max=2, help="With --regions: the last layer of a Lite network, or an earlier one beside it."),
]
Boxes = Annotated[int, typer.Option(min=1, max=100, help="With --regions: boxes beside 36 cells and the image.")]
Components = Annotated[
    str, typer.Option("--pca", help="Numbers that are left of each region; or the dataset whose components are taken.")
]


class Converted(StrEnum):
    flickr8k = "flickr8k"


@app.command()
def features(
    photos: Annotated[Path, typer.Argument(help="A folder of photographs; folders inside it count too.")],
    captions: Annotated[Path, typer.Option(help="CSV or TSV of file name and caption, or Flickr8k's token file.")],
    out: Annotated[Path, typer.Option(help="The dataset folder to make.")],
    split_sizes: Annotated[str, typer.Option(help="Proportions of train, dev and test.")] = "80,10,10",
    split_list: Annotated[
        list[str] | None, typer.Option(help="split=FILE with a name a line, for each split, instead of proportions.")
    ] = None,
    min_count: MinCount = 4,
    regions: Regions = False,
    detector: DetectorFile = "yolox_nano",
    network: NetworkFile = "lite0",
    layers: Layers = 1,
    boxes: Boxes = 11,
    pca: Components = "",
) -> None:
    """Make a dataset of your own photographs. Called again after an interruption, it goes on."""
    from itm_lab.photos.extract import extract

    source = open_source(detector, network, layers, boxes) if regions else None
    echo_made(extract(photos, captions, out, split_sizes, split_list, min_count, source=source, components=pca))


def convert(
    dataset: Annotated[Converted, typer.Argument(help="What to convert.")],
    folders: Annotated[list[Path], typer.Argument(help="The public folders: photographs, texts, annotations.")],
    out: Annotated[Path, typer.Option(help="The dataset folder to make.")],
    min_count: MinCount = 4,
    detector: DetectorFile = "yolox_nano",
    network: NetworkFile = "lite0",
    layers: Layers = 1,
    boxes: Boxes = 11,
    pca: Components = "",
) -> None:
    """Make a dataset with regions and phrases of public files. After an interruption it goes on."""
    from itm_lab.photos.flickr8k import convert_flickr8k

    echo_made(convert_flickr8k(folders, out, open_source(detector, network, layers, boxes), min_count, pca))


def open_source(detector: str, network: str, layers: int, boxes: int) -> Source:
    """What turns photographs into cells and boxes."""
    from itm_lab.photos.detector import open_detector
    from itm_lab.photos.network import open_network
    from itm_lab.photos.regions import SIDE, CellsAndBoxes

    return CellsAndBoxes(open_network(network, SIDE, layers > 1), open_detector(detector), boxes)


def echo_made(made: Made) -> None:
    """What a dataset holds now, how fast it was made, and what was left out."""
    from itm_lab.data.disk import counted
    from itm_lab.photos.extract import SKIPPED
    from itm_lab.photos.report import summary

    for line in summary(made.remarks, str(made.folder / SKIPPED)):
        typer.echo(line)
    for split, (n_images, n_captions) in made.splits.items():
        typer.echo(f"{split}: {counted(n_images, 'image')}, {counted(n_captions, 'caption')}")
    if made.seconds:
        typer.echo(
            f"{counted(made.images, 'image')} in {made.seconds:.0f} s, {made.images / made.seconds:.1f} a second"
        )
    state = "was whole already, kept" if made.kept else "made"
    typer.echo(f"{made.folder}: {state}; {made.words:,} words in the vocabulary")


@app.command()
def search(
    query: Annotated[str, typer.Argument(help='A sentence: "two dogs on a beach".')] = "",
    *,
    data: Annotated[str, typer.Option(help="The dataset folder to search in, or scenes.")],
    model: Annotated[Path, typer.Option(help="The folder of a run, or one of its checkpoints.")],
    image: Annotated[str, typer.Option(help="An image of the split instead: which captions fit it?")] = "",
    split: Annotated[str, typer.Option(help="train, dev or test.")] = "test",
    photos: Annotated[Path | None, typer.Option(help="The folder of the photographs, to show them.")] = None,
    trained_on: Annotated[str, typer.Option(help="The run's own dataset folder, if it is not the one searched.")] = "",
    top: Annotated[int, typer.Option(min=1, max=40, help="How many matches.")] = 8,
    index: Annotated[
        Path | None, typer.Option(help="An index of this split (itm index build): only what it retrieves is scored.")
    ] = None,
    candidates: Annotated[int, typer.Option(min=1, help="With --index: how many items the model orders.")] = 200,
    out: Annotated[Path, typer.Option(help="The contact sheet.")] = Path("sheet.png"),
) -> None:
    """Find the images that fit a sentence, or the captions that fit an image, with a trained model."""
    if bool(query.strip()) == bool(image):
        found = "both" if image else "neither"
        raise input_error("itm search", f"{found} of a sentence and --image", "one of the two")
    from itm_lab.photos.answer import answer_image, answer_query
    from itm_lab.photos.retrieve import request_of
    from itm_lab.photos.search import open_run, trained_here
    from itm_lab.photos.sheet import check_place

    check_place(out)  # before the work, not after it
    opened = open_run(model, data, split, trained_on)
    if not trained_here(opened):
        typer.echo(f"note: {model} was trained on other images than the training split of {data}")
    request = request_of(index, opened, "captions" if image else "images", candidates) if index else None
    given = (photos, top, out, request)
    answer = answer_image(opened, image, *given) if image else answer_query(opened, query, *given)
    for line in answer:
        typer.echo(printable(line))  # captions come from a file, and may hold anything
    typer.echo(out)


if __name__ == "__main__":
    app()
