"""``itm data fetch``: SCAN's features from Kaggle, file by file, to a folder that appears only when it is whole.

Files come to a hidden folder beside the dataset. Each is opened when it has come, and noted; called again after an
interruption, only the others are fetched (``kagglehub`` goes on within a file). When all are there the splits are
opened and counted, and one rename gives the folder its name.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from itm_lab.data.check import check_dataset
from itm_lab.data.disk import check_space, gigabytes, make_folder, read_json
from itm_lab.data.registry import KAGGLE, KAGGLE_PAGE, Known
from itm_lab.data.report import DAMAGED, MISSING
from itm_utils.data.precomp import load_array, read_captions
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.errors import ItmError, input_error
from itm_utils.files import write_json
from itm_utils.progress import bar

JOURNAL = "journal.json"
ACCOUNT = (
    "A Kaggle account is needed: make a token at https://www.kaggle.com/settings/api and set KAGGLE_API_TOKEN, "
    "or call kagglehub.login()."
)
AGAIN = "Run the same command again: it goes on where it stopped."

# (file inside the Kaggle dataset, version or None, folder for downloads) → the whole file on this disk.
# Raises FileNotFoundError for a file that the dataset does not have.
Download = Callable[[str, int | None, Path], Path]


def fetch(known: Known, name: str, data_root: Path, download: Download | None = None) -> Path:
    """Fetch a dataset below ``data_root``; returns its folder. download: how a file comes, by default ``kagglehub``."""
    target = data_root / known.folder
    if target.exists() or target.is_symlink():
        if check_dataset(known, name, data_root, quick=True)[2]:
            return target
        hint = f"Nothing was fetched. `itm data check {name} --data-root {data_root}` says what it lacks; move it away to fetch all."
        raise input_error(target, "a dataset that is not whole", "no such folder", hint)
    download = download or kaggle_download()  # before anything is made on the disk
    staging = data_root / f".{known.folder}_unfinished"
    make_folder(staging)
    with FileLock(data_root / f".{known.folder}.lock"):
        if not target.exists():  # else another process was faster
            _Fetching(known, name, staging, download).run()
            os.replace(staging / known.folder, target)
        shutil.rmtree(staging, ignore_errors=True)
    return target


class _Fetching:
    """One call of :func:`fetch`, up to the rename."""

    def __init__(self, known: Known, name: str, staging: Path, download: Download) -> None:
        self.known, self.name, self.staging, self.download = known, name, staging, download
        self.folder, self.cache, self.journal = staging / known.folder, staging / "cache", staging / JOURNAL
        make_folder(self.folder)
        self.note: dict[str, Any] = {"version": None, "absent": [], "files": {}}
        if self.journal.is_file():
            known = read_json(self.journal, "the journal of a download")
            if not isinstance(known, dict) or set(known) != set(self.note):
                hint = f"Remove {staging} to begin anew."
                raise input_error(self.journal, "another content", "the journal of a download", hint)
            self.note = known

    def run(self) -> None:
        """Fetch what is not noted yet, then check the whole."""
        left = [file for file in self.known.files() if not self._is_here(file)]
        there = sum(path.stat().st_size for path in self.staging.rglob("*") if path.is_file())
        check_space(self.staging, self.known.size() - there, self.known.title)
        for file in bar(left, f"fetch {self.known.title}", "file"):
            self._fetch(file)
        if not any(self.folder.glob("*_vocab.json")):
            write_vocabulary(self.folder)
        self._check()

    def _is_here(self, file: str) -> bool:
        path = self.folder / file
        if file in self.note["absent"]:
            return True
        return path.is_file() and self.note["files"].get(file) == path.stat().st_size

    def _fetch(self, file: str) -> None:
        """Bring one file, open it, and note it."""
        remote = self.known.remote(file)
        try:
            source = self.download(remote, self.note["version"], self.cache)
        except FileNotFoundError as error:
            if not file.endswith("_ids.txt"):
                raise input_error(
                    remote, f"no such file in {KAGGLE}", "SCAN's package", f"See {KAGGLE_PAGE}."
                ) from error
            self.note["absent"].append(file)  # ids are not needed for training
            return self._write_note()
        mine = self.cache.absolute() in source.absolute().parents
        check_arrived(source, file, mine)
        _take(source, self.folder / file, mine)
        # All files of one version: a new one may appear between two calls.
        version = re.search(r"[/\\]versions[/\\](\d+)[/\\]", str(source))
        self.note["version"] = int(version[1]) if version else self.note["version"]
        self.note["files"][file] = (self.folder / file).stat().st_size
        return self._write_note()

    def _write_note(self) -> None:
        write_json(self.journal, self.note)

    def _check(self) -> None:
        """The splits open and have the known sizes; a file that is wrong is fetched again next time."""
        findings, _, whole = check_dataset(self.known, self.name, self.staging, quick=True)
        if whole:
            return
        wrong = [finding for finding in findings if finding.state in (MISSING, DAMAGED)]
        splits = {finding.what.split("_")[0] for finding in wrong}  # of two files that disagree either may be wrong
        self.note["files"] = {f: size for f, size in self.note["files"].items() if f.split("_")[0] not in splits}
        self._write_note()
        raise input_error(self.folder, f"{wrong[0].what}: {wrong[0].found}", "the dataset as it is known", AGAIN)


def check_arrived(path: Path, name: str, mine: bool) -> None:
    """A file that has come can be opened; ours is removed if not, or the next call would take it for whole."""
    try:
        if name.endswith(".npy"):
            load_array(path, mmap_mode="r")
        elif name.endswith("_caps.txt"):
            read_captions(path)
    except ItmError as error:
        if mine:
            path.unlink(missing_ok=True)
        raise input_error(name, str(error).partition(": found ")[2], "the file that Kaggle has", AGAIN) from error


def _take(source: Path, target: Path, mine: bool) -> None:
    """Move a file of our own download folder; copy one that belongs to somebody else's."""
    if mine:
        os.replace(source, target)
        return
    part = target.with_name(f".{target.name}.part")
    shutil.copyfile(source, part)
    os.replace(part, target)


