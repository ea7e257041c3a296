"""Top lists of a training set of Flickr30K's size: time and memory against the bare matrix products.

29,000 images and 145,000 captions, one unit vector of width 1,024 each, in memory-mapped files; 300 captions for each
image and 60 images for each caption; two threads. The bare products are all that no method can avoid: the same blocks,
multiplied and forgotten. Both are timed in one run and take turns after every block of captions, so that a busy minute
of the machine hits both. Then a second process mines the same lists, is killed on its way, and is started again.

    python -m benchmarks.mining        (some minutes, 2 GB of memory, 1 GB on disk; writes benchmarks/results/mining.json)
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.harness import ALLOCATOR, finish, start
from itm_utils import mining
from itm_utils.data.precomp import load_array, open_split
from itm_utils.matcher import ImageBatch, Images, Matcher, Scores, TextBatch, Texts
from itm_utils.scoring import block_shape

WIDTH, PER_IMAGE, SCENES = 1024, 5, 1000
# Threads that wait, sleep. Spinning they would take the core from whoever they wait for when others use it too.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}


class OneProduct(Matcher):
    """The cheapest matcher there is: vectors are given, a score is their product."""

    def encode_images(self, batch: ImageBatch) -> Images:
        return Images(pooled=batch.regions[:, 0])

    def encode_texts(self, batch: TextBatch) -> Texts:
        return Texts(pooled=batch.features[:, 0])

    def score(self, images: Images, texts: Texts) -> Scores:
        return Scores.same(images.pooled @ texts.pooled.T)


class Vectors:
    """Captions that are vectors already, in a mapped file."""

    def __init__(self, path: Path) -> None:
        self.vectors = load_array(path, mmap_mode="r")
        self.lengths = np.ones(len(self.vectors), dtype=np.int64)

    def batch(self, captions: np.ndarray) -> TextBatch:
        features = torch.from_numpy(self.vectors[captions])[:, None]
        return TextBatch(
            torch.ones(len(captions), dtype=torch.int64),
            torch.from_numpy(captions),
            features=features,
        )


def write_data(root: Path, images: int) -> None:
    """Pictures of some scenes, and captions near their pictures; neighbours in the file have nothing in common."""
    rng = torch.Generator().manual_seed(0)
    scenes = torch.randn(SCENES, WIDTH, generator=rng)
    captions = np.lib.format.open_memmap(root / "vectors.npy", "w+", np.float32, (images * PER_IMAGE, WIDTH))
    pictures = np.lib.format.open_memmap(root / "train_ims.npy", "w+", np.float32, (images, WIDTH))
    for first in range(0, images, 1000):
        some = pictures[first : first + 1000]
        shown = torch.randint(SCENES, (len(some),), generator=rng)
        vectors = nn.functional.normalize(scenes[shown] + 1.5 * torch.randn(len(some), WIDTH, generator=rng), dim=1)
        some[:] = vectors.numpy()
        said = vectors.repeat_interleave(PER_IMAGE, dim=0)
        said = said + 1.5 * WIDTH**-0.5 * torch.randn(said.shape, generator=rng)
        captions[first * PER_IMAGE : (first + len(some)) * PER_IMAGE] = nn.functional.normalize(said, dim=1).numpy()
    (root / "train_caps.txt").write_text("a caption\n" * images * PER_IMAGE)


def mine(
    root: Path,
    folder: Path,
    texts: int,
    images: int,
    threads: int,
    note_every: int = mining.SAVE_EVERY,
) -> None:
    """All lists of the data in ``root``; also what the second process does."""
    torch.set_num_threads(threads)
    mining.SAVE_EVERY = note_every
    mining.mine(
        OneProduct(),
        open_split(root, "train"),
        Vectors(root / "vectors.npy"),
        folder,
        texts,
        images,
    )


@dataclass
class Clock:
    """Seconds by the wall and of the processors, of the bare products; and how the memory of the process grew."""

    wall: float = 0.0
    processor: float = 0.0
    anonymous: list[int] = field(default_factory=list)

    def bare_products(self, images: Images, texts: Texts, budget: int) -> None:
        """Multiply one block as mining does, and forget it."""
        wall, processor = time.perf_counter(), time.process_time()
        rows, columns = block_shape(OneProduct(), images, texts, budget // 4)
        for column in range(0, len(texts), columns):
            block = texts.pooled[column : column + columns]
            for row in range(0, len(images), rows):
                images.pooled[row : row + rows] @ block.T
        self.wall += time.perf_counter() - wall
        self.processor += time.process_time() - processor

    def watch(self, stop: threading.Event) -> None:
        """Note the memory that is no mapped file, twenty times a second."""
        while not stop.wait(0.05):
            self.anonymous.append(resident("RssAnon"))


def resident(kind: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(kind)).split()[1])


def time_mining(root: Path, folder: Path, lengths: tuple[int, int], threads: int) -> dict[str, object]:
    """Mine once, with the bare products of each block right after it; returns seconds, ratios and memory."""
    clock, stop, compare = Clock(), threading.Event(), mining._Mining._compare
    blocks = []

    def compare_and_multiply(self: mining._Mining, images: Images, texts: Texts, *first: int) -> None:
        compare(self, images, texts, *first)
        clock.bare_products(images, texts, self.facts["budget"])
        blocks.append(len(texts))

    mining._Mining._compare = compare_and_multiply
    watcher = threading.Thread(target=clock.watch, args=(stop,), daemon=True)
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # give back what is free, or it would hide what is needed
    before = resident("RssAnon")
    watcher.start()
    wall, processor = time.perf_counter(), time.process_time()
    mine(root, folder, *lengths, threads)
    wall, processor = (
        time.perf_counter() - wall - clock.wall,
        time.process_time() - processor - clock.processor,
    )
    stop.set()
    watcher.join()
    mining._Mining._compare = compare
    return {
        "seconds": {"bare products": clock.wall, "mining": wall},
        "processor_seconds": {"bare products": clock.processor, "mining": processor},
        "times_bare_products": wall / clock.wall,
        "times_bare_products_processor": processor / clock.processor,
        "peak_bytes_beyond_mapped_inputs": max(clock.anonymous) - before,
        "turns": len(blocks),
    }


def mine_killed(root: Path, folder: Path, lengths: tuple[int, int], threads: int, note_every: int) -> int:
    """Kill a second process a little after its first note, and start it again; returns the blocks it had noted."""
    here = str(Path(__file__).parents[1])
    call = f"from pathlib import Path; from benchmarks import mining; mining.mine(Path({str(root)!r}), Path({str(folder)!r}), "
    command = [
        sys.executable,
        "-c",
        f"{call}{lengths[0]}, {lengths[1]}, {threads}, {note_every})",
    ]
    note = folder / mining.STATE
    first = subprocess.Popen(command, cwd=here)
    while not note.exists() and first.poll() is None:
        time.sleep(0.1)
    time.sleep(note_every / 4)
    first.kill()
    if first.wait() != -9:
        raise SystemExit("the second process ended before it could be killed: give it more data")
    steps = mining.read_checkpoint(note).info["steps"]
    subprocess.run(command, cwd=here, check=True)
    return steps


def main() -> None:
    os.environ.update(WAITING)  # start() begins the process anew
    args = start(
        __doc__,
        "mining.json",
        images=29_000,
        texts=300,
        top_images=60,
        threads=2,
        note_every=20,
    )
    lengths = args.texts, args.top_images
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        write_data(root, args.images)
        found = time_mining(root, root / "whole", lengths, args.threads)
        print(found, flush=True)
        steps = mine_killed(root, root / "killed", lengths, args.threads, args.note_every)
        names = ("texts.npy", "images.npy", "manifest.json")
        same = all((root / "whole" / name).read_bytes() == (root / "killed" / name).read_bytes() for name in names)
        inputs = {name: (root / f"{name}.npy").stat().st_size for name in ("train_ims", "vectors")}
    what = {
        "images": args.images,
        "captions": args.images * PER_IMAGE,
        "width": WIDTH,
        "texts_per_image": args.texts,
        "images_per_text": args.top_images,
        "threads": args.threads,
        "budget": mining.BUDGET,
        "mapped_inputs": sum(inputs.values()),
        "allocator": ALLOCATOR,
        "waiting": WAITING,
        "seconds": "by the wall; mining with reading, encoding, notes and writing; products after each block of captions",
    }
    finish(
        args,
        {
            "what": what,
            **found,
            "killed_after_blocks": steps,
            "killed_and_resumed_same_bytes": same,
        },
    )


if __name__ == "__main__":
    main()
