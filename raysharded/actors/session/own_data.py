"""Microbatches that a session's function reads itself, in place of the trainer's data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from raysharded.actors.process import environment
from raysharded.actors.task_calls.task_errors import line_here
from raysharded.data.sources import own_microbatches
from raysharded.data.streams.numbered_microbatches import MicrobatchFunction, MicrobatchNumbers, MicrobatchStreams
from raysharded.data.streams.own_microbatches import OwnMicrobatches
from raysharded.errors import TaskError
from raysharded.protocol.job import Job

Collate = Callable[[list[Any]], Any]


class OwnData:
    """The loader that a session has been given. Thread of the function only."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.loader: OwnMicrobatches | None = None
        """None until one is given."""

    @property
    def with_states(self) -> OwnMicrobatches | None:
        """The loader, if it has states that go back with the step."""
        return self.loader if self.loader is not None and self.loader.has_states else None

    def streams(self, make: Callable[[int, int], Any]) -> None:
        """As `Session.streams`."""
        batch = self._job.batch
        self._read(MicrobatchStreams(make, batch.num_microbatches, batch.seed), "session.streams")

    def reads(self, read: Callable[[int, int], Any]) -> None:
        """As `Session.reads`."""
        self._read(MicrobatchFunction(read, self._job.batch.num_microbatches), "session.reads")

    def _read(self, source: MicrobatchStreams | MicrobatchFunction, call: str) -> None:
        job = self._job
        if self.loader is not None:
            raise TaskError(f"{line_here()}: {call} is called once, and either streams or a function are read.")
        if not isinstance(job.data, MicrobatchNumbers):
            raise TaskError(f"{line_here()}: {call} takes the place of the trainer's data: leave data= out there.")
        engine = replace(job.engine, compile=False)  # the process that reads compiles nothing
        settings = functools.partial(environment.prepare_torch, engine, job.num_threads, use_gpu=False)
        self.loader = own_microbatches(source, job.batch, job.engine, job.max_steps, settings, job.read_patience_s)
        self.loader.check()

    def collate(self, given: Collate | None) -> Collate | None:
        """The function that makes a batch of samples. Raises TaskError if there are no data, or a batch needs none."""
        if self.loader is None:
            if isinstance(self._job.data, MicrobatchNumbers):
                raise TaskError(
                    f"{line_here()}: the trainer has no data=. Give it a dataset; or call session.streams(make), or "
                    "session.reads(read), ahead of session.shard."
                )
            return given
        if given is not None:
            raise TaskError(
                f"{line_here()}: collate= has no samples to join: what the session reads are whole batches."
            )
        return _the_only


def _the_only(samples: Sequence[Any]) -> Any:
    (batch,) = samples
    return batch
