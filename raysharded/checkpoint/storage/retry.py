"""One retry policy for storage operations: bounded, with full jitter, and only for transient errors.

Before attempt `n + 1` it waits a time drawn uniformly from 0 to min(8 s, 0.2 s * 2**(n - 1)). With this "full jitter",
the writers of one group, which fail together, do not retry together. It stops after 8 attempts or once 120 s have
passed, whichever is first. The timeout of a request in progress then bounds that request.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)

T = TypeVar("T")

_log = logging.getLogger("raysharded.checkpoint")
_counts: Counter[str] = Counter()
_counts_lock = threading.Lock()

MAX_ATTEMPTS = 8
MAX_WAIT_S = 8.0
GIVE_UP_AFTER_S = 120.0

_TRANSIENT = frozenset({errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.ECONNRESET, errno.ENETUNREACH})


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed a little later: a lost connection, a timeout, a busy server."""
    if isinstance(error, (ConnectionError, TimeoutError, InterruptedError)):
        return True
    return isinstance(error, OSError) and error.errno in _TRANSIENT


def retries_of(url: str) -> int:
    """Number of retries on the storage at `url` in this process."""
    with _counts_lock:
        return _counts[url]


def with_retries(
    operation: Callable[[], T],
    *,
    url: str,
    transient: Callable[[BaseException], bool] = is_transient,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Result of `operation()`, retried after transient errors, each counted for `url`. Raises the last error."""
    for attempt in Retrying(
        stop=stop_after_attempt(MAX_ATTEMPTS) | stop_after_delay(GIVE_UP_AFTER_S),
        wait=wait_random_exponential(multiplier=0.2, max=MAX_WAIT_S),
        retry=retry_if_exception(transient),
        before_sleep=lambda state: _count(url, state),
        sleep=sleep,
        reraise=True,
    ):
        with attempt:
            return operation()
    raise AssertionError("unreachable: the last attempt raises")


def _count(url: str, state: RetryCallState) -> None:
    with _counts_lock:
        _counts[url] += 1
    error = state.outcome.exception() if state.outcome else None
    _log.info("storage %s: attempt %d failed (%s: %s); again", url, state.attempt_number, type(error).__name__, error)


def _start_anew() -> None:
    """Renew counts and lock in a forked process: a thread of its parent may hold the old lock."""
    global _counts, _counts_lock
    _counts, _counts_lock = Counter(), threading.Lock()


os.register_at_fork(after_in_child=_start_anew)
