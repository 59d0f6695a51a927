"""A save that was begun beside training: what comes of it, and what the program sees of that."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import partial

from raysharded.checkpoint.async_save import process_exit
from raysharded.checkpoint.sharded_io.save import Saved
from raysharded.errors import CheckpointError

_log = logging.getLogger("raysharded.checkpoint")


class SaveOutcome:
    """What comes of one save. A thread runs it, others wait for it."""

    def __init__(self, uri: str, step: int) -> None:
        self.uri = uri
        self.step = step
        self.begun: Future[bool] = Future()
        """Whether it is written, and not skipped; known when rank 0 has said so."""
        self.ended: Future[Saved | None] = Future()
        """None if it was skipped."""
        self.was_told = False
        """Whether the program has got the exception of what made it fail."""

    def begin(self, begins: bool) -> bool:
        """Says whether it is written; if not, in the log too. The argument."""
        if not begins:
            _log.warning("step %d is not saved: the save before it is still being written to storage", self.step)
        self.begun.set_result(begins)
        return begins

    def run(self, work: Callable[[], Saved | None]) -> None:
        """Takes the outcome of all that is left to do; what it raises is in the log too."""
        try:
            saved = work()
        except BaseException as error:  # noqa: BLE001 - the boundary of the thread
            _log.error("the save of step %d to %s failed: %s", self.step, self.uri, error)
            self._end(partial(self.ended.set_exception, error))
        else:
            self._end(partial(self.ended.set_result, saved))

    def skip(self) -> None:
        """Nothing is saved; `begin` has said so."""
        self.ended.set_result(None)

    def abandon(self, error: BaseException) -> None:
        """Nothing will run it, for an error that the program gets at once."""
        self.was_told = True
        self._end(partial(self.ended.set_exception, error))

    def _end(self, how: Callable[[], None]) -> None:
        with suppress(InvalidStateError):  # it was abandoned, and ran all the same
            how()
        if not self.begun.done():
            self.begun.set_result(True)
        process_exit.ended(self)

    def wait(self) -> None:
        """Until nothing is written any more, whatever came of it."""
        self.ended.exception()

    @property
    def is_lost(self) -> bool:
        """Whether it failed, and no exception has told the program so."""
        return self.ended.done() and self.ended.exception() is not None and not self.was_told

    def give_up(self) -> None:
        """In a forked child: it is not this process that writes it."""
        self.begun, self.ended, self.was_told = Future(), Future(), True
        self.begun.set_result(True)
        self.ended.set_exception(
            CheckpointError(
                f"the save of step {self.step} to {self.uri} is written by the process that this one was forked from: "
                "ask for its result there."
            )
        )


class PendingSave:
    """A save that is being written, or was skipped."""

    def __init__(self, uri: str, step: int) -> None:
        self.uri = uri
        self.step = step
        self._outcome = SaveOutcome(uri, step)

    @property
    def skipped(self) -> bool:
        """Whether nothing is saved, because the save before was still being written. Waits until rank 0 has said so."""
        return not self._outcome.begun.result()

    @property
    def done(self) -> bool:
        """Whether `result` returns, or raises, at once."""
        return self._outcome.ended.done()

    def __repr__(self) -> str:
        if not self.done:
            so_far = "being written"
        elif self.skipped:
            so_far = "skipped"
        else:
            so_far = "saved" if self._outcome.ended.exception() is None else "failed"
        return f"PendingSave({os.fspath(self.uri)!r}, step={self.step}, {so_far})"

    def result(self, timeout_s: float | None = None) -> Saved:
        """The complete checkpoint. Raises what made the save fail, and CheckpointError if it was skipped.

        Raises TimeoutError if it takes longer than `timeout_s`; it goes on.
        """
        outcome = self._outcome
        try:
            error = outcome.ended.exception(timeout_s)
        except FutureTimeoutError:
            raise TimeoutError(f"the save of step {self.step} to {self.uri} takes longer than {timeout_s} s.") from None
        if error is not None:
            outcome.was_told = True
            raise error
        saved = outcome.ended.result()
        if saved is None:
            raise CheckpointError(f"step {self.step} was not saved: the save before it was still being written.")
        return saved


def outcome_of(pending: PendingSave) -> SaveOutcome:
    """What the program sees of it is `pending`."""
    return pending._outcome
