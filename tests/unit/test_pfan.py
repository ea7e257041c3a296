"""PFAN: blocks against counted pixels, positions and scores against loops, and what must not happen."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from cross_attention import check_definition, ragged, texts_of
from torch import Tensor

from itm_utils.errors import ItmError
from itm_utils.matcher import ImageBatch
from itm_utils.models.pfan import (
    MAX_BLOCKS,
    PFAN,
    POSITIONS,
    block_overlaps,
    build,
    grid_corners,
    position_vectors,
    read_blocks,
    score_by_loop,
    top_blocks,
)
from itm_utils.models.scan import POOLINGS, SCAN

SIZE = torch.tensor([[64, 32]])  # an image of 64 x 32 pixels, so that x and y cannot be mixed up


def random_boxes(count: int, seed: int = 0) -> Tensor:
    """(1, count, 4) boxes with whole pixels inside an image of 64 x 32."""
    rng = np.random.default_rng(seed)
    left, top = rng.integers(0, 60, count), rng.integers(0, 28, count)
    width, height = rng.integers(1, 65 - left), rng.integers(1, 33 - top)
    return torch.tensor(np.stack([left, top, left + width, top + height], axis=1), dtype=torch.float32)[None]


def model(direction: str = "t2i", position: str = "focused", **more) -> PFAN:
    settings = {"temperature": 7.0, "lse": 5.0, "width": 6, "word_dim": 5, "position_dim": 3, "grid": 4} | more
    return PFAN(12, 7, direction=direction, position=position, **settings)


def images_of(count: int, regions: int = 4, seed: int = 3) -> ImageBatch:
    features = torch.randn(count, regions, 7, generator=torch.Generator().manual_seed(seed))
    return ImageBatch(
        regions=features,
        mask=torch.ones(count, regions, dtype=torch.bool),
        ids=torch.arange(count),
        boxes=random_boxes(count * regions, seed).view(count, regions, 4),
        sizes=SIZE.expand(count, 2),
    )


# --- boxes and blocks ---------------------------------------------------------------------------------------------


def test_overlap_is_the_number_of_shared_pixels() -> None:
    boxes = random_boxes(50)
    ours = block_overlaps(*grid_corners(boxes, SIZE, 4), 4)[0].view(50, 4, 4)  # blocks of 16 x 8 pixels
    for box, found in zip(boxes[0].int().tolist(), ours, strict=True):
        pixels = torch.zeros(64, 32)  # columns first
        pixels[box[0] : box[2], box[1] : box[3]] = 1
        counted = pixels.view(4, 16, 4, 8).sum(dim=(1, 3)) / (16 * 8)
        torch.testing.assert_close(found, counted)


def test_blocks_are_numbered_column_by_column() -> None:
    bottom_left = torch.tensor([[[0.0, 24.0, 16.0, 32.0]]])
    blocks, share = top_blocks(bottom_left, SIZE, grid=4)
    assert blocks[0, 0].tolist() == [3] + [16] * (MAX_BLOCKS - 1)  # column 0, row 3
    assert share[0, 0].tolist() == [1.0] + [0.0] * (MAX_BLOCKS - 1)


def test_shares_belong_to_the_largest_overlaps() -> None:
    boxes = random_boxes(80, seed=1)
    area = block_overlaps(*grid_corners(boxes, SIZE, 16), 16)
    blocks, share = top_blocks(boxes, SIZE, grid=16)
    largest = area.sort(dim=-1, descending=True).values[..., :MAX_BLOCKS]
    torch.testing.assert_close(share, largest / largest.sum(dim=-1, keepdim=True))
    real = share > 0
    assert (blocks[~real] == 256).all()
    torch.testing.assert_close(
        area[0, torch.arange(80)[:, None], blocks[0].clamp(max=255)][real[0]], largest[0][real[0]]
    )
    assert all(len(set(row[keep].tolist())) == keep.sum() for row, keep in zip(blocks[0], real[0], strict=True))


def test_among_equals_the_middle_wins_whatever_the_order_of_the_boxes() -> None:
    whole = torch.tensor([[[0.0, 0.0, 64.0, 32.0]]])
    blocks, _ = top_blocks(whole, SIZE, grid=16)
    columns, rows = blocks // 16, blocks % 16
    assert columns.min() >= 5 and columns.max() <= 10 and rows.min() >= 5 and rows.max() <= 10
    boxes = random_boxes(30, seed=2)
    turned = boxes.flip(1)
    assert (top_blocks(boxes, SIZE)[0] == top_blocks(turned, SIZE)[0].flip(1)).all()
    assert (top_blocks(boxes, SIZE)[0][:, 7:8] == top_blocks(boxes[:, 7:8], SIZE)[0]).all()


def test_boxes_beyond_the_image_and_without_area() -> None:
    odd = torch.tensor([[[-10.0, -5.0, 90.0, 50.0], [8.0, 8.0, 8.0, 20.0], [70.0, 0.0, 80.0, 5.0]]])
    blocks, share = top_blocks(odd, SIZE, grid=4)
    assert share.isfinite().all()
    assert share.sum(dim=-1).tolist() == [[pytest.approx(1.0), 0.0, 0.0]]
    assert (blocks[0, 1:] == 16).all()
    single = top_blocks(odd, SIZE, grid=1)
    assert single[0].shape == (1, 3, 1) and single[0][0, :, 0].tolist() == [0, 1, 1]


# --- position vectors ---------------------------------------------------------------------------------------------


def by_loop(queries: Tensor, table: Tensor, blocks: Tensor, share: Tensor, position: str) -> Tensor:
    """Position vectors one region at a time, from the definitions."""
    found = []
    for question, numbers, part in zip(queries[0], blocks[0], share[0], strict=True):
        rows = table[numbers]
        fit = torch.tanh(rows @ question)
        if position == "public":
            attention = fit.exp() / fit.exp().sum()
            weights = (part * attention).exp() / (part * attention).exp().sum()
        else:
            kept = part > 0
            rows, fit, part = rows[kept], fit[kept], part[kept]
            weights = part * fit.exp() if position == "focused" else part
            weights = weights / weights.sum()
        found.append(weights @ rows)
    return torch.stack(found)[None]


@pytest.mark.parametrize("position", ["focused", "area", "public"])
def test_position_vectors_are_the_definition_with_gradients(position: str) -> None:
    blocks, share = top_blocks(random_boxes(20, seed=4).double(), SIZE, grid=4)
    results = []
    for way in (position_vectors, by_loop):
        rng = torch.Generator().manual_seed(0)
        queries = torch.randn(1, 20, 3, generator=rng, dtype=torch.float64).requires_grad_()
        table = torch.randn(17, 3, generator=rng, dtype=torch.float64).requires_grad_()
        found = way(queries, table, blocks, share, position)
        (found * torch.randn(1, 20, 3, generator=rng, dtype=torch.float64)).sum().backward()
        none = torch.zeros_like(queries)
        results.append((found.detach(), none if queries.grad is None else queries.grad, table.grad))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("position", "moves"), [("focused", False), ("area", False), ("public", True)])
def test_empty_slots_count_only_in_the_public_way(position: str, moves: bool) -> None:
    torch.manual_seed(0)
    matcher, batch = model(position=position, grid=16), images_of(2)
    before = matcher.encode_images(batch).local
    with torch.no_grad():
        matcher.position_encoder.block_embedding.weight[-1] += 5
    assert torch.allclose(before, matcher.encode_images(batch).local) != moves


def test_public_block_files_and_pixels_give_the_same() -> None:
    torch.manual_seed(0)
    matcher, batch = model(grid=16), images_of(3)
    blocks, share = top_blocks(batch.boxes, batch.sizes)
    stored = ImageBatch(batch.regions, batch.mask, batch.ids, torch.cat([blocks.float(), share], dim=-1))
    torch.testing.assert_close(matcher.encode_images(stored).local, matcher.encode_images(batch).local)


@pytest.mark.parametrize("position", POSITIONS)
def test_a_mirrored_image_is_another_one_unless_positions_are_off(position: str) -> None:
    torch.manual_seed(0)
    matcher, batch = model(position=position), images_of(3)
    mirrored = images_of(3)
    mirrored.boxes = torch.stack([64 - batch.boxes[..., 2], batch.boxes[..., 1], 64 - batch.boxes[..., 0],
                                  batch.boxes[..., 3]], dim=-1)  # fmt: skip
    same = torch.allclose(matcher.encode_images(batch).local, matcher.encode_images(mirrored).local)
    assert same == (position == "none")


def test_a_region_without_area_has_a_score_and_gradients() -> None:
    torch.manual_seed(0)
    matcher, batch = model(), images_of(2)
    batch.boxes[0, 1] = 5.0
    scores = matcher.score(matcher.encode_images(batch), matcher.encode_texts(texts_of([3, 5]))).i2t
    scores.sum().backward()
    assert scores.isfinite().all()
    assert all(p.grad.isfinite().all() for p in matcher.parameters())


# --- scores -------------------------------------------------------------------------------------------------------


def one_pair(regions: Tensor, words: Tensor, direction: str, pooling: str, bonus: float) -> Tensor:
    """The definition, written out: regions (r, d), words (w, d) without padding."""
    keys, queries = (regions, words) if direction == "t2i" else (words, regions)
    fair = keys @ queries.T
    fair = torch.where(fair > 0, fair, 0.1 * fair)
    fair = fair / (fair.pow(2).sum(dim=1, keepdim=True).sqrt() + 1e-8)
    weights = (7.0 * fair).exp()
    weights = weights / weights.sum(dim=0)  # (k, q)
    found = weights.T @ keys
    relevance = (queries * found).sum(dim=1) / (queries.norm(dim=1) * found.norm(dim=1)).clamp_min(1e-8)
    ways = {
        "LogSumExp": lambda x: (5.0 * x).exp().sum().log() / 5.0,
        "Mean": torch.mean,
        "Max": torch.max,
        "Sum": torch.sum,
    }
    return ways[pooling](relevance) + bonus * ways[pooling](weights.max(dim=0).values)


@pytest.mark.parametrize(
    ("direction", "pooling", "bonus"), list(itertools.product(("t2i", "i2t"), POOLINGS, (0.0, 0.5)))
)
def test_kernel_is_the_definition_with_gradients(direction: str, pooling: str, bonus: float) -> None:
    given = {"direction": direction, "pooling": pooling, "bonus": bonus}
    check_definition(model(**given), partial(one_pair, **given), ragged())


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_loop_and_kernel_agree(direction: str) -> None:
    torch.manual_seed(0)
    matcher = model(direction)
    images, texts = matcher.encode_images(images_of(3)), matcher.encode_texts(texts_of([2, 6, 1]))
    scores = matcher.score(images, texts).i2t
    looped = score_by_loop(images, texts, direction, "clipped_l2norm", 7.0, "Mean", 5.0, 0.5)
    torch.testing.assert_close(scores, looped)


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_without_position_and_bonus_it_is_scan(direction: str) -> None:
    torch.manual_seed(0)
    ours = model(direction, "none", bonus=0.0)
    torch.manual_seed(0)
    scan = SCAN(12, 7, direction=direction, pooling="Mean", temperature=7.0, lse=5.0, width=6, word_dim=5)
    assert all((a == b).all() for a, b in zip(ours.parameters(), scan.parameters(), strict=True))
    image_batch, text_batch = images_of(3), texts_of([2, 7, 4])
    found = [m.score(m.encode_images(image_batch), m.encode_texts(text_batch)).i2t for m in (ours, scan)]
    assert (found[0] == found[1]).all()


def test_half_precision_encoders_work() -> None:
    torch.manual_seed(0)
    matcher = model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = matcher.score(matcher.encode_images(images_of(3)), matcher.encode_texts(texts_of([2, 5, 3]))).i2t
    assert scores.dtype == torch.float32 and scores.isfinite().all()


# --- bad input ----------------------------------------------------------------------------------------------------


def test_boxes_that_cannot_be_used_are_named() -> None:
    batch = images_of(1)
    cases = [
        ({"boxes": None}, "boxes: found none"),
        ({"sizes": None}, "sizes: found none"),
        ({"boxes": torch.zeros(1, 4, 31)}, "31 numbers per region"),
        ({"boxes": torch.full((1, 4, 30), 256.0)}, "block index 256"),
    ]
    for change, message in cases:
        broken = ImageBatch(**(vars(batch) | change))
        with pytest.raises(ItmError, match=message):
            read_blocks(broken, grid=8)


def test_unknown_positions_are_refused() -> None:
    with pytest.raises(ItmError, match="position: found 'left', expected one of focused"):
        model(position="left")


def test_without_positions_no_boxes_are_needed() -> None:
    batch = images_of(2)
    batch.boxes = batch.sizes = None
    assert model(position="none").encode_images(batch).local.shape == (2, 4, 6)


def test_build_takes_the_parameters_of_the_chapter() -> None:
    parameters = {"width": 6, "word_dim": 5, "direction": "i2t", "first_norm": "clipped_l2norm", "pooling": "Mean",
                  "temperature": 4.0, "lse": 5.0, "bonus": 0.0, "position": "area", "position_dim": 3, "grid": 4,
                  "epochs": 2}  # fmt: skip
    built = build(parameters, 12, 7)
    assert built.config["position"] == "area" and built.direction == "i2t" and built.config["width"] == 6
