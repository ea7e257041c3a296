"""The ``itm`` command. Heavy modules are imported inside the commands, so that ``itm --help`` is quick."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperGroup

from itm_lab.classroom.cli import app as classroom
from itm_lab.data.cli import app as data
from itm_lab.paths import Paths
from itm_lab.photos.cli import app as photos
from itm_lab.photos.cli import convert
from itm_lab.scenes.cli import app as scenes
from itm_utils.errors import ItmError

if TYPE_CHECKING:
    from itm_lab.experiments.cluster import Request
    from itm_lab.experiments.runner import Job


class Group(TyperGroup):
    """Shows what a reader can put right as one line instead of a traceback."""

    def invoke(self, ctx: typer.Context) -> object:
        try:
            return super().invoke(ctx)
        except (ItmError, OSError) as error:
            typer.echo(f"itm: {error}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(cls=Group, no_args_is_help=True, add_completion=False, help="Tools of the book.")
app.add_typer(scenes, name="scenes", help="Build and show Scenes, the synthetic dataset.")
notebooks = typer.Typer(no_args_is_help=True, help="Check, run and copy the chapters.")
book = typer.Typer(no_args_is_help=True, help="Build the HTML book.")
app.add_typer(notebooks, name="notebooks")
app.add_typer(book, name="book")
app.add_typer(data, name="data")
data.command()(convert)  # of photographs, a room above that of the data
app.add_typer(classroom, name="classroom", help="A course folder, and grading.")
app.add_typer(photos)


@app.command()
def parity(
    folder: Annotated[Path, typer.Argument(help="Reference cases, e.g. tests/golden.")],
    device: Annotated[str, typer.Option(help="Where our models compute.")] = "cpu",
    record: Annotated[bool, typer.Option("--record", help="Write the record that the book's pages show.")] = False,
) -> None:
    """Compare our models with what the public implementations computed; fail beyond the tolerances."""
    from itm_lab.parity.comparison import comparing_on
    from itm_lab.parity.reference_cases import run_folder

    rows = []
    with comparing_on(device):
        for row in run_folder(folder):
            typer.echo(str(row))
            rows.append(row)
    beyond = sum(not row.ok for row in rows)
    typer.echo(f"parity: {len(rows) - beyond} of {len(rows)} within the tolerances")
    if record:
        from itm_lab.publish.parity_record import write_record

        root = Paths.find().root
        typer.echo(write_record(root, folder, rows).relative_to(root))
    raise typer.Exit(bool(beyond))


@app.command()
def ledger(
    as_json: Annotated[bool, typer.Option("--json", help="Everything behind each verdict, as JSON.")] = False,
    foundations: Annotated[bool, typer.Option("--foundations", help="The claims of part I instead.")] = False,
    check: Annotated[list[Path] | None, typer.Option("--check", help="Receipts to check; may be repeated.")] = None,
    check_all: Annotated[bool, typer.Option("--check-all", help="Check every receipt below receipts/.")] = False,
    files: Annotated[list[Path] | None, typer.Argument(help="More receipts for --check.")] = None,
) -> None:
    """Print every claim with its verdict, or check receipts before they join the others."""
    import json
    from collections import Counter

    from itm_lab.evidence.ledger import Ledger

    if check_all:
        from itm_lab.evidence.receipt_check import check_folder

        typer.echo(check_folder(Paths.find().root))
    if check or files:
        from itm_lab.evidence.receipt_check import check_receipts

        for line in check_receipts(Paths.find().root, [*(check or []), *(files or [])]):
            typer.echo(line)
    if check_all or check or files:
        return
    book = Ledger(Paths.find().root)
    claims = book.foundations if foundations else book.claims
    if as_json:
        typer.echo(json.dumps([book.entry(claim) for claim in claims], indent=1, ensure_ascii=False))
        return
    for line in book.lines(claims):
        typer.echo(line)
    count = Counter(book.verdict(claim).verdict for claim in claims)
    typer.echo(f"{len(claims)} claims: " + ", ".join(f"{number} {word}" for word, number in count.most_common()))


@app.command()
def doctor(
    data_root: Annotated[Path | None, typer.Option("--data", help="A folder of datasets to look at, too.")] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Accept this machine's GPU: about ten minutes.")] = False,
    device: Annotated[str, typer.Option(help="With --gpu: cuda, mps or cpu.")] = "cuda",
    out: Annotated[Path, typer.Option(help="With --gpu: the report to send back.")] = Path("doctor.json"),
    experiment: Annotated[
        list[str] | None, typer.Option(help="With --gpu: time these, e.g. scan/f30k/t2i_avg; else one of every model.")
    ] = None,
    parameter: Annotated[
        list[str] | None, typer.Option("-p", help="With --gpu: name=value, over the settings of every experiment.")
    ] = None,
) -> None:
    """Check this machine and its data in a minute; with --gpu, whether its GPU computes what the book computes."""
    from itm_lab.data.report import MISSING, table
    from itm_lab.doctor.acceptance import EXPERIMENTS, accept, write_report
    from itm_lab.doctor.machine import check_data, check_machine

    root = Paths.find().root
    if not gpu:
        found = [*check_machine(root), *(check_data(data_root) if data_root else ())]
        for line in table(found):
            typer.echo(line)
        raise typer.Exit(any(result.state == MISSING for result in found))
    findings, start, overrides = [], time.perf_counter(), tuple(parameter or ())
    for finding in accept(root, device, root / "tests/golden", experiment or EXPERIMENTS, overrides):
        typer.echo(f"{'ok  ' if finding.ok else 'FAIL'} {finding.name}: {finding.found}")
        findings.append(finding)  # written at once: whoever stops here has a report of what there is
        write_report(out, device, findings, time.perf_counter() - start, overrides, complete=False)
    write_report(out, device, findings, time.perf_counter() - start, overrides)
    typer.echo(f"{out}: {sum(finding.ok for finding in findings)} of {len(findings)} ok")
    raise typer.Exit(not all(finding.ok for finding in findings))


@app.command(name="eval")
def evaluate(
    public: Annotated[Path, typer.Option(help="A published checkpoint (*.pth.tar).")],
    model: Annotated[str, typer.Option(help="Which model it is, e.g. scan.")],
    data: Annotated[Path, typer.Option(help="A dataset folder in the precomputed format.")],
    vocabulary: Annotated[Path, typer.Option(help="The vocabulary JSON that came with the checkpoint.")],
    split: Annotated[str, typer.Option(help="dev, test or testall.")] = "test",
    folds: Annotated[int, typer.Option(min=1, help="5 for COCO's 1K protocol on testall.")] = 1,
) -> None:
    """Evaluate published weights with our model of the same name."""
    from itm_lab.parity.published import evaluate_published

    typer.echo(str(evaluate_published(public, model, data, vocabulary, split, folds)))


@app.command()
def mine(
    checkpoint: Annotated[Path, typer.Argument(help="The folder of a run, or one of its checkpoints.")],
    data: Annotated[str, typer.Option(help="The dataset folder it was trained on, or scenes.")],
    out: Annotated[Path, typer.Option(help="Where the lists go.")],
    texts: Annotated[int, typer.Option(help="Negative captions for each image.")] = 300,
    images: Annotated[int, typer.Option(help="Negative images for each caption.")] = 60,
    part: Annotated[float, typer.Option(help="The run's train_fraction: the first images only.")] = 1.0,
    megabytes: Annotated[int, typer.Option(min=1, help="Memory for encodings and scores.")] = 1024,
) -> None:
    """Mine offline hard negatives: candidate lists of a training set. Called again, it goes on."""
    from itm_lab.experiments.mine import mine_checkpoint

    lists = mine_checkpoint(checkpoint, data, out, texts, images, part, megabytes)
    (i, h_t), (c, h_i) = lists.texts.shape, lists.images.shape
    typer.echo(f"{out}: {h_t} captions for each of {i} images, {h_i} images for each of {c} captions")


@app.command()
def export(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a module is stale.")] = False,
) -> None:
    """Copy the chapters' `#| export` cells to itm_utils/models/."""
    from itm_lab.publish import export as exporter

    root = Paths.find().root
    if not check:
        for path in exporter.export(root):
            typer.echo(f"{path.relative_to(root)}: {'written' if path.exists() else 'removed'}")
        return
    stale = exporter.stale_modules(root, exporter.render_all(root))
    for path, difference in sorted(stale.items()):
        typer.echo(f"{path.relative_to(root)}: stale, {difference}: run `itm export`", err=True)
    raise typer.Exit(bool(stale))


