"""A background save: its outcome, and the program's handle to it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import partial

from raysharded.checkpoint.async_save import process_exit
from raysharded.checkpoint.sharded_io.save import Saved
from raysharded.display.plain_text import masked
from raysharded.errors import CheckpointError

_log = logging.getLogger("raysharded.checkpoint")


class SaveOutcome:
    """Outcome of one save. One thread runs the save, others wait for it."""

    def __init__(self, uri: str, step: int) -> None:
        self.uri = uri
        self.step = step
        self.begun: Future[bool] = Future()
        """Whether the save is written, not skipped. Known once rank 0 has decided."""
        self.ended: Future[Saved | None] = Future()
        """Result of the save; None if it was skipped."""
        self.was_told = False
        """Whether the program has received the exception that made the save fail."""

    def begin(self, begins: bool) -> bool:
        """Record whether the save is written, and log a warning if not. Returns its argument."""
        if not begins:
            _log.warning("step %d is not saved: the save before it is still being written to storage", self.step)
        self.begun.set_result(begins)
        return begins

    def run(self, work: Callable[[], Saved | None]) -> None:
        """Run the rest of the save and record its outcome. An exception is logged too."""
        try:
            saved = work()
        except BaseException as error:  # noqa: BLE001 - the boundary of the thread
            _log.error("the save of step %d to %s failed: %s", self.step, self.uri, error)
            self._end(partial(self.ended.set_exception, error))
        else:
            self._end(partial(self.ended.set_result, saved))

    def skip(self) -> None:
        """Record that nothing is saved; `begin` has logged it."""
        self.ended.set_result(None)

    def abandon(self, error: BaseException) -> None:
        """Record that no thread will run the save, for an error that the program receives at once."""
        self.was_told = True
        self._end(partial(self.ended.set_exception, error))

    def _end(self, how: Callable[[], None]) -> None:
        with suppress(InvalidStateError):  # it was abandoned, and ran all the same
            how()
        if not self.begun.done():
            self.begun.set_result(True)
        process_exit.ended(self)

    def wait(self) -> None:
        """Wait until the save has ended, successfully or not."""
        self.ended.exception()

    @property
    def is_lost(self) -> bool:
        """Whether the save failed and the program has not received its exception."""
        return self.ended.done() and self.ended.exception() is not None and not self.was_told

    def give_up(self) -> None:
        """Fail the save in a forked child: the parent process writes it."""
        self.begun, self.ended, self.was_told = Future(), Future(), True
        self.begun.set_result(True)
        self.ended.set_exception(
            CheckpointError(
                f"the save of step {self.step} to {self.uri} is written by the process that this one was forked from: "
                "request its result there."
            )
        )


class PendingSave:
    """A save that is being written, has ended, or was skipped."""

    def __init__(self, uri: str, step: int) -> None:
        self.uri = uri
        self.step = step
        self._outcome = SaveOutcome(uri, step)

    @property
    def skipped(self) -> bool:
        """Whether the save was skipped because the previous one was still being written.

        Waits for rank 0's decision.
        """
        return not self._outcome.begun.result()

    @property
    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self._outcome.ended.done()

    def __repr__(self) -> str:
        if not self.done:
            so_far = "being written"
        elif self.skipped:
            so_far = "skipped"
        else:
            so_far = "saved" if self._outcome.ended.exception() is None else "failed"
        return f"PendingSave({masked(os.fspath(self.uri))!r}, step={self.step}, {so_far})"

    def result(self, timeout_s: float | None = None) -> Saved:
        """The complete checkpoint. Raises the error that made the save fail, and CheckpointError if it was skipped.

        Raises TimeoutError if the save takes longer than `timeout_s`; the save continues.
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
    """The outcome behind a `PendingSave`."""
    return pending._outcome
