"""Reads of a user's samples that fail: done again, and then explained in the user's terms."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from typing import Any

from raysharded.errors import RayshardedError, TaskError, is_ctrl_c, user_traceback

_log = logging.getLogger("raysharded.data")
_PAUSES_S = (0.1, 1.0)
"""Pauses before a read is done again that the operating system or a network has failed."""
_NO_PAUSE = (0.0,)
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
    hint = hint or " Correct the dataset; its traceback is in user_traceback."
    return TaskError(f"{what} raised {where}: {_cause(error)}.{hint}", text)


def _cause(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()
