# Generated from notebooks/14_search_at_scale.ipynb by `itm export`: edit the notebook, not this file.

"""What notebooks/14_search_at_scale.ipynb exports."""

import math

import torch
from torch import Tensor

from itm_utils.matcher import Encoded, Images, Matcher, Scores, Texts
from itm_utils.models.keeping_score import masked_mean
from itm_utils.models.vsepp import l2_normalize
from itm_utils.scoring import score_all


# cell summary
def summary_vectors(items: Encoded) -> Tensor:
    """One unit vector per encoded image or caption: (n, d).

    What the model pooled, of DCPA by its stage one; else the mean over regions or words.
    """
    if "intra" in items.extra:
        return l2_normalize(items.extra["intra"])
    if items.pooled is not None:
        return l2_normalize(items.pooled)
    return l2_normalize(masked_mean(items.local, items.mask))


# cell lists
def candidate_lists(cheap: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Candidates of each image, and of each caption, as masks of pairs: (i, c) both.

    cheap: scores (i, c). share: part of all candidates, at least one.
    """
    images, captions = cheap.shape
    nothing = torch.zeros_like(cheap, dtype=torch.bool)
    best_captions = cheap.topk(max(1, math.ceil(share * captions)), dim=1).indices
    best_images = cheap.topk(max(1, math.ceil(share * images)), dim=0).indices
    by_image = nothing.scatter(1, best_captions, True)
    return by_image, nothing.scatter(0, best_images, True)


# cell score-listed
def score_candidates(
    model: Matcher, images: Images, texts: Texts, lists: tuple[Tensor, Tensor]
) -> Scores:
    """Full scores (i, c) of the candidates, minus infinity elsewhere; image by image."""
    wanted = (lists[0] | lists[1]).cpu()
    i2t = torch.full(wanted.shape, -math.inf)
    t2i = i2t.clone()
    for image, row in enumerate(wanted):
        if len(captions := row.nonzero()[:, 0]):
            one = images[image : image + 1]
            found = score_all(model, one, texts[captions], progress=False)
            i2t[image, captions], t2i[image, captions] = found.i2t[0], found.t2i[0]
    return Scores(i2t, t2i)


# cell rerank
def rerank(cheap: Tensor, full: Scores, lists: tuple[Tensor, Tensor]) -> Scores:
    """Scores that rank the list of each query by the full score, then all others by the cheap one.

    cheap: (i, c). lists: of candidate_lists; a direction uses those of its own queries.
    """

    def ordered(scores: Tensor, listed: Tensor) -> Tensor:
        behind = cheap - cheap.max() + scores[listed].min() - 1  # below every candidate
        return torch.where(listed, scores, behind)

    return Scores(ordered(full.i2t, lists[0]), ordered(full.t2i, lists[1]))
