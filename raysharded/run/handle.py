"""The handle on a run: the same methods wherever the run is driven, in this process or in an actor of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal

from raysharded.run.results import Entry, Result, Status, WrittenCheckpoint
from raysharded.validation import is_int, require, require_number

if TYPE_CHECKING:
    from raysharded.report import RunReport

Ask = Literal[
    "pause",
    "resume",
    "resize",
    "drain",
    "checkpoint",
    "stop",
    "set_learning_rate",
    "rewind",
    "reshard",
    "remark",
    "fork",
]
"""What can be asked of a run; `raysharded.run.control.RunControl` answers."""
_FOLLOW_S = 5.0


class Run(ABC):
    """A handle on a run: `ElasticTrainer.start()` and `raysharded.attach()` give one. Any thread.

    What changes a run is written to its journal before it takes effect. All of these methods raise RunFailed if the run
    is over, ConfigError, in one sentence, for what it cannot have, and ClusterError if its driver cannot be reached.
    """

    name: str
    url: str
    """The run's folder: its checkpoints and its journal."""

    # -- what each kind of handle has of its own --

    @abstractmethod
    def status(self) -> Status:
        """Where the run stands now."""

    @abstractmethod
    def entries(self, after: int = 0, timeout_s: float = 0.0) -> list[Entry]:
        """Journal entries as (number, kind, fields), oldest first: those with a higher number than `after`.

        Waits up to `timeout_s` for the first; at most 2,000 at once. A driver keeps its newest 20,000: who comes later
        gets those, and finds the others in the journal. Numbers only grow, and have gaps where another driver began.
        """

    @abstractmethod
    def is_over(self) -> bool:
        """Whether the run has ended, in whatever way: `wait` returns, or raises, at once."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> Result:
        """The result, when the run is over; raises what it failed with, or TimeoutError."""

    @abstractmethod
    def _ask(self, what: Ask, **arguments: Any) -> Any:
        """Have the run's driver do something, and return what `RunControl` does."""

    # -- what is seen --

    def follow(self, after: int = 0) -> Iterator[list[Entry]]:
        """Journal entries as they are made, in batches as `entries` gives them, until the run is over."""
        while True:
            over = self.is_over()
            new = self.entries(after, 0.0 if over else _FOLLOW_S)
            if new:
                after = new[-1][0]
                yield new
            elif over:
                return

    def metrics(self) -> Any:  # pyarrow's Table; it has no annotations
        """One row per step, by the journal as far as it is written: `step`, `at`, `loss`, and what was measured, as
        `raysharded.report.load_metrics` has it."""
        from raysharded.checkpoint import open_storage
        from raysharded.report.loader import metrics_of

        return metrics_of(open_storage(self.url))

    def report(self) -> RunReport:
        """Everything the journal knows, as far as it is written."""
        from raysharded.report import load

        return load(self.url)

    # -- what is asked for --

    def pause(self) -> None:
        """Stop at the next step boundary; the workers keep what they hold. A run that is paused already stays so."""
        self._ask("pause")

    def resume(self) -> None:
        """End a pause: the run goes on from its workers' memory. Nothing is computed again."""
        self._ask("resume")

    def resize(self, workers: int) -> None:
        """Have so many workers from the next step boundary on, within `ScalingConfig.num_workers`. Nothing is computed
        again; workers that are too many hand over what they hold, and leave."""
        require(is_int(workers) and workers >= 1, f"Run.resize: workers={workers!r}: give a whole number of 1 or more.")
        self._ask("resize", workers=workers)

    def drain(self, node: str, *, within_s: float = 300.0) -> None:
        """Have all workers of a node (its Ray id, or its host name) leave it within so many seconds, and start none
        there."""
        require_number("Run.drain", "within_s", within_s, 0.0)
        self._ask("drain", node=node, within_s=within_s)

    def set_learning_rate(self, factor: float) -> None:
        """From the next step boundary on every learning rate is the task's times `factor`; 1.0 undoes what was asked
        for before. It is part of the run: what is computed again uses the same factor for the same step."""
        require_number("Run.set_learning_rate", "factor", factor, 0.0)
        self._ask("set_learning_rate", factor=float(factor))

    def rewind(self, step: int, *, skip_data: bool = False) -> None:
        """Go back to the committed checkpoint of this step, and on from there; newer checkpoints are deleted. With
        `skip_data` the samples that were read since are passed over, or else they are read again."""
        require(is_int(step) and step >= 0, f"Run.rewind: step={step!r}: give a whole number of 0 or more.")
        self._ask("rewind", step=step, skip_data=skip_data)

    def checkpoint(self, timeout_s: float | None = None) -> WrittenCheckpoint:
        """Have a checkpoint written of the next step, and return when it is committed. Any thread but a listener's.

        One that is being written comes first. Raises CheckpointError if it cannot be written, RunFailed if the run
        ends before, TimeoutError after `timeout_s`: it may be committed all the same.
        """
        written: WrittenCheckpoint = self._ask("checkpoint", timeout_s=timeout_s)
        return written

    def reshard(
        self, shard_group_size: int | EllipsisType | None = ..., *, tensor_parallel_degree: int | None = None
    ) -> None:
        """Have the workers form shard groups of this size, or one flat group (None), and tensor parallel groups of this
        degree, from the next step boundary on: by the choice that is made after a loss, too. What is not given stays as
        it was asked for last. It is on record before it takes effect.

        Raises ConfigError for a size or a degree that the run's number of workers cannot have, or for a degree in which
        its state cannot be cut, or its task does not say how.
        """
        given: dict[str, Any] = {}
        if not isinstance(shard_group_size, EllipsisType):
            given["shard_group_size"] = shard_group_size
        if tensor_parallel_degree is not None:
            given["tensor_parallel_degree"] = tensor_parallel_degree
        self._ask("reshard", given=given)

    def stop(self, *, checkpoint: bool = False, within_s: float | None = None) -> None:
        """End the run; `wait` then raises RunFailed. Started again, it resumes. Does nothing if the run is over.

        It ends now, without a checkpoint; or with `checkpoint=True` after one more, and after `within_s` (by default
        as long as it takes) without. Said again, it ends at once.
        """
        self._ask("stop", checkpoint=checkpoint, within_s=within_s)

    def fork(self, name: str, step: int | None = None, *, storage_path: str | None = None) -> Run:
        """Start the same trainer as another run, which begins with this run's committed checkpoint of `step` (None: the
        newest), under `storage_path` (None: where this run is). Returns its handle; this run goes on.

        Raises CheckpointError if there is no such checkpoint, or the other run has checkpoints already.
        """
        forked: Run = self._ask("fork", name=name, step=step, storage_path=storage_path)
        return forked

    def remark(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Write an entry to the run's journal, while it goes on; lost if the run is over."""
        self._ask("remark", kind=kind, fields=dict(fields))

    def _repr_html_(self) -> str:
        """What a notebook shows of it."""
        from raysharded.checkpoint import open_storage
        from raysharded.report.loader import summary_of
        from raysharded.report.notebook import run_html

        return run_html(self.status(), summary_of(open_storage(self.url)))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} at {self.url}>"
