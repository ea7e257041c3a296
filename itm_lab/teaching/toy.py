"""The book's toy tensor: small enough to check by hand, and sent through every model."""

from __future__ import annotations

import torch

from itm_utils.matcher import ImageBatch, TextBatch

TOY_WORDS = ("<pad>", "<start>", "<end>", "<unk>", "red", "blue", "cube", "ball", "a")


def toy_regions() -> torch.Tensor:
    """(2, 3, 4): two images of three regions, each region 4-dimensional (red, blue, cube, ball).

    Image 0 shows a red cube and a blue ball, image 1 a blue cube and a blue ball; both have some background.
    """
    red_cube, blue_cube, blue_ball = (1, 0, 1, 0), (0, 1, 1, 0), (0, 1, 0, 1)
    background = (0.25, 0.25, 0.25, 0.25)
    return torch.tensor([[red_cube, blue_ball, background], [blue_cube, blue_ball, background]], dtype=torch.float32)


def toy_words() -> torch.Tensor:
    """(2, 3, 4): two captions of three words in the same four dimensions: "red cube ball", "blue cube ball"."""
    red, blue, cube, ball = torch.eye(4)
    return torch.stack([torch.stack([red, cube, ball]), torch.stack([blue, cube, ball])])


def toy_batch() -> tuple[ImageBatch, TextBatch]:
    """The toy tensor as a matcher receives it: region features, and captions as word ids."""
    regions = toy_regions()
    ids = {word: index for index, word in enumerate(TOY_WORDS)}
    words = torch.tensor([[ids[w] for w in caption.split()] for caption in ("red cube ball", "blue cube ball")])
    images = ImageBatch(regions=regions, mask=torch.ones(2, 3, dtype=torch.bool), ids=torch.arange(2))
    return images, TextBatch(lengths=torch.tensor([3, 3]), ids=torch.arange(2), words=words)
