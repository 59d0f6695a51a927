"""Saves beside training: the state is copied into host memory, and everything else happens in a thread.

Training stands still for one copy of this rank's shards. The buffer that they are copied to is made once, and used by
every save; so there is one save at a time.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError as FutureTimeoutError
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self

import torch.distributed as dist

from raysharded.checkpoint.background import step_back
from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.state import tree
from raysharded.checkpoint.state.coordinator import TIMEOUT_S, Coordinator
from raysharded.checkpoint.state.copying import HostCopy
from raysharded.checkpoint.state.entries import later_form, saved_form
from raysharded.checkpoint.state.place import Uri, require_key
from raysharded.checkpoint.state.saving import About, Content, Saved, Target, write
from raysharded.errors import CheckpointError, ConfigError

_log = logging.getLogger("raysharded.checkpoint")
_HEAD_START_S = 0.02
"""What training gets before the thread takes the interpreter's lock for the first time, and the other ranks' copies."""


class PendingSave:
    """A save that is being written, or was skipped."""

    def __init__(self, uri: str, step: int) -> None:
        self.uri = uri
        self.step = step
        self._begun: Future[bool] = Future()
        """Whether it was not skipped; known when rank 0 has said so."""
        self._ended: Future[Saved | None] = Future()

    @property
    def skipped(self) -> bool:
        """Whether nothing is saved, because the save before was still being written. Waits until rank 0 has said so."""
        return not self._begun.result()

    @property
    def done(self) -> bool:
        """Whether `result` returns, or raises, at once."""
        return self._ended.done()

    def __repr__(self) -> str:
        if not self._ended.done():
            outcome = "being written"
        elif self.skipped:
            outcome = "skipped"
        else:
            outcome = "saved" if self._ended.exception() is None else "failed"
        return f"PendingSave({os.fspath(self.uri)!r}, step={self.step}, {outcome})"

    def result(self, timeout_s: float | None = None) -> Saved:
        """The complete checkpoint. Raises what made the save fail, and CheckpointError if it was skipped.

        Raises TimeoutError if it takes longer than `timeout_s`; it goes on.
        """
        try:
            saved = self._ended.result(timeout_s)
        except FutureTimeoutError:
            raise TimeoutError(f"the save of step {self.step} to {self.uri} takes longer than {timeout_s} s.") from None
        if saved is None:
            raise CheckpointError(f"step {self.step} was not saved: the save before it was still being written.")
        return saved

    def _wait(self) -> None:
        """Until nothing is written any more, whatever came of it."""
        self._ended.exception()

    def _begin(self, begins: bool) -> bool:
        if not begins:
            _log.warning("step %d is not saved: the save before it is still being written to storage", self.step)
        self._begun.set_result(begins)
        return begins

    def _run(self, work: Callable[[], Saved | None]) -> None:
        """Takes the outcome of all that is left to do; what it raises is in the log too."""
        try:
            self._ended.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the boundary of the thread
            _log.error("the save of step %d to %s failed: %s", self.step, self.uri, error)
            self._ended.set_exception(error)
        finally:
            if not self._begun.done():
                self._begun.set_result(True)


class AsyncSaver:
    """Saves one state again and again, each time while training goes on. Call it from one thread.

    On a process group every rank has one, and all make the same calls.
    """

    def __init__(
        self,
        *,
        when_busy: Literal["skip", "wait"] = "skip",
        key: SigningKey | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`when_busy`: what a save does while the one before is being written."""
        if when_busy not in ("skip", "wait"):
            raise ConfigError(f"when_busy={when_busy!r}: give 'skip' or 'wait'.")
        require_key(key)
        self._waits = when_busy == "wait"
        self._key = key
        self._group = process_group
        self._timeout_s = timeout_s
        self._copy: HostCopy | None = HostCopy()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="raysharded-save", initializer=step_back)
        self._last: PendingSave | None = None

    def prepare(self, state: Any) -> int:
        """Makes the buffer for states like this one, so that the first save is as quick as the others; its bytes.

        For optimizers that have not stepped it has room for what they will have; they stay as they are.
        """
        self._open_copy()
        with later_form(state) as form:
            return self._open_copy().make_room(tree.flatten(form).tensors)

    def save(
        self,
        uri: Uri,
        state: Any,
        *,
        step: int = 0,
        run: str = "",
        metadata: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> PendingSave:
        """As `save`, but returns when the state has been copied; from then on it may change.

        While the save before is being written on rank 0, this one is skipped with a warning on all ranks, or waits for
        it. Raises CheckpointError for a state that cannot be stored; what fails later is in the log, and is raised by
        `result`.
        """
        began = time.monotonic()
        coordinator = Coordinator.of(self._group, self._timeout_s)
        with ExitStack() as guard:
            guard.enter_context(coordinator.guarded())
            self._open_copy()
            target, about = Target.of(uri, self._key), About.of(step, run, metadata, metrics, data)
            pending = PendingSave(target.uri, step)
            if self._last is not None and not self._last.done:
                if not pending._begin(self._waits or _agrees(coordinator, begins=False)):
                    pending._ended.set_result(None)
                    return pending
                self._last._wait()
            flat = tree.flatten(saved_form(state))
            content = Content(self._open_copy().take(flat.tensors), flat.tree)
            rest = guard.pop_all()

        def finish() -> Saved | None:
            time.sleep(_HEAD_START_S)
            with rest:
                if pending._begun.done() or pending._begin(self._waits or _agrees(coordinator, begins=True)):
                    return replace(write(content, target, about, coordinator), seconds=time.monotonic() - began)
            return None

        self._last = pending
        self._pool.submit(pending._run, finish)
        return pending

    def close(self) -> None:
        """Waits until the last save has ended, and frees the buffer. What a save raised is not raised here."""
        self._pool.shutdown()
        self._copy = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_copy(self) -> HostCopy:
        if self._copy is None:
            raise CheckpointError("this AsyncSaver is closed: it saves no more. Make another one.")
        return self._copy


def _agrees(coordinator: Coordinator, *, begins: bool) -> bool:
    """Whether a save begins, as rank 0 has it. The others' word does not count: they are done about when it is."""
    agreed: bool = coordinator.scatter([begins] * coordinator.world_size)
    return agreed
