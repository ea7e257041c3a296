"""What `itm run --dry-run` counts, against a pencil."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from itm_lab.data.opening import VALIDATION_IMAGES
from itm_lab.data.registry import KNOWN
from itm_lab.experiments import cost
from itm_lab.experiments.cost import (
    BERT_TOKEN,
    CAPTION_WORDS,
    PUBLISHED,
    Costs,
    Shape,
    Sizes,
    StageCost,
    at_batch,
    count_rates,
    count_step,
    counting,
    make_batch,
    make_stages,
    shape_of,
    sizes_of,
    stage_costs,
    written,
)
from itm_lab.experiments.experiment_files import read_experiments
from itm_lab.experiments.plan import plan
from itm_lab.experiments.runner import Facts, Job
from itm_utils.errors import ItmError
from itm_utils.scoring import BATCH as BLOCK
from itm_utils.scoring import BUDGET
from itm_utils.training import Stage

ROOT = Path(__file__).resolve().parents[2]
SIZES = Sizes(10, 50, 4, 20, 3, 15, regions=3, image_dim=6, vocabulary=30)
WIDTH, WORD, BATCH = 16, 8, 4
SMALL = [f"width={WIDTH}", f"word_dim={WORD}", f"batch_size={BATCH}", "epochs=3"]
LISTS = ["captions_mined=10", "captions_kept=5", "first_epochs=2", "first_batch_size=5", "caption_width=8"]


def job_of(name: str, *changes: str) -> Job:
    return plan(ROOT, [name], "", "0", list(changes), [])[0]


def parts_of(job: Job) -> list[StageCost]:
    return stage_costs(job, SIZES)


def bytes_on_disk(job: Job, parts: list[StageCost]) -> float:
    weights = [(part.stage, part.weights) for part in parts]
    return sum(written(job, SIZES, weights, parts[-1].rates.decoupled).values())


def stages_of(job: Job, sizes: Sizes = SIZES) -> tuple[list[Stage], Shape]:
    """The trainings of a run, with numbers in them, and what its batches look like."""
    shape = shape_of(job, sizes)
    return make_stages(job, shape, "cpu"), shape


def test_every_multiplication_of_vsepp() -> None:
    """A linear projection of the image, a GRU over the caption, one product of vectors per pair."""
    job = job_of("vsepp/f30k/vsepp", *SMALL)
    (part,), ((stage,), shape) = parts_of(job), stages_of(job)
    image = 2 * SIZES.image_dim * WIDTH
    caption = 2 * CAPTION_WORDS * 3 * WIDTH * (WORD + WIDTH)
    pair = 2 * WIDTH
    assert count_rates(stage.validated, shape)[:5] == (image, caption, pair, False, 4 * WIDTH)
    operations, held = count_step(stage, make_batch(BATCH, shape))
    # Back: twice the way forth, but no gradient is asked for images, nor for the state before the first word.
    spared = image + 2 * 3 * WIDTH * WIDTH
    assert operations == BATCH * (3 * (image + caption) - spared) + 3 * pair * BATCH**2
    table, gru = SIZES.vocabulary * WORD, 3 * WIDTH * (WORD + WIDTH + 2)
    assert part.step == operations and part.weights == 4 * ((SIZES.image_dim + 1) * WIDTH + table + gru)
    assert held > 0 and part.held > 4 * part.weights


SAMPLES = [
    "vsepp/f30k/vsepp", "scan/f30k/i2t_lse", "bfan/f30k/prob", "pfan/f30k/t2i", "vsrn/f30k/first", "saem/f30k/full",
    "sgraf/f30k/sgr", "mmca/f30k/full", "mmca/f30k/all_negatives", "dcpa/f30k/two_stages", "dcpa/f30k/joint",
    "aoq/f30k/scan_adapoffquin", "aoq/coco/bfan_offtri", "ccr_ccs/f30k/saf_ccr_ccs",
]  # fmt: skip
TINY = {"width": 16, "word_dim": 8, "heads": 2, "feed_forward": 8, "inter_feed_forward": 8, "channels": 4, "sim_dim": 4}
TINY |= {"region_slots": 3, "caption_width": 8, "caption_word_dim": 8, "miner_width": 16, "position_dim": 4}


def tiny(name: str, **more: int) -> Job:
    """An experiment in small widths."""
    known = job_of(name).parameters
    tokens = {"token_dim": 12} if known.get("token_dim", 0) > 0 else {}
    return job_of(name, *(f"{key}={value}" for key, value in (TINY | tokens | more).items() if key in known))


@pytest.mark.parametrize("name", SAMPLES)
def test_a_step_of_few_pairs_tells_what_one_of_many_costs(name: str) -> None:
    """l·b + q·b² through two counts goes through the count of the whole batch; SGR does a little once per step."""
    stages, shape = stages_of(tiny(name))
    for stage in stages:
        counts = {pairs: count_step(stage, make_batch(pairs, shape)).operations for pairs in (7, 8, 13)}
        many = counts.pop(13)
        assert at_batch(counts, 13) == (pytest.approx(many, rel=1e-3) if name == "sgraf/f30k/sgr" else many), stage.name


@pytest.mark.parametrize(
    "name", ["scan/f30k/t2i_avg", "vsrn/f30k/first", "saem/f30k/full", "mmca/f30k/full", "sgraf/f30k/saf"]
)
def test_what_is_counted_is_what_pytorch_counts_when_it_computes(name: str) -> None:
    """Constant products change nothing: the counter of PyTorch, around a step that computes, says the same."""
    (stage,), shape = stages_of(tiny(name))
    batch = make_batch(6, shape)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss, _ = stage.objective(stage.model.train(), batch)
        loss.backward()
    assert count_step(stage, batch).operations == counter.get_total_flops()


def test_all_negatives_of_a_batch_are_counted() -> None:
    """Of 64 pairs: 64 positive ones, and for each of them 63 captions and 63 images; with the hardest alone two."""
    scored: dict[str, list[int]] = {}
    for name, pairs in (("all_negatives", 64 + 2 * 64 * 63), ("full", 64 + 2 * 64)):
        (stage,), shape = stages_of(tiny(f"mmca/f30k/{name}"))
        seen = scored[name] = []
        whole = stage.model.score_pairs
        stage.model.score_pairs = lambda images, texts, whole=whole, seen=seen: (
            seen.append(len(images)) or whole(images, texts)
        )
        with counting():
            stage.objective(stage.model, make_batch(64, shape))
        assert sum(seen) == pairs, seen
    (all_of_them,), (hardest,) = (stage_costs(job_of(f"mmca/f30k/{name}"), PUBLISHED["f30k"]) for name in scored)
    assert all_of_them.step > 4 * hardest.step


def test_a_run_is_its_steps_its_validations_and_its_test() -> None:
    (part,) = parts_of(job_of("vsepp/f30k/vsepp", *SMALL))
    image, caption, pair, *_ = part.rates
    dev, test = (image * n + caption * c + pair * n * c for n, c in ((4, 20), (3, 15)))
    assert part.steps == 3 * (50 // BATCH)
    assert part.total == part.steps * part.step + 3 * dev + test


@pytest.mark.parametrize("every", [0, 1, 5, 12, 30, 36, 99])
@pytest.mark.parametrize("name", ["mmca/f30k/full", "dcpa/f30k/intra"])
def test_validations_come_as_often_as_a_run_asks_for_them(name: str, every: int) -> None:
    small = ["width=16", "heads=2", "token_dim=12", f"batch_size={BATCH}", "epochs=3"]
    (part,) = parts_of(job_of(name, *small, f"validate_every={every}"))
    # As the training loop does: at every so many steps, and at the last.
    validations = sum(step % (every or 12) == 0 or step == 36 for step in range(1, 37))
    dev, test = (part.rates.every_pair(n, c) for n, c in ((4, 20), (3, 15)))
    assert part.total == pytest.approx(36 * part.step + validations * dev + test)


def test_memory_holds_every_encoded_image_of_a_split_that_is_scored() -> None:
    """On small batches that, and not a step, decides: a vector per region, their mask, and a block of pairs."""
    job = job_of("scan/f30k/t2i_avg", *SMALL)
    (stage,), shape = stages_of(job)
    (small,) = stage_costs(job, replace(SIZES, dev_captions=5, test_captions=5))
    assert small.held == 4 * small.weights + count_step(stage, make_batch(BATCH, shape)).held
    many = replace(SIZES, dev_images=100_000, dev_captions=5)
    (part,) = stage_costs(job, many)
    encoded, block = SIZES.regions * (4 * WIDTH + 1), 5 * BLOCK * part.rates.pair_bytes
    assert part.rates.image_bytes == encoded
    assert part.held == 4 * part.weights + 100_000 * encoded + block
    assert part.rates._replace(pair_bytes=BUDGET).held(2, 5) == 2 * encoded + BUDGET
    (scored,) = stage_costs(job, replace(SIZES, test_images=100_000, test_captions=5))
    assert scored.held == part.held  # the scores of the receipt are made the same way


def test_two_stages_are_counted_each_and_the_second_is_validated_with_the_first() -> None:
    small = ["width=16", "heads=2", "feed_forward=8", "inter_feed_forward=8", "channels=4", "token_dim=12"]
    small += ["batch_size=5", "epochs=3", "inter_batch_size=4", "inter_epochs=2"]
    job = job_of("dcpa/f30k/two_stages", *small)
    intra, inter = parts_of(job)
    assert (intra.steps, inter.steps) == (3 * 10, 2 * 12)
    (_, stage), shape = stages_of(job)
    second = count_rates(stage.model, shape)
    assert inter.rates.pair == pytest.approx(intra.rates.pair + second.pair)
    assert inter.rates.decoupled and not intra.rates.decoupled
    (alone,) = parts_of(job_of("dcpa/f30k/intra", *small))
    assert alone.total == intra.total
    states = 2 * 12 * CAPTION_WORDS * (50 + 20 + 15)
    scores = 2 * 4 * 3 * 15  # two directions
    assert bytes_on_disk(job, [intra, inter]) == 9 * (intra.weights + inter.weights) + states + scores


SHORT = ["batch_size=5", "epochs=3", "inter_batch_size=4", "inter_epochs=2"]


@pytest.mark.parametrize(
    ("name", "changes", "steps"),
    [
        ("dcpa/scenes/two_stages", SHORT, 3 * 10 + 2 * 12),
        ("dcpa/scenes/intra", SHORT, 3 * 10),
        ("dcpa/scenes/joint", SHORT, (2 + round(3 * 4 / 5)) * 12),
        ("dcpa/scenes/quarter_data", SHORT, 3 * 2 + 2 * 3),  # of twelve captions
        ("aoq/scenes/vsrn_adapoffquin", [*SMALL, *LISTS], 2 * 10 + 3 * 12),
        *((name, ["batch_size=4", "epochs=3"], 3 * 12) for name in ("scan/scenes/t2i_avg", "mmca/scenes/full")),
    ],
)
def test_the_bar_counts_the_steps_of_every_stage(name: str, changes: list[str], steps: int) -> None:
    """Of 50 captions, as the chapter's own stages have them."""
    job = job_of(name, *changes)
    vars(job)["facts"] = Facts(50, {}, 10)
    assert job.steps == steps


