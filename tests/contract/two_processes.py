"""Work that test_several_processes.py has several processes do together.

usage: python two_processes.py WORK OUT [ARGUMENT …]      (with the environment that a launcher gives, see ``together``)
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from contract_cases import DEFAULTS, Case, encode, image_batch, text_batch
from safetensors.torch import save_file
from torch import Tensor, nn

from itm_utils import distributed
from itm_utils.matcher import Encoded, Matcher, OfflineNegatives, PairBatch
from itm_utils.models.aoq import LossConfig, OfflineLoss
from itm_utils.models.ccr_ccs import AttentionConstraintLoss
from itm_utils.models.keeping_score import InBatchSoftmax
from itm_utils.models.mmca import HardNegativeTripletLoss
from itm_utils.models.vsepp import HingeTriplet

HERE = Path(__file__).resolve()
SMALL_BUDGET = 2**18  # bytes: pairs are scored in several chunks
Objectives = dict[str, Callable[[], Any]]
# The objectives that draw no random numbers, whose reference is the plain call; and those that do.
PLAIN: Objectives = {
    "all negatives": lambda: HingeTriplet(hardest=False),
    "hardest negatives": HingeTriplet,
    "captions of one image": lambda: HingeTriplet(by_image=True),
    "softmax": InBatchSoftmax,
    "selected": HardNegativeTripletLoss,
    "selected in chunks": lambda: HardNegativeTripletLoss(budget=SMALL_BUDGET),
    "constraints on all queries": lambda: AttentionConstraintLoss(HingeTriplet(), queries=0),
    **{f"AOQ {kind}": lambda kind=kind: OfflineLoss(LossConfig(kind)) for kind in ("AdapOffQuin", "OnlineQuin")},
    "AOQ in chunks": lambda: OfflineLoss(budget=SMALL_BUDGET),
}
DRAWING: Objectives = {
    "random negatives": lambda: HardNegativeTripletLoss(hardest=False, negatives=2),
    "AOQ in warm-up": lambda: OfflineLoss(warmup_epochs=1, budget=SMALL_BUDGET),
    "constraints": lambda: AttentionConstraintLoss(HingeTriplet(), ccr_margin=0.5, ccs_margin=0.5),
    "constraints, selected": lambda: AttentionConstraintLoss(HardNegativeTripletLoss(), queries=2),
}
OBJECTIVES = PLAIN | DRAWING
# What behaves in another way when rows are apart: batch norms that mask and that do not, two directions.
MORE = [
    Case(type(case.build()), options)
    for case in DEFAULTS
    for options in {
        "SGRAF": [{"head": "SGR"}, {"region_slots": 6}],
        "VSRN": [{"architecture": "f30k"}],
        "SCAN": [{"direction": "i2t"}],
        "DCPA": [{"inter": {"decoupled": False}}],
    }.get(str(case), [])
]
CASES = [*DEFAULTS, *MORE]


def fits(case: Case, objective: str) -> bool:
    """Whether an objective accepts a matcher: constraints want attention."""
    model, batch = case.build(), whole_batch(case)
    return not objective.startswith("constraints") or bool(model.attention(*encode(model, batch.images, batch.texts)))


def built(case: Case) -> Matcher:
    """In training, without dropout, whose numbers differ between processes on purpose."""
    model = case.build().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def whole_batch(case: Case) -> PairBatch:
    """Seven ragged pairs, two of them of one image; public batch norms want as many regions everywhere."""
    regions = (6,) * 7 if "region_slots" in case.options else (4, 2, 6, 1, 5, 3, 6)

    def pairs(seed: int) -> PairBatch:
        images, texts = image_batch(regions, seed=seed), text_batch((3, 7, 1, 5, 4, 2, 6), seed=seed + 1)
        ids = torch.tensor([0, 1, 2, 3, 4, 5, 1]) + 10 * seed
        return PairBatch(replace(images, ids=ids), replace(texts, ids=torch.arange(7) + 10 * seed))

    return replace(pairs(1), offline=OfflineNegatives(pairs(3), pairs(5)))


def own_part(batch: PairBatch) -> PairBatch:
    """What a loader of this process would give: its rows, padded to the longest of these."""

    def cut(pairs: PairBatch) -> PairBatch:
        rows = pairs[distributed.own_share(len(pairs))]
        r, w = int(rows.images.lengths.max()), int(rows.texts.lengths.max())
        images = replace(rows.images, **{n: getattr(rows.images, n)[:, :r] for n in ("regions", "mask", "boxes")})
        texts = replace(rows.texts, **{n: getattr(rows.texts, n)[:, :w] for n in ("words", "features", "special")})
        return replace(rows, images=images, texts=texts)

    offline = OfflineNegatives(cut(batch.offline.first), cut(batch.offline.second))
    return replace(cut(replace(batch, offline=None)), offline=offline)


def results(model: Matcher, loss: Tensor) -> dict[str, Tensor]:
    """Loss, gradients, and what batch norms remember, by name."""
    loss.backward()
    found = {f"grad {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found} | {f"buffer {n}": b.double() for n, b in model.named_buffers()}


def losses(out: Path, *wanted: str) -> None:
    """Loss and gradients of every matcher with every objective, as one training step has them."""
    from torch.nn.parallel import DistributedDataParallel

    from itm_utils.training.loop import _Step

    for number, case in enumerate(CASES):
        for name, objective in OBJECTIVES.items():
            if not fits(case, name) or (wanted and name not in wanted):
                continue
            torch.manual_seed(3)
            model = built(case)
            step = DistributedDataParallel(_Step(model, objective()), find_unused_parameters=True)
            torch.manual_seed(7)
            found = results(model, step(own_part(whole_batch(case)))[0])
            torch.manual_seed(3)
            if distributed.is_main():
                save_file({k: v.contiguous() for k, v in found.items()}, out / f"{number} {name}.safetensors")


def gathering(out: Path) -> None:
    """What a gather gives every process, of encodings of ragged items."""
    batch = own_part(whole_batch(DEFAULTS[0]))
    whole = distributed.gather(batch, keep_features=True)
    own = distributed.own_share(len(whole))
    others = torch.ones(len(whole), dtype=torch.bool)
    others[own] = False
    encoded = Encoded(local=batch.images.regions, mask=batch.images.mask, lengths=batch.images.lengths)
    found = {
        "ids": whole.images.ids, "words": whole.texts.words, "lengths": whole.texts.lengths, "mask": whole.images.mask,
        "first": whole.offline.first.texts.words, "local": distributed.gather(encoded).local,
        "own": whole.images.regions[own].nan_to_num(0), "others": whole.images.regions[others].isnan().all()[None],
    }  # fmt: skip
    save_file({k: v.contiguous() for k, v in found.items()}, out / f"gathered {distributed.rank()}.safetensors")


def scoring(out: Path, data: str) -> None:
    """All scores, lists and token states of a small dataset."""
    import numpy as np

    from itm_utils import mining, scoring
    from itm_utils.data.batches import WordCaptions
    from itm_utils.data.precomp import open_split
    from itm_utils.data.text_encoder import bert_captions
    from itm_utils.data.vocabulary import Vocabulary

    scoring.BATCH = 16  # several blocks for each process, and an uneven last turn
    split = open_split(Path(data), "train")
    texts = WordCaptions(split, Vocabulary.load(Path(data) / "toy_vocab.json"))
    model = scorer(len(Vocabulary.load(Path(data) / "toy_vocab.json")), split.feature_dim)
    scores = scoring.score_split(model, split, texts)
    mining.BLOCK, mining.SAVE_EVERY = 16, 0  # checkpoints after every turn
    lists = mining.mine(model, split, texts, out / "lists", 5, 3, budget=2**17)
    states = bert_captions(split, batch_size=32)
    name = f"scores {distributed.rank()}.safetensors"
    found = {"texts": lists.texts, "images": lists.images, "states": states.states, "starts": states.starts}
    save_file({"i2t": scores.i2t, **{k: torch.from_numpy(np.array(v)) for k, v in found.items()}}, out / name)


def scorer(words: int, image_dim: int) -> Matcher:
    """A model with attention, the same in every process."""
    from itm_utils.models.scan import SCAN

    torch.manual_seed(2)
    return SCAN(words, image_dim, width=8, word_dim=4).eval()


def run(_: Path, data: str, folder: str, noise: str, calls: str = "", dies: str = "") -> None:
    """The training of killed_run.py; the process ``dies`` ends without warning after so many steps."""
    import killed_run

    mortal = calls and int(dies) == distributed.rank()
    if noise == "quiet":
        killed_run.NoisyMeanPool = killed_run.MeanPool
    killed_run.main(data, folder, int(calls) if mortal else None)


def few(out: Path, data: str) -> None:
    """A training with fewer rows than the processes can share."""
    from itm_utils.data.batches import PairDataset, WordCaptions
    from itm_utils.data.precomp import open_split
    from itm_utils.data.vocabulary import Vocabulary
    from itm_utils.training import TrainConfig, train

    split = open_split(Path(data), "train")
    vocabulary = Vocabulary.load(Path(data) / "toy_vocab.json")
    pairs = PairDataset(split, WordCaptions(split, vocabulary))
    config = TrainConfig(epochs=1, batch_size=3, device="cpu")
    train(scorer(len(vocabulary), split.feature_dim), HingeTriplet(), pairs, config, out)


def together(work: str, out: Path, *arguments: object, count: int = 2, **environment: str) -> list[subprocess.Popen]:
    """Start so many processes that know of each other."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    paths = os.pathsep.join(map(str, [HERE.parent, HERE.parents[1]]))
    given = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **environment}
    launched = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(HERE), work, str(out), *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = []
    for number in range(count):
        own = launched | {"RANK": str(number), "LOCAL_RANK": str(number)} if count > 1 else {}
        running.append(subprocess.Popen(command, env=os.environ | given | own, **pipes))
    return running


def finished(running: Sequence[subprocess.Popen], timeout: float = 3600) -> list[str]:
    """Wait for processes that must end well; returns what each said."""
    said = [process.communicate(timeout=timeout)[0] for process in running]
    assert all(process.returncode == 0 for process in running), "\n".join(said)[-6000:]
    return said


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.connect(cpu=True)
    WORK = {"losses": losses, "gathering": gathering, "scoring": scoring, "run": run, "few": few}
    WORK[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
    distributed.wait_for_all()