def write_vocabulary(folder: Path, threshold: int = 4) -> Path:
    """Build ``<folder>_vocab.json`` from the captions of train and dev, as the public code does."""
    captions = [caption for split in ("train", "dev") for caption in read_captions(folder / f"{split}_caps.txt")]
    path = folder / f"{folder.name}_vocab.json"
    if any(folder.glob("*_vocab.json")):
        there = next(folder.glob("*_vocab.json")).name
        raise input_error(folder / there, "a vocabulary that is there already", "none", "Nothing was written.")
    Vocabulary.build(bar(captions, "count words", "caption"), threshold).save(path)
    return path


# -- Kaggle ---------------------------------------------------------------------------------------------------------


def kaggle_download() -> Download:
    """Downloads through ``kagglehub``, an optional package."""
    try:
        import kagglehub  # pyright: ignore[reportMissingImports] - an extra
    except ImportError as error:
        hint = f'Install it: pip install "itm-utils[data]" (or pip install kagglehub). {ACCOUNT}'
        raise input_error("kagglehub", "no such package", "it, to fetch from Kaggle", hint) from error

    def download(remote: str, version: int | None, cache: Path) -> Path:
        handle = KAGGLE if version is None else f"{KAGGLE}/versions/{version}"
        try:
            with _environment("KAGGLEHUB_CACHE", str(cache.absolute())):
                # Not output_dir: there an unfinished file is an error, in the cache it is continued.
                return Path(kagglehub.dataset_download(handle, path=remote))
        except Exception as error:  # its exceptions have no common class
            raise _explained(remote, error) from error

    return download


def _explained(remote: str, error: Exception) -> Exception:
    """An exception of ``kagglehub`` as an error that says what to do."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 404:
        return FileNotFoundError(remote)
    refused = status in (401, 403) or type(error).__name__ in ("UnauthenticatedError", "CredentialError")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    found = f"a download that failed ({type(error).__name__}: {lines[0][:200]})"
    return input_error(remote, found, f"a file of {KAGGLE_PAGE}", ACCOUNT if refused else AGAIN)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def announced(known: Known) -> str:
    """What a fetch is about to do, in one sentence."""
    return f"{known.title}: about {gigabytes(known.size())} from {KAGGLE_PAGE}"