def test_the_bar_adds_up_what_the_stages_have_done(tmp_path: Path) -> None:
    """A line that is being written does not count yet."""
    job = job_of("dcpa/scenes/two_stages")
    job.parameters["run_dir"] = str(tmp_path)
    assert job.steps_done() == 0
    for stage, lines in (("intra", '{"step": 7}\n{"step": 30}\n'), ("inter", '{"step": 4}\n{"st')):
        (tmp_path / stage).mkdir()
        (tmp_path / stage / "log.jsonl").write_text(lines, encoding="utf-8")
    assert job.steps_done() == 34


def test_mining_scores_every_pair_of_the_training_set() -> None:
    job = job_of("aoq/f30k/vsrn_adapoffquin", *SMALL, *LISTS)
    miner, final = parts_of(job)
    assert (miner.stage.mines, final.stage.mines) == (True, False)
    assert (miner.steps, final.steps) == (2 * 10, 3 * 12)
    passes = [miner.rates.every_pair(n, c) for n, c in ((4, 20), (4, 20), (3, 15), (10, 50))]  # dev twice, test, train
    assert miner.total == pytest.approx(miner.steps * miner.step + sum(passes))
    assert miner.rates.pair == 2 * WIDTH  # one vector each
    lists = 10 * 10 + 2 * 50
    assert bytes_on_disk(job, [miner, final]) == 9 * (miner.weights + final.weights) + 4 * 3 * 15 + 12 * lists
    # A step with offline negatives encodes three times as many; the caption decoder sees the batch alone.
    (online,) = parts_of(job_of("aoq/f30k/vsrn_online_short", *SMALL, *LISTS, "round_one="))
    assert 2 * online.step < final.step < 3.5 * online.step


