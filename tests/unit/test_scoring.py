"""Blocked scoring: the same numbers as all at once, whatever the blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from itm_utils import scoring
from itm_utils.data.batches import WordCaptions
from itm_utils.data.precomp import open_split
from itm_utils.errors import ItmError
from itm_utils.matcher import ImageBatch, Images, Matcher, Scores, TextBatch, Texts
from itm_utils.scoring import block_shape, encode_split, score_all, score_split, trim


class WordsLookAtRegions(Matcher):
    """A decoupled attention matcher, small and with every mask that matters."""

    def __init__(self, vocabulary_size: int, image_dim: int, width: int = 8) -> None:
        super().__init__()
        self.region_proj = nn.Linear(image_dim, width)
        self.word_embedding = nn.Embedding(vocabulary_size, width)
        self.noise = nn.Dropout(0.5)

    def encode_images(self, batch: ImageBatch) -> Images:
        return Images(local=self.noise(self.region_proj(batch.regions)), mask=batch.mask)

    def encode_texts(self, batch: TextBatch) -> Texts:
        words = self.word_embedding(batch.words)
        positions = torch.cumsum(batch.mask, dim=1)
        return Texts(local=words, mask=batch.mask, extra_local={"positions": positions}, lengths=batch.lengths)

    def score(self, images: Images, texts: Texts) -> Scores:
        dots = torch.einsum("ird,cwd->icrw", images.local, texts.local)
        real = texts.mask[None, :, :].float()
        t2i = (dots.amax(dim=2) * real).sum(dim=2) / real.sum(dim=2)
        i2t = dots.masked_fill(~texts.mask[None, :, None, :], -torch.inf).amax(dim=3).mean(dim=2)
        return Scores(i2t=i2t, t2i=t2i)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "BATCH", 5)


@pytest.fixture
def scored(toy_root, toy_vocabulary):
    split = open_split(toy_root, "test")
    torch.manual_seed(0)
    model = WordsLookAtRegions(len(toy_vocabulary), split.feature_dim)
    texts = WordCaptions(split, toy_vocabulary)
    return model, split, texts, *encode_split(model, split, texts)


@pytest.mark.parametrize("pairs", [1, 7, 60, 10_000])
def test_blocks_do_not_change_a_score(scored, pairs: int) -> None:
    model, _, _, images, texts = scored
    whole = model.eval().score(images, texts)
    parts = score_all(model, images, texts, budget=pairs * model.bytes_per_pair(images, texts))
    torch.testing.assert_close(parts.i2t, whole.i2t.detach())
    torch.testing.assert_close(parts.t2i, whole.t2i.detach())


def test_a_split_is_scored_in_evaluation_mode_and_the_mode_is_put_back(scored) -> None:
    model, split, texts, images, captions = scored
    model.train()
    again = score_split(model, split, texts)
    assert model.training
    with pytest.raises(ItmError):
        score_split(model, split, texts, budget=1)
    assert model.training  # also after an error
    torch.testing.assert_close(again.i2t, score_all(model, images, captions).i2t)


def test_blocks_fit_the_budget(scored) -> None:
    model, _, _, images, texts = scored
    cost = model.bytes_per_pair(images, texts)
    for pairs in (1, 2, 13, 400, 10**6):
        rows, columns = block_shape(model, images, texts, pairs * cost)
        assert rows * columns <= pairs
        assert 1 <= rows <= len(images)
        assert 1 <= columns <= len(texts)
    with pytest.raises(ItmError, match="the cost of one pair"):
        block_shape(model, images, texts, cost - 1)


def test_blocks_of_expensive_pairs_have_few_captions() -> None:
    """Captions come in order of length, so few of them need little padding."""

    class Expensive(Matcher):
        def bytes_per_pair(self, images: Images, texts: Texts) -> int:
            return 1000

    images, texts = Images(pooled=torch.zeros(200, 2)), Texts(pooled=torch.zeros(200, 2))
    assert block_shape(Expensive(), images, texts, 400_000) == (66, 6)
    assert block_shape(Expensive(), images, texts, 40_000) == (40, 1)
    assert block_shape(Expensive(), images, texts, 10**7) == (100, 100)


def test_trim_drops_common_padding_everywhere(scored) -> None:
    _, _, _, _, texts = scored
    short = texts[texts.mask.sum(dim=1).argsort()[:3]]
    trimmed = trim(short)
    longest = int(short.mask.sum(dim=1).max())
    assert trimmed.local.shape[1] == trimmed.mask.shape[1] == trimmed.extra_local["positions"].shape[1] == longest


def test_trim_keeps_real_words_behind_masked_ones_and_leaves_whole_items_alone() -> None:
    mask = torch.tensor([[False, True, True, True, False], [False, True, False, False, False]])
    texts = Texts(local=torch.rand(2, 5, 3), mask=mask, extra={"gate": torch.rand(2, 5)}, lengths=torch.tensor([4, 2]))
    trimmed = trim(texts)
    assert trimmed.mask.sum() == mask.sum()
    assert trimmed.local.shape == (2, 4, 3)
    assert trimmed.extra["gate"].shape == (2, 5)
    assert trim(
        Texts(
            local=torch.rand(1, 3, 2),
            mask=torch.zeros(1, 3, dtype=torch.bool),
            lengths=torch.zeros(1, dtype=torch.long),
        )
    ).local.shape == (1, 1, 2)


def test_models_that_leave_something_out_say_so() -> None:
    with pytest.raises(ItmError, match="Matcher does not define score"):
        Matcher().score(Images(), Texts())


def test_a_matcher_keeps_its_own_copy_of_mutable_arguments() -> None:
    """What a caller does afterwards to its list or dictionary does not reach a checkpoint's config."""

    class Configured(Matcher):
        def __init__(self, sizes: dict[str, list[int]], layers: list[int], **more: object) -> None:
            super().__init__()

    sizes, layers, heads = {"width": [8]}, [1], [2]
    model = Configured(sizes, layers, heads=heads)
    sizes["width"].append(16), layers.append(2), heads.append(4)
    assert model.config == {"sizes": {"width": [8]}, "layers": [1], "heads": [2]}


def test_a_tile_bounds_the_blocks_on_a_cpu(scored, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that names a tile is never given more pairs at once, however large the budget; the scores stay."""
    model, _, _, images, texts = scored
    whole, sizes, plain = score_all(model, images, texts), [], model.score
    monkeypatch.setattr(type(model), "tile", 6 * model.bytes_per_pair(images, texts))
    monkeypatch.setattr(model, "score", lambda i, c: sizes.append(len(i) * len(c)) or plain(i, c))
    torch.testing.assert_close(score_all(model, images, texts).t2i, whole.t2i)
    assert max(sizes) <= 6 < len(images) * len(texts)
