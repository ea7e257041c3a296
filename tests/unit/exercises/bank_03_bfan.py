"""Answers to the exercises of chapter 03."""

from __future__ import annotations

import numpy as np
import torch
from bank import right, wrong

from itm_utils.models.bfan import TIE_TOLERANCE, focal_threshold

REFOCUS, BAR, PADDING = "ex-bfan-refocus", "ex-bfan-bar", "ex-bfan-padding"


@right(REFOCUS)
def divide(weights, keep):
    kept = weights * keep
    return kept / kept.sum(dim=1, keepdim=True).clamp_min(1e-12)


@right(REFOCUS)
def in_place(weights, keep):
    weights[~keep] = 0
    weights /= weights.sum(1, keepdim=True)
    return weights.nan_to_num_()


@right(REFOCUS)
def with_numpy(weights, keep):
    kept = np.where(keep, weights, 0).astype(np.float64)
    total = kept.sum(1, keepdims=True)
    return np.divide(kept, total, out=np.zeros_like(kept), where=total > 0)


wrong(REFOCUS, "sum to one again")(lambda w, k: w * k)
wrong(REFOCUS, "NaN")(lambda w, k: w * k / (w * k).sum(1, keepdim=True))
wrong(REFOCUS, "axis 1")(lambda w, k: w * k / (w * k).sum(2, keepdim=True).clamp_min(1e-12))
wrong(REFOCUS, "dropped keys|nothing changes|you say")(lambda w, k: torch.softmax(w * k, dim=1))
wrong(REFOCUS, "evenly|nothing changes")(lambda w, k: k / k.sum(1, keepdim=True).clamp_min(1))
wrong(REFOCUS, "dropped keys were kept|all of yours are 0|you say")(lambda w, k: divide(w, ~k))
wrong(REFOCUS, "share the whole|you say")(lambda w, k: w)
wrong(REFOCUS, "shape")(lambda w, k: divide(w, k).sum(1))
wrong(REFOCUS, "nothing returned")(lambda w, k: None)
wrong(REFOCUS, "dropped keys|above the mean|you say")(
    lambda w, k: torch.where(k, w, w.mean()) / torch.where(k, w, w.mean()).sum(1, keepdim=True)
)
wrong(REFOCUS, "keeps nothing")(lambda w, k: torch.where(k.any(1, keepdim=True), divide(w, k), w))


@right(BAR)
def squares(weights):
    return weights.square().sum(dim=1, keepdim=True)


@right(BAR)
def general(weights):
    return (weights * weights).sum(1, keepdim=True).double() / weights.sum(1, keepdim=True)


@right(BAR)
def numpy_squares(weights):
    return (weights.numpy() ** 2).sum(axis=1, keepdims=True)


wrong(BAR, "threshold of equal")(lambda w: focal_threshold(w, "equal"))
wrong(BAR, "threshold of prob")(lambda w: focal_threshold(w, "prob"))
wrong(BAR, "mean of squares")(lambda w: w.square().mean(1, keepdim=True))
wrong(BAR, "axis of length 1 is to stay")(lambda w: w.square().sum(1))
wrong(BAR, "shape")(lambda w: w.square().sum(2, keepdim=True))
wrong(BAR, "square root|you say")(lambda w: w.norm(dim=1, keepdim=True))
wrong(BAR, "largest weight|you say")(lambda w: w.amax(1, keepdim=True))
wrong(BAR, "nothing returned")(lambda w: None)
wrong(BAR, "shape")(lambda w: w >= w.mean(1, keepdim=True))
wrong(BAR, "you say")(lambda w: 1 - squares(w))
wrong(BAR, "stops with TypeError")(lambda w, more: w)


@right(PADDING)
def by_counts(weights, mask):
    real = mask[..., None]
    mean = weights.sum(dim=1, keepdim=True) / real.sum(dim=1, keepdim=True)
    return (weights >= (1 - TIE_TOLERANCE) * mean) & real


@right(PADDING)
def by_loop(weights, mask):
    keep = np.zeros(weights.shape, dtype=np.uint8)
    for m in range(len(weights)):
        places = np.flatnonzero(mask[m])
        part = weights[m, places].numpy()
        keep[m, places] = part >= (1 - TIE_TOLERANCE) * part.mean(0)
    return keep


@right(PADDING)
def by_the_book(weights, mask):
    threshold = focal_threshold(weights, "equal", mask[..., None])
    return (weights - threshold >= -TIE_TOLERANCE * threshold).logical_and_(mask[..., None])


wrong(PADDING, "divide by the number of real keys")(
    lambda w, m: (w >= (1 - TIE_TOLERANCE) * w.mean(1, keepdim=True)) & m[..., None]
)
wrong(PADDING, "padded key")(lambda w, m: by_counts(w, m) | ~m[..., None])
wrong(PADDING, "TIE_TOLERANCE|single key|stays")(
    lambda w, m: (w > w.sum(1, keepdim=True) / m[..., None].sum(1, keepdim=True)) & m[..., None]
)
wrong(PADDING, "TIE_TOLERANCE")(
    lambda w, m: (w >= w.sum(1, keepdim=True) / m[..., None].sum(1, keepdim=True)) & m[..., None]
)
wrong(PADDING, "shape")(lambda w, m: by_counts(w, m).any(2))
wrong(PADDING, "True or False")(lambda w, m: w * by_counts(w, m))
wrong(PADDING, "opposite")(lambda w, m: ~by_counts(w, m))
wrong(PADDING, "nothing returned")(lambda w, m: None)
wrong(PADDING, "at least the mean|differ")(lambda w, m: (w >= w.amax(1, keepdim=True)) & m[..., None])
wrong(PADDING, "which keys are real|mask says")(lambda w, m: by_counts(w, torch.arange(m.shape[1]) < m.sum(1)[:, None]))
wrong(PADDING, "at least the mean|differ")(lambda w, m: m[..., None].expand_as(w))