def test_constraints_cost_something() -> None:
    base, both = (parts_of(job_of(f"ccr_ccs/f30k/scan_{variant}", *SMALL))[0] for variant in ("baseline", "ccr_ccs"))
    assert base.step < both.step < 2 * base.step


def test_a_quarter_of_the_data_is_a_quarter() -> None:
    whole, quarter = (sizes_of(job_of(f"dcpa/f30k/{name}")) for name in ("two_stages", "quarter_data"))
    assert (whole.images, whole.captions) == (29_000, 145_000)
    assert (quarter.images, quarter.captions) == (7_250, 36_250)
    assert quarter.dev_captions == whole.dev_captions


@pytest.mark.parametrize("name", ["f30k", "coco"])
def test_published_sizes_are_those_of_the_package(name: str) -> None:
    """With fewer images, where a split has several sizes: what is said is a lower bound."""
    known, sizes = KNOWN[name].images, PUBLISHED[name]
    test = "testall" if "testall" in known else "test"
    found = {"train": sizes.images, "dev": sizes.dev_images, test: sizes.test_images}
    expected = {split: min(known[split]) for split in found}
    assert found == expected | {"dev": min(VALIDATION_IMAGES, expected["dev"])}
    counted = (sizes.captions, sizes.dev_captions, sizes.test_captions)
    assert counted == tuple(5 * images for images in found.values())


