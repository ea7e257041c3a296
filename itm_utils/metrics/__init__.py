"""Retrieval metrics, metrics with several positives, and attention precision, recall and F1."""

from itm_utils.metrics.retrieval import (
    Direction,
    Ranks,
    Retrieval,
    bootstrap_intervals,
    chance,
    ensemble,
    evaluate,
    evaluate_folds,
    five_captions_each,
    fold_ranks,
    resampled_recalls,
    retrieval_ranks,
    score_matrix,
    summarise,
    summarise_folds,
)

__all__ = [
    "Direction",
    "Ranks",
    "Retrieval",
    "bootstrap_intervals",
    "chance",
    "ensemble",
    "evaluate",
    "evaluate_folds",
    "five_captions_each",
    "fold_ranks",
    "resampled_recalls",
    "retrieval_ranks",
    "score_matrix",
    "summarise",
    "summarise_folds",
]
