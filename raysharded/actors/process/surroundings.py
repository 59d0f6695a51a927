"""The needs of Ray in a process where it starts: a home, a working directory, a folder for its sessions, no SIGHUP.

Containers and batch systems leave some of them out. Does not import Ray.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from raysharded.display.plain_text import brief
from raysharded.errors import ClusterError

_TOKEN = Path(".ray", "auth_token")
_TOKEN_GIVEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


def home_problem(*, tried: bool = False) -> str:
    """The reason that Ray cannot keep its token here, with the way out; empty if it can, or needs none.

    `tried`: it has failed.
    """
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled" or any(map(os.environ.get, _TOKEN_GIVEN)):
        return ""
    try:
        home = Path.home()
    except RuntimeError:  # Python's error for a user without one
        problem = f"user {os.getuid()} has no home: HOME is not set, and no line of /etc/passwd names one"
    else:
        token = home / _TOKEN
        if not tried and (os.access(token, os.R_OK) or _is_writable(token.parent)):
            return ""
        problem = f"HOME={home} cannot be written by user {os.getuid()}"
    return (
        f"Ray keeps a token in ~/{_TOKEN}, and {problem}. Set HOME to a folder that can be written, or "
        "RAY_AUTH_MODE=disabled"
    )


def session_folder() -> str:
    """The folder in which Ray keeps the files and sockets of its sessions."""
    return os.path.join(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "ray")


def session_problem() -> str:
    """The reason that Ray cannot keep its sessions here, with the way out; empty if it can."""
    folder = session_folder()
    if _is_writable(Path(folder)):
        return ""
    return (
        f"Ray keeps its sessions in {folder}, which cannot be written by user {os.getuid()}. Set RAY_TMPDIR to a "
        "folder with a short path that can be written"
    )


def working_directory_problem() -> str:
    """The sentence on a working directory that was removed; empty if it is there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the working directory of this process was removed. Start it in a folder that exists (`cd`)"
    return ""


def why_not_started(error: BaseException) -> str:
    """The reason that Ray did not start, from its error, with the way out where the surroundings are the cause."""
    text = str(error)
    problem = ""
    if isinstance(error, FileNotFoundError):
        problem = working_directory_problem()
    if not problem and ("home directory" in text or (isinstance(error, OSError) and f"/{_TOKEN.parent}" in text)):
        problem = home_problem(tried=True)
    if not problem and _is_refusal(error):
        problem = session_problem()
    told = f"{type(error).__name__}: {brief(text, 300).rstrip('.')}"
    return f"Ray cannot be started on this machine: {problem} ({told})." if problem else f"Ray did not start: {told}."


@contextlib.contextmanager
def importing_ray() -> Iterator[None]:
    """A context for Ray's import. Raises ClusterError if it needs a working directory that was removed."""
    try:
        yield
    except FileNotFoundError as error:
        if problem := working_directory_problem():
            raise ClusterError(f"Ray cannot be started on this machine: {problem}.") from error
        raise


@contextlib.contextmanager
def no_hangup() -> Iterator[None]:
    """A context in whose processes SIGHUP is blocked: at the end of a terminal, it is for the driver alone.

    The driver needs them for one more checkpoint, and they end with it. In this process the signal waits meanwhile.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_refusal(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _REFUSED


def _is_writable(folder: Path) -> bool:
    """Whether files can be made in a folder, which is made first if it is missing."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)