def test_a_layer_that_cannot_be_counted_is_named() -> None:
    lstm = torch.nn.LSTM(3, 4)
    with pytest.raises(ItmError, match="the model: found an LSTM"), torch.no_grad(), counting():
        lstm(torch.zeros(2, 1, 3))


def test_the_text_encoder_reads_every_caption_once() -> None:
    """Of BERT base 85 million weights take part in every token: twelve layers without the embedding layer."""
    assert abs(BERT_TOKEN / (2 * 85e6) - 1) < 0.01


def test_a_plan_says_memory_disk_and_hours_and_can_measure_them() -> None:
    changes = ["width=8", "word_dim=4", "batch_size=4", "epochs=1"]
    job = job_of("scan/f30k/t2i_avg", *changes)
    guessed, timed = (Costs("V100", measure).of(job).on("V100") for measure in (False, True))
    assert re.search(
        r"GiB, at most \d+\.\d GB on disk, at least \d+ min on one V100 if they reach 25% of its peak", guessed
    )
    assert "a guess" in guessed and "guess" not in timed
    assert re.search(r"about [\d.]+ (h|min) on .+: timed steps reach [\d.e-]+ · 10\^12 operations a second", timed)


def test_every_experiment_validates_after_every_epoch() -> None:
    """A number of steps is an epoch for one training set and batch size only: MMCA's lab runs validated once in all."""
    every = {name: found.values().get("validate_every", 0) for name, found in read_experiments(ROOT).items()}
    assert len(every) > 100
    assert {name: steps for name, steps in every.items() if steps} == {}


def test_what_runs_share_is_added_up_once() -> None:
    """Two seeds of one run have nothing in common but the token states; two rows of AOQ have the miner and its lists."""
    costs = Costs("V100")
    one, two = plan(ROOT, ["dcpa/f30k/intra"], "", "0-1", [], [])
    seconds, size = costs.together([one, two])
    states = max(costs.of(one).written, key=lambda path: "bert-base" in path)
    assert seconds == pytest.approx(2 * sum(costs.of(one).seconds.values()) - costs.of(one).seconds[states])
    assert size == pytest.approx(2 * sum(costs.of(one).written.values()) - costs.of(one).written[states])
    scan, i2t = plan(ROOT, ["aoq/f30k/scan_adapoffquin", "aoq/f30k/scan_i2t_adapoffquin"], "", "0", [], [])
    shared = costs.of(scan).written.keys() & costs.of(i2t).written.keys()
    assert {Path(path).relative_to(ROOT).as_posix() for path in shared} == {"runs/aoq/f30k/round_one/s0"}
    assert costs.together([scan, i2t])[0] < sum(sum(costs.of(job).seconds.values()) for job in (scan, i2t))


def test_a_count_is_kept_and_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ITM_CACHE", str(tmp_path))
    monkeypatch.setattr(cost, "COUNTS", {})
    job = job_of("scan/f30k/t2i_avg", *SMALL)
    before = parts_of(job)
    (kept,) = tmp_path.rglob("*.json")
    monkeypatch.setattr(cost, "COUNTS", {})
    monkeypatch.setattr(cost, "count_stage", lambda *given: pytest.fail("counted again"))
    assert [part[1:] for part in parts_of(job)] == [part[1:] for part in before]
    kept.write_text(kept.read_text(encoding="utf-8").replace("1", "2", 1), encoding="utf-8")  # damaged
    monkeypatch.setattr(cost, "COUNTS", {})
    monkeypatch.undo()
    assert [part[1:] for part in parts_of(job)] == [part[1:] for part in before]
