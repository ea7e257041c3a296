"""Frozen region features, computed from pixels: the papers' bottom-up detector in miniature.

A small convolutional network looks at the 24 x 24 crop of a box, and at the box's width and height. It was
trained on separately drawn images to name shape, colour, pattern, size and place; its last hidden layer is
the feature. It knows how large a box is but not where: positions are in the boxes file.

Make the shipped weights again with ``itm scenes train-regions`` (some minutes on one core).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from itm_lab.scenes.draw import draw, toy_boxes
from itm_lab.scenes.portable_random import PortableRandom
from itm_lab.scenes.proposals import propose
from itm_lab.scenes.world import ATTRIBUTES, CANVAS, PLACES, Knobs, sample_scene
from itm_utils.errors import input_error
from itm_utils.progress import bar

WEIGHTS = Path(__file__).parent / "weights" / "regions.safetensors"
CROP = 24  # pixels
WIDTH = 128  # features a region
NET_SEED = 9_001  # generator seed of the crops the network is trained on; no dataset uses it
IGNORE = -100  # a label that the loss skips


class RegionNet(nn.Module):
    """Crops (n, 3, 24, 24) in [0, 1] and sizes (n, 2) in [0, 1] to features (n, 128), all >= 0."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
            nn.Flatten(),
        )  # fmt: skip
        self.merge = nn.Linear(64 * 9 + 2, WIDTH)

    def forward(self, crops: Tensor, sizes: Tensor) -> Tensor:
        seen = self.look(crops * 2.0 - 1.0)
        return F.relu(self.merge(torch.cat([seen, 4.0 * sizes], dim=1)))


class Namer(nn.Module):
    """One linear classifier a head, used in training only: "nothing" is the last shape."""

    def __init__(self) -> None:
        super().__init__()
        classes = {name: len(values) for name, values in ATTRIBUTES.items()} | {"place": len(PLACES)}
        classes["shape"] += 1
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, n) for name, n in classes.items()})

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        return {name: head(features) for name, head in self.heads.items()}