@app.command(name="run")
def run_experiments(
    experiments: Annotated[list[str] | None, typer.Argument(help="Names, e.g. dcpa/f30k/intra.")] = None,
    parameter: Annotated[list[str] | None, typer.Option("-p", help="name=value, over the experiment's.")] = None,
    table: Annotated[str, typer.Option(help="All rows of a table and their ensembles, e.g. scan/table_1.")] = "",
    seeds: Annotated[str, typer.Option(help="e.g. 0-4; otherwise the experiment's.")] = "",
    search: Annotated[list[str] | None, typer.Option(help="name=a,b,c: each value alone, judged on dev.")] = None,
    grid: Annotated[
        list[str] | None, typer.Option(help="name=a,b: every combination, on dev; seeds 100, 101, …")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only the plan: what it needs, arithmetic, memory, disk, hours; 1 if something is missing.",
        ),
    ] = False,
    gpu: Annotated[str, typer.Option(help="The GPU that a plan is for.")] = "RTX 3090",
    measure: Annotated[
        bool, typer.Option("--measure", help="With --dry-run: hours on this machine, from a few timed steps.")
    ] = False,
    show: Annotated[bool, typer.Option("--print", help="Only the papermill command of each run.")] = False,
    jobs: Annotated[
        int, typer.Option(min=0, help="Runs side by side; 0: two on a CPU, one on a GPU, all in the queue of SLURM.")
    ] = 0,
    processes: Annotated[
        int, typer.Option(min=0, help="Train each run on so many GPUs, or processes of a CPU; 0: one, or --gpus.")
    ] = 0,
    cluster: Annotated[str, typer.Option(help="slurm: send each run to the queue; local: try such jobs here.")] = "",
    gpus: Annotated[int | None, typer.Option(help="With --cluster: GPUs of a job; otherwise 1.")] = None,
    hours: Annotated[
        float | None, typer.Option(help="With --cluster: a job saves and is queued again after this; otherwise 24.")
    ] = None,
    slurm: Annotated[
        list[str] | None, typer.Option(help="With --cluster slurm: an option of sbatch, e.g. partition=gpu.")
    ] = None,
    status: Annotated[bool, typer.Option("--status", help="Only the jobs that were sent to a cluster.")] = False,
    receipts: Annotated[Path, typer.Option(help="Where receipts go.")] = Path("receipts"),
    dirty: Annotated[
        bool, typer.Option("--dirty", help="Start from uncommitted changes, too; no verdict counts such runs.")
    ] = False,
    queue: Annotated[
        bool, typer.Option("--queue", help="Work off experiments/queue.yaml; with --dry-run, what it has and lacks.")
    ] = False,
) -> None:
    """Run experiments with papermill to a receipt each. Called again after an interruption, it goes on."""
    if queue:
        if experiments or table or parameter or seeds or search or grid or processes or cluster:
            raise ItmError(
                "itm run --queue: its file says what is run; only --jobs, --receipts, --dirty and --dry-run go with it"
            )
        raise typer.Exit(work_off_queue(Paths.find().root, receipts, jobs or 2, dry_run, dirty))
    if status:
        from itm_lab.experiments.cluster import status as lines_of_status

        for line in lines_of_status(Paths.find().root):
            typer.echo(line)
        return
    request = cluster_request(cluster, gpus, hours, slurm)
    from itm_lab.experiments import runner
    from itm_lab.experiments.choice import search_runs
    from itm_lab.experiments.plan import plan, plan_searches

    root = Paths.find().root
    results, asked = root / receipts, (root, experiments or [], table)
    planned = plan(*asked, seeds, parameter or [], search or [], grid or [], results)
    selections = [] if search or grid else plan_searches(*asked, parameter or [], results)
    searches = search_runs(selections, results)
    if show:
        for job in (*searches, *planned):
            typer.echo(runner.shown(job))
        for selection in selections:
            typer.echo(
                f"# {selection.experiment.name}: its settings are known when the search has ended; see `itm run`"
            )
        return
    from itm_lab.experiments.needs import needs_of, needs_table, require

    if dry_run:
        from itm_lab.experiments.cost import Costs, described

        costs, runs = Costs(gpu, measure), [*searches, *planned]
        needs = needs_of(runs, results, costs)
        for line in (*map(str, selections), *needs_table(needs)):
            typer.echo(line)
        for line in described(runs, costs, results):
            typer.echo(line)
        raise typer.Exit(any(need.unmet for need in needs))
    require([*searches, *planned], results)
    from itm_lab.evidence.run_tables import compared, table_of  # here: a plan does without scipy's statistics
    from itm_lab.experiments.clean_start import check_clean
    from itm_lab.experiments.ensembles import run_ensembles

    if not dirty:
        check_clean(root, planned, results)
    run = running_on(request, processes, jobs)
    while selections:
        while searches:  # a search may go on beyond the ends of its grid
            if run(searches, results):
                raise typer.Exit(1)
            searches = search_runs(selections, results)
        for selection in selections:
            typer.echo(selection.record(results))
        selections = plan_searches(*asked, parameter or [], results)
        searches = search_runs(selections, results)
        planned = plan(*asked, seeds, parameter or [], [], [], results)
    failed = run(planned, results)
    if not failed and not search and not grid:
        for line in table_of(results, run_ensembles(planned, results)):
            typer.echo(line)
    if receipts != Path("receipts"):
        for line in compared(results, root / "receipts"):
            typer.echo(line)
    raise typer.Exit(bool(failed))


