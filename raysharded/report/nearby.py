"""Runs that a user may have meant: in a folder, beside it with a similar name, or near the working directory."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence

from raysharded.checkpoint import Storage, open_storage
from raysharded.checkpoint.removal_mark import REMOVAL_KEY
from raysharded.checkpoint.storage.optional_operations import list_folders
from raysharded.errors import StorageError
from raysharded.journal import log
from raysharded.locations import join_url, local_path, scheme_of
from raysharded.report.overview import is_run

_NAMES = 5
_SIMILAR = 0.6
"""Least similarity of names, by `difflib`: `nope` is no misspelling of `one`."""
_FOLDERS = 200
"""Folders of the working directory that are searched for runs."""


def near(name: str) -> str:
    """The runs near the working directory that a name may mean, as a sentence after a space; empty if none.

    Runs of this name come first, then those with similar names, then any. Never raises.
    """
    found = near_runs()
    if meant := like(name, found):
        return f" Did you mean {' or '.join(meant)}?"
    more = f" and {len(found) - _NAMES} more" if len(found) > _NAMES else ""
    return f" Runs here: {', '.join(found[:_NAMES])}{more}." if found else ""


def near_runs() -> list[str]:
    """Paths of the runs in the working directory and in its folders, as `./NAME` and `runs/NAME`. Never raises."""
    return list(_near())


def like(name: str, runs: Sequence[str]) -> list[str]:
    """The first few of these runs, given by names or paths, of this name; if none has it, of similar names."""
    names = {os.path.basename(run) for run in runs}
    close = [name] if name in names else difflib.get_close_matches(name, sorted(names), n=_NAMES, cutoff=_SIMILAR)
    return [run for other in close for run in runs if os.path.basename(run) == other][:_NAMES]


def require_folder(url: str) -> None:
    """Raise StorageError, with folders of similar names, if a path of this machine is no folder.

    Object stores have no folders.
    """
    path = local_path(url)
    if path is not None and not os.path.isdir(path):
        what = "it is a file" if os.path.exists(path) else "it does not exist"
        raise StorageError(f"there is no folder {path}: {what}.{_similar_folders(path)}")


def _similar_folders(path: str) -> str:
    above, name = os.path.split(path)
    try:
        with os.scandir(above) as found:
            beside = [entry.name for entry in found if entry.is_dir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(name, sorted(beside), n=_NAMES, cutoff=0.5)
    return f" Did you mean {' or '.join(os.path.join(above, folder) for folder in close)}?" if close else ""


def _near() -> Iterator[str]:
    """Paths of the runs in the working directory, then of those in its folders."""
    here = _runs_in(os.curdir)
    yield from (os.path.join(os.curdir, run) for run in here)
    try:
        with os.scandir(os.curdir) as found:
            folders = sorted(entry.name for entry in found if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return
    for folder in [name for name in folders if name not in here][:_FOLDERS]:
        yield from (os.path.join(folder, run) for run in _runs_in(folder))


def advice(storage: Storage) -> str:
    """The runs that exist instead, if they can be listed cheaply; otherwise the expected argument."""
    plain = " Give the folder of one run, <RunConfig.storage_path>/<RunConfig.name>."
    if close := meant(storage):
        return close
    if not _is_here(storage.url):
        return plain
    folder = os.path.dirname(_path(storage.url))
    runs = _runs_in(folder)
    return f" Runs in {folder}: {_listed(runs)}." if runs else plain


def meant(storage: Storage) -> str:
    """The runs that the user of this URL may have meant: runs in it, or next to it with a similar name; empty if none.
    Never raises."""
    if _is_here(storage.url) and (inside := _runs_in(_path(storage.url))):
        return f" It holds runs: give one of them, {_names(_path(storage.url), inside)}."
    path, mark, options = storage.url.partition("?")
    folder, name = os.path.split(_path(path))
    above = folder + mark + options
    try:
        beside = list_folders(open_storage(above))
        close = difflib.get_close_matches(name, beside, n=_NAMES, cutoff=0.5)
        runs = [found for found in close if is_run(open_storage(join_url(above, found)))]
    except StorageError:
        return ""
    return f" Did you mean {_names(folder, runs)}?" if runs else ""


def _is_run_at(folder: str) -> bool:
    """True for a folder of this machine that has a run's journal, and is not being removed. Lists at most that."""
    try:
        with os.scandir(os.path.join(folder, log.FOLDER)) as found:
            is_run = any(log.is_segment(f"{log.FOLDER}/{entry.name}") for entry in found)
    except OSError:
        return False
    return is_run and not os.path.exists(os.path.join(folder, *REMOVAL_KEY.split("/")))


def _is_here(url: str) -> bool:
    return scheme_of(url) in (None, "file")


def _path(url: str) -> str:
    return url.removeprefix("file://")


def _names(folder: str, runs: list[str]) -> str:
    return _listed([os.path.join(folder, run) for run in runs])


def _listed(runs: list[str]) -> str:
    more = f" and {len(runs) - _NAMES} more" if len(runs) > _NAMES else ""
    return ", ".join(runs[:_NAMES]) + more


def _runs_in(folder: str) -> list[str]:
    """The names of the runs in a folder of this machine, sorted."""
    try:
        with os.scandir(folder) as found:
            return sorted(entry.name for entry in found if _is_run_at(entry.path))
    except OSError:
        return []
