"""The images of a split for the eye: photographs from a folder, scenes drawn anew, or plain frames with boxes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from itm_lab.data.disk import read_lines
from itm_lab.photos.image_files import ImageFile, UnreadableError, read_image
from itm_lab.photos.regions import kinds_of
from itm_utils.data.precomp import PrecompSplit, load_array
from itm_utils.errors import input_error

SIDE = 480  # pixels of the longer side, for a sheet


class Gallery:
    """Images, sizes and boxes of a split. photos: the folder that holds the images, in it or in a folder of it.

    Their files are called as ``_names.txt`` says, where ``_ids.txt`` has COCO's numbers; else as ``_ids.txt`` does.
    notes: images that could not be shown, and why.
    """

    def __init__(self, split: PrecompSplit, photos: Path | None = None) -> None:
        self.split, self.photos = split, photos
        self.notes: list[str] = []
        self._kept: dict[int, ImageFile | None] = {}
        if photos is not None:
            if not photos.is_dir():
                raise input_error(photos, "no such folder", "the photographs of the split")
            self._folders = [photos, *sorted(path for path in photos.iterdir() if path.is_dir())]
            self._files = _file_names(split)

    def name(self, image: int) -> str:
        """What the image is called."""
        return self.split.ids[image] if self.split.ids is not None else f"{self.split.name} {image}"

    def pixels_of(self, image: int) -> np.ndarray | None:
        """(h, w, 3) uint8, or None where there are only boxes to show."""
        shown = self._shown(image)
        return None if shown is None else shown.pixels

    def _shown(self, image: int) -> ImageFile | None:
        """The image as it is drawn, with the size that it has itself."""
        if image not in self._kept:
            self._kept[image] = self._photograph(image) if self.photos is not None else self._drawing(image)
        return self._kept[image]

    def _photograph(self, image: int) -> ImageFile | None:
        places = [folder / self._files[image] for folder in self._folders]
        path = next((place for place in places if place.exists()), places[0])
        try:
            return read_image(path, SIDE)
        except UnreadableError as reason:
            why = "not there" if not path.exists() else str(reason)
            self.notes.append(f"{path}: {why}; shown as its boxes")
            return None

    def _drawing(self, image: int) -> ImageFile | None:
        """Scenes has its images with it; drawn again they are larger."""
        path = self.split.root / f"{self.split.name}_pixels.npy"
        if not path.is_file():
            return None
        from itm_lab.scenes.build import scenes_folder
        from itm_lab.scenes.draw import draw
        from itm_lab.scenes.load import load_scenes
        from itm_lab.scenes.show import SCALE

        stored = np.array(load_array(path, mmap_mode="r")[image])
        size = (stored.shape[1], stored.shape[0])
        if self.split.root == scenes_folder():
            return ImageFile(np.asarray(draw(load_scenes(self.split.name).scenes[image], SCALE)), size)
        return ImageFile(stored, size)

    def size(self, image: int) -> tuple[float, float]:
        """Width and height in the units of the boxes: of the whole image, however small it is drawn."""
        if self.split.sizes is not None:
            width, height = self.split.sizes[image]
            return float(width), float(height)
        if (shown := self._shown(image)) is not None:
            width, height = shown.size
            return float(width), float(height)
        boxes = self._stored(image)
        if boxes is None or self.split.box_shares:
            return 1.0, 1.0
        right, bottom = boxes[:, 2:].max(axis=0)
        return float(right), float(bottom)

    def boxes(self, image: int) -> np.ndarray | None:
        """(r, 4) boxes in the units of :meth:`size`; None where the dataset has none that can be drawn."""
        boxes = self._stored(image)
        still_shares = boxes is not None and self.split.sizes is None and self.split.box_shares
        return boxes * np.tile(self.size(image), 2) if still_shares else boxes

    def kinds(self, image: int) -> np.ndarray | None:
        """(r,) what each region is; None where the dataset does not say."""
        return kinds_of(self.split)[image] if "kinds" in self.split.files else None

    def _stored(self, image: int) -> np.ndarray | None:
        boxes = self.split.region_boxes(np.array([image]))
        return boxes[0] if boxes is not None and boxes.shape[-1] == 4 else None


def _file_names(split: PrecompSplit) -> list[str]:
    """What the file of each image is called."""
    path = split.root / f"{split.name}_names.txt"
    if path.exists():
        names, images = (
            read_lines(path, "the file names of the images, one a line"),
            len(split.features) // split.repeat,
        )
        if len(names) != images:
            raise input_error(path, f"{len(names):,} names", f"{images:,}, one per image")
        return names
    if split.ids is None:
        path = split.root / f"{split.name}_ids.txt"
        raise input_error(path, "no such file", "the names of the images, one a line", "Leave --photos out.")
    return split.ids