def cut(pixels: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Crops (i * r, 3, 24, 24) in [0, 1] and sizes (i * r, 2) of uint8 images (i, 96, 96, 3), boxes (i, r, 4)."""
    images, regions = boxes.shape[:2]
    boxes = boxes.float()
    steps = (torch.arange(CROP) + 0.5) / CROP
    x = boxes[..., 0:1] + (boxes[..., 2:3] - boxes[..., 0:1]) * steps  # (i, r, 24)
    y = boxes[..., 1:2] + (boxes[..., 3:4] - boxes[..., 1:2]) * steps
    grid = torch.stack(
        [x[:, :, None, :].expand(-1, -1, CROP, -1), y[..., None].expand(-1, -1, -1, CROP)], dim=-1
    )  # (i, r, 24, 24, 2)
    grid = grid.reshape(images, regions * CROP, CROP, 2) * (2.0 / CANVAS) - 1.0
    planes = pixels.permute(0, 3, 1, 2).float() / 255.0
    crops = F.grid_sample(planes, grid, align_corners=False, padding_mode="border")
    crops = crops.reshape(images, 3, regions, CROP, CROP).transpose(1, 2).flatten(0, 1)
    sizes = ((boxes[..., 2:] - boxes[..., :2]) / CANVAS).flatten(0, 1)
    return crops, sizes


def load_net(path: Path = WEIGHTS) -> RegionNet:
    """The frozen network."""
    if not path.is_file():
        raise input_error(path, "no such file", "the region network's weights", "Run: itm scenes train-regions")
    net = RegionNet()
    net.load_state_dict(load_file(path))
    return net.eval().requires_grad_(False)


@torch.no_grad()
def region_features(net: RegionNet, pixels: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """(i, r, 128) float32 features of images (i, 96, 96, 3) uint8 at boxes (i, r, 4)."""
    crops, sizes = cut(torch.from_numpy(np.array(pixels)), torch.from_numpy(np.array(boxes)))
    return net(crops, sizes).reshape(*boxes.shape[:2], WIDTH).numpy()


# -- training --------------------------------------------------------------------------------------------------


def sample_crops(scenes: int, seed: int = NET_SEED) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Crops as uint8 (n, 3, 24, 24), sizes (n, 2) and labels of freshly drawn scenes."""
    knobs = Knobs()
    crops, sizes, labels = [], [], {name: [] for name in (*ATTRIBUTES, "place")}
    for number in bar(range(scenes), "drawing crops", "scene"):
        rng = PortableRandom(seed, number)
        scene = sample_scene(rng, knobs)
        toys = toy_boxes(scene)
        boxes = propose(rng, toys, knobs)
        crop, size = cut(torch.from_numpy(draw(scene))[None], torch.from_numpy(boxes)[None])
        crops.append((crop * 255.0).round().to(torch.uint8))
        sizes.append(size)
        for name, values in label_boxes(scene, toys, boxes).items():
            labels[name].append(values)
    return torch.cat(crops), torch.cat(sizes), {name: torch.cat(values) for name, values in labels.items()}


def label_boxes(scene, toys: np.ndarray, boxes: np.ndarray) -> dict[str, Tensor]:
    """What the network should say of each box: the toy that fills most of it, or nothing where none fills two fifths.

    As a detector's region features do, it names what a box shows, whether or not the box fits: half a red cube is red.
    """
    shares = filled(boxes, toys)
    best, found = shares.argmax(axis=1), shares.max(axis=1) >= 0.4
    labels = {}
    for name, values in ATTRIBUTES.items():
        words = np.array([values.index(getattr(scene.toys[k], name)) for k in best])
        labels[name] = torch.from_numpy(np.where(found, words, len(values) if name == "shape" else IGNORE))
    labels["place"] = torch.full((len(boxes),), PLACES.index(scene.place))
    return labels


def filled(boxes: np.ndarray, toys: np.ndarray) -> np.ndarray:
    """Share of each box (r, 4) that lies within the tight box of each toy (n, 4): (r, n)."""
    low = np.maximum(boxes[:, None, :2], toys[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], toys[None, :, 2:])
    shared = np.clip(high - low, 0, None).prod(axis=2)
    return shared / (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)[:, None]


def train(scenes: int = 2_000, epochs: int = 6, path: Path = WEIGHTS) -> dict[str, float]:
    """Train the network, save its weights, and return its accuracies on crops it has not seen."""
    torch.manual_seed(0)
    crops, sizes, labels = sample_crops(scenes)
    net, namer = RegionNet(), Namer()
    parameters = [*net.parameters(), *namer.parameters()]
    batch = 256
    steps = epochs * (len(crops) // batch)
    optimiser = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=3e-3, total_steps=steps)
    order = torch.cat([torch.randperm(len(crops))[: steps // epochs * batch] for _ in range(epochs)])
    for rows in bar(order.split(batch), "training regions", "step"):
        names = namer(net(crops[rows].float() / 255.0, sizes[rows]))
        terms = [F.cross_entropy(names[name], labels[name][rows], ignore_index=IGNORE) for name in labels]
        loss = sum(terms[1:], terms[0])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    save_file({name: value.contiguous() for name, value in net.state_dict().items()}, path)
    path.chmod(0o644)
    return accuracies(net, namer)


@torch.no_grad()
def accuracies(net: RegionNet, namer: Namer) -> dict[str, float]:
    """Share of boxes named right, by head, on 200 scenes of another seed."""
    crops, sizes, labels = sample_crops(200, NET_SEED + 1)
    names = namer(net(crops.float() / 255.0, sizes))
    return {
        name: (names[name].argmax(1) == labels[name])[labels[name] != IGNORE].float().mean().item() for name in labels
    }