def cluster_request(cluster: str, gpus: int | None, hours: float | None, options: list[str] | None) -> Request | None:
    """What the jobs of a cluster are given; None without a cluster."""
    if cluster:
        from itm_lab.experiments.cluster import Request, read_options

        gpus, hours = 1 if gpus is None else gpus, 24.0 if hours is None else hours
        return Request(cluster, gpus, hours, read_options(options or []))
    if gpus is not None or hours is not None or options:
        raise ItmError("itm run: --gpus, --hours and --slurm are of the jobs of a cluster: give --cluster slurm")
    return None


def running_on(request: Request | None, processes: int, at_a_time: int) -> Callable[[list[Job], Path], list[Job]]:
    """What runs jobs and returns those that failed: on this machine, or on a cluster."""
    from itm_lab.experiments import runner

    def run(jobs: list[Job], results: Path) -> list[Job]:
        on_cpu = all(job.parameters["device"] == "cpu" for job in jobs)
        side_by_side = at_a_time or (2 if on_cpu and processes <= 1 else 1)
        if request is not None:
            from itm_lab.experiments.cluster import run_on_cluster

            some = at_a_time if request.cluster == "slurm" else side_by_side
            return run_on_cluster(request.prepared(jobs, processes), results, request, some)
        import torch

        prepared = runner.with_processes(jobs, processes or 1, torch.cuda.device_count())
        return runner.run_jobs(prepared, results, side_by_side)

    return run


