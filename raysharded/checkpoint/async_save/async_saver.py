"""Background saves: copy the state into host memory, and write it to storage in a thread.

Training waits only for one copy of this rank's shards. All saves share one host buffer, so only one save runs at a
time.
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
"""Seconds before the thread first takes the GIL, in favour of training and of the other ranks' copies."""


class AsyncSaver:
    """Save one state repeatedly while training continues.

    Threads may share a saver: their calls run one after the other. On a process group every rank has a saver, and all
    ranks make the same calls in the same order. Rank 0's `when_busy` decides. At program exit Python waits for the save
    that is being written. The exit status is 120 if the saver's last save failed and no `result` has raised its error,
    unless a saver that was made later has saved since. In a forked child a saver begins without saves.
    """

    def __init__(
        self,
        *,
        when_busy: Literal["skip", "wait"] = "skip",
        key: SigningKey | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`when_busy`: action of a save while the previous one is being written."""
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
        self._number = process_exit.add_saver(self, AsyncSaver._renew)

    def prepare(self, state: Any) -> int:
        """Allocate the buffer for states like this one; its bytes. The first save is then as fast as later ones.

        The buffer also fits the later state of optimizers that have not stepped. The optimizers do not change.
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
        """Save the state as `save` does, but return once it is copied. It may change from then on.

        If the previous save is still being written on rank 0, this one is skipped with a warning on all ranks, or
        waits. Raises CheckpointError for a state that cannot be stored. Later failures are logged, and raised by
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
                process_exit.begun(outcome, self._number)
                self._pool.submit(outcome.run, finish)
            except BaseException as error:
                outcome.abandon(error)
                with rest:
                    raise
        return pending

    def close(self) -> None:
        """Wait until the last save has ended, and free the buffer. Errors of saves are not raised here."""
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
        """Reset the saver in a forked child, which has neither the parent's threads nor its saves."""
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
    """True if the save begins. Rank 0 decides.

    The other ranks' arguments are ignored: their previous saves end at about the same time as rank 0's.
    """
    agreed: bool = coordinator.scatter([begins] * coordinator.world_size)
    return agreed
