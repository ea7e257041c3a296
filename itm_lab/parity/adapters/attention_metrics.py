"""Reference cases of attention precision, recall and F1: phrases, weights and boxes are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from itm_lab.parity.comparison import Arrays, Table
from itm_utils.metrics.attention import attention_quality, relevant_regions


def compare_case(table: Table, about: Mapping[str, Any], arrays: Arrays) -> bool:
    """Compare the metrics at every overlap, with the maximum and with the mean over the words of a phrase."""
    words = arrays["in.phrase_words"]  # (p, w), padded with -1
    captions = arrays["in.phrase_caption"]
    phrase, column = np.nonzero(words >= 0)
    weights = arrays["in.attention"][captions[phrase], words[phrase, column]]
    regions = arrays["in.boxes"][arrays["in.caption_image"][captions]]
    boxes = [own[:count] for own, count in zip(arrays["in.phrase_boxes"], arrays["in.phrase_n_boxes"], strict=True)]
    for iou in about["options"]["T_IoU"]:
        relevant = np.stack([relevant_regions(*both, iou) for both in zip(regions, boxes, strict=True)])
        for name, within in (("max", "max"), ("meanword", "mean")):
            ours = attention_quality(weights, None, phrase, relevant, arrays["in.thresholds"], within)
            found = {f"{name}.AP": ours.precision, f"{name}.AR": ours.recall, f"{name}.AF": ours.f1}
            found |= {f"{name}.best": ours.best[1:], f"{name}.best_index": int(ours.f1.argmax())}
            found |= {f"{name}.per_phrase": ours.values, "kept": ours.phrases, "dropped": ours.dropped}
            for key, value in found.items():
                if f"out.iou{iou}.{key}" in arrays:
                    theirs = arrays[f"out.iou{iou}.{key}"]
                    table.add("metrics", f"out.iou{iou}.{key}", np.asarray(value, dtype=theirs.dtype), theirs)
    return True