def work_off_queue(root: Path, receipts: Path, at_a_time: int, dry_run: bool, dirty: bool) -> int:
    """Run the queue, or say what it has and lacks; returns the exit code."""
    from itm_lab.experiments.clean_start import check_clean
    from itm_lab.experiments.trial_queue import TrialQueue, read_queue, run_queue

    entries = read_queue(root, root / "experiments" / "queue.yaml")
    queue = TrialQueue(root, entries, root / receipts)
    if dry_run:
        for line in queue.counts():
            typer.echo(line)
        return 0
    if not dirty:
        check_clean(root, queue.evidence(), root / receipts)
    return int(not run_queue(queue, at_a_time))


@app.command()
def recipe(
    experiments: Annotated[list[str] | None, typer.Argument(help="Names, e.g. dcpa/f30k/intra.")] = None,
    parameter: Annotated[list[str] | None, typer.Option("-p", help="name=value, over the experiment's.")] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write files below this folder; all experiments if none is named.")
    ] = None,
    names: Annotated[bool, typer.Option("--list", help="Every experiment, and what it is.")] = False,
    requirements: Annotated[
        bool, typer.Option("--requirements", help="Count what every table needs and takes, for the page of the book.")
    ] = False,
) -> None:
    """Print all parameters of an experiment's run as YAML, for papermill's -y; or write files for its -f."""
    if requirements:
        from itm_lab.publish.requirements_page import write_requirements

        typer.echo(write_requirements(Paths.find().root))
        return
    from itm_lab.experiments.experiment_files import read_experiments
    from itm_lab.experiments.plan import plan_one, unsearched

    root = Paths.find().root

    def text_of(name: str) -> str:
        """The parameters; where a search has yet to choose some, a comment says so, and so does the terminal."""
        text = plan_one(root, name, parameter or []).recipe
        if not (missing := unsearched(root, name, parameter or [], root / "receipts")):
            return text
        typer.echo(missing, err=True)
        return f"# {missing}\n{text}"

    if names:
        for name, experiment in read_experiments(root).items():
            typer.echo(f"{name}: {experiment.about}")
        return
    if write is None:
        if not experiments or len(experiments) != 1:
            raise ItmError("itm recipe: give one experiment, or --write, or --list")
        typer.echo(text_of(experiments[0]), nl=False)
        return
    for name in experiments or read_experiments(root):
        path = write / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(name), encoding="utf-8")
        typer.echo(path)


