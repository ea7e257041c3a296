"""The pictures of a split for the eye: photographs from a folder, scenes drawn anew, or plain frames with boxes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from itm_book.photos.pictures import UnreadableError, read_picture
from itm_utils.errors import problem
from itm_utils.precomp import PrecompSplit, load_array

SIDE = 480  # pixels of the longer side, for a sheet


class Gallery:
    """Pictures, sizes and boxes of a split. photos: the folder that holds the pictures by the names in ``_ids.txt``.

    notes: pictures that could not be shown, and why.
    """

    def __init__(self, split: PrecompSplit, photos: Path | None = None) -> None:
        self.split, self.photos = split, photos
        self.notes: list[str] = []
        self._kept: dict[int, np.ndarray | None] = {}
        if photos is not None and not photos.is_dir():
            raise problem(photos, "no such folder", "the photographs of the split")
        if photos is not None and split.ids is None:
            path = split.root / f"{split.name}_ids.txt"
            raise problem(path, "no such file", "the names of the pictures, one a line", "Leave --photos out.")

    def name(self, image: int) -> str:
        """What the picture is called."""
        return self.split.ids[image] if self.split.ids is not None else f"{self.split.name} {image}"

    def picture(self, image: int) -> np.ndarray | None:
        """(h, w, 3) uint8, or None where there are only boxes to show."""
        if image not in self._kept:
            self._kept[image] = self._photograph(image) if self.photos is not None else self._drawing(image)
        return self._kept[image]

    def _photograph(self, image: int) -> np.ndarray | None:
        path = self.photos / self.name(image)
        try:
            return read_picture(path, SIDE).pixels
        except UnreadableError as reason:
            why = "not there" if not path.exists() else str(reason)
            self.notes.append(f"{path}: {why}; shown as its boxes")
            return None

    def _drawing(self, image: int) -> np.ndarray | None:
        """The little world has its pictures with it; drawn again they are larger."""
        path = self.split.root / f"{self.split.name}_pictures.npy"
        if not path.is_file():
            return None
        from itm_utils.scenes.build import scenes_folder
        from itm_utils.scenes.draw import draw
        from itm_utils.scenes.load import load_scenes
        from itm_utils.scenes.show import SCALE

        if self.split.root == scenes_folder():
            return np.asarray(draw(load_scenes(self.split.name).scenes[image], SCALE))
        return np.array(load_array(path, mmap_mode="r")[image])

    def size(self, image: int) -> tuple[float, float]:
        """Width and height in the units of the boxes."""
        if self.split.sizes is not None:
            return tuple(float(length) for length in self.split.sizes[image])
        pixels, boxes = self.picture(image), self._stored(image)
        if pixels is not None and (boxes is None or boxes.max() > 1):
            return float(pixels.shape[1]), float(pixels.shape[0])
        return (1.0, 1.0) if boxes is None else tuple(float(end) for end in boxes[:, 2:].max(axis=0))

    def boxes(self, image: int) -> np.ndarray | None:
        """(r, 4) boxes in the units of :meth:`size`; None where the dataset has none that can be drawn."""
        boxes = self._stored(image)
        if boxes is None:
            return None
        shares = boxes.max() <= 1.0 and self.split.sizes is not None  # some files have shares of width and height
        return boxes * np.tile(self.size(image), 2) if shares else boxes

    def _stored(self, image: int) -> np.ndarray | None:
        boxes = self.split.region_boxes(np.array([image]))
        return boxes[0] if boxes is not None and boxes.shape[-1] == 4 else None
