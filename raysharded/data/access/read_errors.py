"""Reads of a user's samples that fail: done again, and then explained; and the place of one that hangs."""

from __future__ import annotations

import logging
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from raysharded.errors import RayshardedError, TaskError, is_ctrl_c, user_traceback
from raysharded.locations import PACKAGE_FOLDER

_log = logging.getLogger("raysharded.data")
_PAUSES_S = (0.1, 1.0)
"""Pauses before a read is done again that the operating system or a network has failed."""
_NO_PAUSE = (0.0,)
_CALL = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_PACKAGE = os.path.join(PACKAGE_FOLDER, "data", "")
_STDLIB = os.path.join(os.path.dirname(os.__file__), "")
_LASTING = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


def read_again(read: Callable[[], Any], named: Callable[[], str], sleep: Callable[[float], None] = time.sleep) -> Any:
    """The result of `read()`, which may be called up to three times.

    An `OSError`, as of a network or a disk, is retried twice, after 0.1 and 1 s; another `Exception`, and a file
    that is not there, once at once. Each is logged with `named()`, the sample and the time of the read. Raises the last
    error. A `RayshardedError` and what ends a process are raised at once.
    """
    for tries in range(len(_PAUSES_S) + 1):
        try:
            return read()
        except RayshardedError:
            raise
        except Exception as error:
            pauses = _PAUSES_S if isinstance(error, OSError) and not isinstance(error, _LASTING) else _NO_PAUSE
            if is_ctrl_c(error) or tries >= len(pauses):
                raise
            _log.warning("%s raised %s; it is read again", named(), _cause(error))
            sleep(pauses[tries])
    raise AssertionError("unreachable: the last try raises")


def task_error(what: str, where: str, error: BaseException, hint: str = "") -> TaskError:
    """The TaskError for an error of the user's dataset. `hint`: further advice."""
    text = user_traceback(error)
    hint = hint or " Correct the dataset, as its traceback shows (the error's `user_traceback`)."
    return TaskError(f"{what} raised {where}: {_cause(error)}.{hint}", text)


def _cause(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def innermost_line(stacks: str) -> str:
    """`file:line in function` where the thread that reads samples is: the innermost line of the user's, if it has one.

    `stacks`: as `faulthandler` writes them. Empty if no thread calls what it reads.
    """
    for thread in stacks.split("most recent call first):")[1:]:
        calls = _CALL.findall(thread)
        own = next((place for place, (file, _, _) in enumerate(calls) if file.startswith(_PACKAGE)), 0)
        if own:
            file, line, name = next((call for call in calls[:own] if not _is_of_library(call[0])), calls[0])
            return f"{os.path.basename(file)}:{line} in {name}"
    return ""


def _is_of_library(file: str) -> bool:
    return file.startswith(_STDLIB) or f"{os.sep}site-packages{os.sep}" in file


@contextmanager
def explaining(what: str, where: str, hint: str = "") -> Iterator[None]:
    """A context that makes an error of the user's code a TaskError with its place, as `task_error` does."""
    try:
        yield
    except RayshardedError:
        raise
    except BaseException as error:  # the boundary to the user's code, which may call sys.exit()
        if is_ctrl_c(error):
            raise
        raise task_error(what, where, error, hint) from error
