"""One policy for trying storage operations again: bounded, jittered, and only for what may pass by itself."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

T = TypeVar("T")

MAX_ATTEMPTS = 5
MAX_WAIT_S = 8.0

_TRANSIENT = frozenset({errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.ECONNRESET, errno.ENETUNREACH})


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed a little later: a lost connection, a timeout, a busy server."""
    if isinstance(error, (ConnectionError, TimeoutError, InterruptedError)):
        return True
    return isinstance(error, OSError) and error.errno in _TRANSIENT


def with_retries(operation: Callable[[], T], *, sleep: Callable[[float], None] = time.sleep) -> T:
    """`operation()`, tried again after transient errors; raises the last error."""
    for attempt in Retrying(
        stop=stop_after_attempt(MAX_ATTEMPTS),
        wait=wait_random_exponential(multiplier=0.2, max=MAX_WAIT_S),
        retry=retry_if_exception(is_transient),
        sleep=sleep,
        reraise=True,
    ):
        with attempt:
            return operation()
    raise AssertionError("unreachable: the last attempt raises")
