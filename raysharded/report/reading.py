"""A run's journal, read for its report: as far as it is whole, and with a plain word where there is none."""

from __future__ import annotations

import difflib
import os

from raysharded.checkpoint import Storage, open_storage
from raysharded.checkpoint.claims import CLAIMS_FOLDER
from raysharded.checkpoint.storage.folders import list_folders
from raysharded.checkpoint.storage.urls import join_url, scheme_of
from raysharded.driver import journal
from raysharded.errors import StorageError
from raysharded.obs.run_summary import RunSummary
from raysharded.obs.summary import Fold
from raysharded.report.reads import check_ledger
from raysharded.report.run_report import RunReport

_DAMAGE = (ValueError, KeyError, TypeError, IndexError)
"""What bytes that no driver wrote raise."""
_NAMES = 5


def open_run(run_url: str) -> Storage:
    """The storage of a run. Raises StorageError, with the runs that it may mean, if there is none."""
    storage = open_storage(run_url)
    if not storage.list(journal.FOLDER) and not storage.list(CLAIMS_FOLDER):
        raise StorageError(_no_run(storage))
    return storage


def load(run_url: str) -> RunReport:
    """The report of the run in a folder or under a URL: `<storage_path>/<name>`.

    Works while the run goes on, and after any number of resumes. Of a journal that is damaged the report covers what
    comes before the damage, and says so. Raises StorageError if there is no run, if it cannot be read, or if nothing
    of it can be understood.
    """
    storage = open_storage(run_url)
    summary, damage = _fold(storage)
    if summary.starts:
        return RunReport(url=storage.url, summary=summary, ledger=check_ledger(summary), damage=damage)
    if damage:
        raise StorageError(
            f"the journal of the run at {storage.url} is damaged from its beginning: {damage}. Restore the "
            f"files under {join_url(storage.url, journal.FOLDER)}, or go by its checkpoints: "
            f"`raysharded checkpoint ls {storage.url}`."
        )
    if storage.list(journal.FOLDER):
        raise StorageError(
            f"the journal of the run at {storage.url} is empty: its driver has just begun, or ended before it could "
            "write. Try again in a few seconds; `raysharded run`, or the script, starts it again."
        )
    raise StorageError(_no_run(storage))


def _no_run(storage: Storage) -> str:
    return f"there is no run at {storage.url}: nothing of a journal under {journal.FOLDER}/.{advice(storage)}"


def _fold(storage: Storage) -> tuple[RunSummary, str]:
    """The summary of the journal up to the first entry that is damaged, and which that is; empty if there is none."""
    fold, placed, where = Fold(), journal.read_placed(storage), "its first line"
    while True:
        try:
            found = next(placed, None)
            if found is None:
                return fold.summary(), ""
            fold.add(found.entry)
            where = f"what follows line {found.line} of {found.key}"
        except _DAMAGE as error:
            return fold.summary(), f"{where} cannot be read ({type(error).__name__}: {error})"


def advice(storage: Storage) -> str:
    """Which runs there are instead, if that is cheap to say, or else what to give."""
    plain = " Give the folder of one run, <RunConfig.storage_path>/<RunConfig.name>."
    if close := meant(storage):
        return close
    if not _is_here(storage.url):
        return plain
    folder = os.path.dirname(_path(storage.url))
    runs = _runs_in(folder)
    return f" Runs there: {_names(folder, runs)}." if runs else plain


def meant(storage: Storage) -> str:
    """Which runs somebody may have meant who gave this URL: those in it, or beside it with a name like it; empty if
    none. Never raises."""
    if _is_here(storage.url) and (inside := _runs_in(_path(storage.url))):
        return f" It holds runs: give one of them, {_names(_path(storage.url), inside)}."
    path, mark, options = storage.url.partition("?")
    folder, name = os.path.split(_path(path))
    above = folder + mark + options
    try:
        beside = list_folders(open_storage(above))
        close = difflib.get_close_matches(name, beside, n=_NAMES, cutoff=0.5)
        runs = [found for found in close if {journal.FOLDER, CLAIMS_FOLDER} & set(_inside(above, found))]
    except StorageError:
        return ""
    return f" Did you mean {_names(folder, runs)}?" if runs else ""


def _inside(above: str, name: str) -> list[str]:
    return list_folders(open_storage(join_url(above, name)))


def _is_here(url: str) -> bool:
    return scheme_of(url) in (None, "file")


def _path(url: str) -> str:
    return url.removeprefix("file://")


def _names(folder: str, runs: list[str]) -> str:
    more = f" and {len(runs) - _NAMES} more" if len(runs) > _NAMES else ""
    return ", ".join(os.path.join(folder, run) for run in runs[:_NAMES]) + more


def _runs_in(folder: str) -> list[str]:
    """The names of the runs in a folder of this machine, sorted."""
    try:
        with os.scandir(folder) as found:
            return sorted(entry.name for entry in found if os.path.isdir(os.path.join(entry.path, journal.FOLDER)))
    except OSError:
        return []
