"""Saves beside training: the state is copied into host memory, and everything else happens in a thread.

Training stands still for one copy of this rank's shards. The buffer that they are copied to is made once, and used by
every save; so there is one save at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self

import torch.distributed as dist

from raysharded.checkpoint.async_save import process_exit
from raysharded.checkpoint.async_save.host_copy import HostCopy
from raysharded.checkpoint.async_save.pending_save import PendingSave, SaveOutcome, outcome_of
from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.sharded_io.checkpoint_uri import Uri, require_key
from raysharded.checkpoint.sharded_io.coordinator import TIMEOUT_S, Coordinator, require_timeout
from raysharded.checkpoint.sharded_io.save import About, Content, Saved, Target, write
from raysharded.checkpoint.state_dict import tree
from raysharded.checkpoint.state_dict.entries import later_form, saved_form
from raysharded.checkpoint.threads import Threads, step_back
from raysharded.errors import CheckpointError, ConfigError

_HEAD_START_S = 0.02
"""What training gets before the thread takes the interpreter's lock for the first time, and the other ranks' copies."""


class AsyncSaver:
    """Saves one state again and again, each time while training goes on. Threads may share it: they take turns.

    On a process group every rank has one, and all make the same calls, in the same order; `when_busy` is rank 0's.
    Python waits for the save that is being written when the program ends. If the last one failed, and no `result` has
    told the program so, its exit status is 120. In a forked child a saver has no saves yet.
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
        require_timeout(timeout_s)
        self._waits = when_busy == "wait"
        self._key = key
        self._group = process_group
        self._timeout_s = timeout_s
        self._copy: HostCopy | None = HostCopy()
        self._last: SaveOutcome | None = None
        self._start()
        process_exit.add_saver(self, AsyncSaver._renew)

    def prepare(self, state: Any) -> int:
        """Makes the buffer for states like this one, so that the first save is as quick as the others; its bytes.

        For optimizers that have not stepped it has room for what they will have; they stay as they are.
        """
        with self._lock, later_form(state) as form:
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
        overwrite: bool = False,
    ) -> PendingSave:
        """As `save`, but returns when the state has been copied; from then on it may change.

        While the save before is being written on rank 0, this one is skipped with a warning on all ranks, or waits for
        it. Raises CheckpointError for a state that cannot be stored; what fails later is in the log, and is raised by
        `result`.
        """
        began = time.monotonic()
        with self._lock, ExitStack() as guard:
            coordinator = Coordinator.of(self._group, self._timeout_s)
            guard.enter_context(coordinator.guarded())
            copy = self._open_copy()
            target = Target.of(uri, self._key, overwrite=overwrite)
            about = About.of(step, run, metadata, metrics, data)
            pending = PendingSave(target.uri, step)
            outcome = outcome_of(pending)
            if self._last is not None and not self._last.ended.done():
                if not outcome.begin(_agrees(coordinator, begins=self._waits)):
                    outcome.skip()
                    return pending
                self._last.wait()
            flat = tree.flatten(saved_form(state))
            content = Content(copy.take(flat.tensors), flat.tree)
            rest = guard.pop_all()

            def finish() -> Saved | None:
                time.sleep(_HEAD_START_S)
                with rest:
                    if outcome.begun.done() or outcome.begin(_agrees(coordinator, begins=True)):
                        return replace(write(content, target, about, coordinator), seconds=time.monotonic() - began)
                return None

            try:
                self._last = outcome
                process_exit.begun(outcome)
                self._pool.submit(outcome.run, finish)
            except BaseException as error:
                outcome.abandon(error)
                with rest:
                    raise
        return pending

    def close(self) -> None:
        """Waits until the last save has ended, and frees the buffer. What a save raised is not raised here."""
        with self._lock:
            self._pool.shutdown()
            self._copy = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _renew(self) -> None:
        """In a forked child: the parent's threads, and its saves, are not here."""
        self._last = None
        self._copy = None if self._copy is None else HostCopy()
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._pool = Threads(1, thread_name_prefix="raysharded-save", initializer=step_back)

    def _open_copy(self) -> HostCopy:
        if self._copy is None:
            raise CheckpointError("this AsyncSaver is closed: it saves no more. Make another one.")
        return self._copy


def _agrees(coordinator: Coordinator, *, begins: bool) -> bool:
    """Whether a save begins, as rank 0 has it. The others' word does not count: they are done about when it is."""
    agreed: bool = coordinator.scatter([begins] * coordinator.world_size)
    return agreed