@app.command()
def ensemble(
    variant: Annotated[str, typer.Argument(help="Name of the ensemble.")],
    folders: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")],
    receipts: Annotated[Path, typer.Option(help="Where the receipt goes.")] = Path("receipts"),
) -> None:
    """Average the scores of finished runs and write the receipt of the mean."""
    from itm_lab.experiments.ensembles import ensemble_of

    ensemble_of(folders, variant, Paths.find().root / receipts)


@app.command()
def keep(
    names: Annotated[
        list[str] | None, typer.Argument(help="Experiments, or folders of runs; else those of experiments/kept.yaml.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Where the runs lie.")] = Path("runs"),
    receipts: Annotated[Path, typer.Option(help="Where their receipts lie.")] = Path("receipts"),
    out: Annotated[Path, typer.Option(help="Where kept models go.")] = Path("weights"),
    provisional: Annotated[bool, typer.Option("--provisional", help="Before every planned seed has run, too.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Put another kept model's files in the old ones' place.")
    ] = False,
) -> None:
    """Keep the weights of the median seed in half precision, with a receipt that is scored from them."""
    from itm_lab.experiments.keep import Places, keep_all

    root, failed = Paths.find().root, False
    places = Places(root, root / runs, root / receipts, root / out)
    for kept, line in keep_all(places, names or [], provisional, replace):
        typer.echo(line if kept else f"not kept: {line}", err=not kept)
        failed |= not kept
    raise typer.Exit(failed)


@app.command()
def figures(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run, e.g. runs/dcpa/f30k/two_stages/s0.")],
    out: Annotated[Path | None, typer.Option(help="Where the figures go; otherwise figures/ in that folder.")] = None,
) -> None:
    """Draw the figures of a chapter from a finished run: its model, its data."""
    from itm_lab.experiments.run_figures import draw_figures

    for path in draw_figures(Paths.find().root, run, out):
        typer.echo(path)


@app.command()
def vocabulary() -> None:
    """Check that packages and pages use the field's words."""
    from itm_lab.publish.vocabulary import denied_words

    found = list(denied_words(Paths.find().root))
    for line in found:
        typer.echo(line, err=True)
    raise typer.Exit(bool(found))


@notebooks.command()
def lint(
    files: Annotated[list[str] | None, typer.Argument(help="Chapters or paths; all chapters if none.")] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Repair counts, metadata and cell ids.")] = False,
) -> None:
    """Check the rules every committed notebook keeps."""
    from itm_lab.notebook_io import find_notebooks
    from itm_lab.publish.notebook_lint import lint_file

    findings = [text for path in find_notebooks(Paths.find().root, files or []) for text in lint_file(path, fix)]
    for text in findings:
        typer.echo(text, err=True)
    raise typer.Exit(bool(findings))


@notebooks.command()
def run(
    names: Annotated[list[str] | None, typer.Argument(help="Chapters, e.g. 01_vsepp; all if none.")] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Store the outputs in notebooks/.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Notebooks run at the same time.")] = 2,
) -> None:
    """Run chapters on Scenes; copies under _build/ are kept while nothing changes."""
    from itm_lab.publish.execute import run_notebooks

    start = time.perf_counter()
    failed = run_notebooks(Paths.find().root, names or [], in_place, jobs)
    if failed:
        typer.echo(f"failed: {', '.join(failed)}", err=True)
        raise typer.Exit(1)
    typer.echo(f"notebooks: {time.perf_counter() - start:.0f} s")


@notebooks.command()
def launch(
    folder: Annotated[Path, typer.Argument(help="Where the copies go.")],
    repository: Annotated[str, typer.Option(help="Address of the repository the package is installed from.")],
    ref: Annotated[str, typer.Option(help="Branch, tag or commit of it.")],
) -> None:
    """Write copies for launch buttons: no outputs, plain Markdown, a cell that installs the package."""
    from itm_lab.publish.launch_copies import launch_copies

    copies = launch_copies(Paths.find().root, folder, repository.rstrip("/"), ref)
    typer.echo(f"{folder}: {len(copies)} notebooks")


@notebooks.command()
def student(
    folder: Annotated[Path, typer.Argument(help="Where the copies go.")] = Path("_build/student"),
    nbgrader: Annotated[bool, typer.Option("--nbgrader", help="Marked for nbgrader: what students get.")] = False,
    instructor: Annotated[
        bool, typer.Option("--instructor", help="Marked for nbgrader: with solutions and hidden tests.")
    ] = False,
) -> None:
    """Write copies for a class, without solutions, answers and outputs."""
    from itm_lab.publish.student_copies import student_copies

    kind = "instructor" if instructor else "nbgrader" if nbgrader else "plain"
    typer.echo(f"{folder}: {len(student_copies(Paths.find().root, folder, kind))} notebooks")


@book.command()
def build(
    executed: Annotated[bool, typer.Option("--executed", help="Show the copies run under _build/.")] = False,
    solutions_from: Annotated[
        datetime | None, typer.Option(formats=["%Y-%m-%d"], help="Leave solutions and answers out before this day.")
    ] = None,
) -> None:
    """Build _build/html/index.html; warnings are errors."""
    from itm_lab.publish import build as builder

    start = time.perf_counter()
    if not builder.build(Paths.find().root, executed, solutions_from.date() if solutions_from else None):
        typer.echo("book: the build failed; the warnings stand above", err=True)
        raise typer.Exit(1)
    typer.echo(f"pages: {time.perf_counter() - start:.0f} s; _build/html/index.html")


@book.command()
def front(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; fail if README is behind.")] = False,
) -> None:
    """Write README's tables anew: chapters with verdicts, counts, findings. For whoever adds receipts."""
    from itm_lab.publish.front import is_current, refresh

    root = Paths.find().root
    if not check:
        typer.echo("README.md: written" if refresh(root) else "README.md: as it was")
    elif not is_current(root):
        typer.echo("README.md is behind receipts or results: run `itm book front`", err=True)
        raise typer.Exit(1)


@book.command()
def explorer(
    weights: Annotated[Path, typer.Option(help="Where kept models lie.")] = Path("weights"),
    out: Annotated[Path, typer.Option(help="Where the page's data go.")] = Path("book/_static/explorer"),
) -> None:
    """Write the data of the attention explorer: attention and scores of every kept model that attends, on Scenes."""
    from itm_lab.data.opening import dataset_folder
    from itm_lab.publish.explorer import kept_models, write_explorer
    from itm_lab.scenes import load_scenes
    from itm_utils.data.precomp import open_split

    root = Paths.find().root
    kept = kept_models(root / weights)
    split = open_split(dataset_folder("scenes"), "test")
    typer.echo(write_explorer(kept, load_scenes("test"), split, root / out))
