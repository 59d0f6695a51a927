"""The handle on a run: the same methods, whether this process or a driver actor drives the run."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal

from raysharded.errors import StorageError
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
"""Requests to a run; `raysharded.run.control.RunControl` answers them."""
_FOLLOW_S = 5.0
_ENTRIES_COMPARED = 4096
"""Number of entries since the newest step that a follower compares with the journal."""
_BEGIN_S = 0.2
"""Interval at which a start is checked."""


class StepsOnce:
    """The entries for one follower: each step once. A generation's steps only grow."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}
        """Generation -> its newest step seen."""
        self._last: tuple[int, int] | None = None
        """(generation, step) of the newest step seen."""
        self._since: deque[str] = deque(maxlen=_ENTRIES_COMPARED)
        """Contents of the entries seen since."""

    def of(self, entries: Sequence[Entry]) -> list[Entry]:
        """The entries, in order, without repeated steps. One that a later generation computes again is none."""
        return [entry for entry in entries if self._is_new(entry[1], entry[2])]

    def missed(self, journal: Sequence[Mapping[str, Any]], new: Sequence[Entry], after: int) -> list[Entry]:
        """Entries that earlier drivers have written and the follower has not seen, numbered from `after` on.

        `journal`: its newest entries. `new`: the first entries of another driver. Empty if the newest step that was
        seen is not in the journal.
        """
        start = next((_contents(kind, fields) for _, kind, fields in new if kind == "started"), "")
        written = [(str(entry["kind"]), {k: v for k, v in entry.items() if k != "kind"}) for entry in journal]
        begins = next((at for at, entry in enumerate(written) if _contents(*entry) == start), len(written))
        seen = [at for at, entry in enumerate(written[:begins]) if _step_of(*entry) == self._last]
        if not start or not seen or self._last is None:
            return []
        missed = [entry for entry in written[seen[-1] + 1 : begins] if _contents(*entry) not in self._since]
        return [(after + 1 + index, kind, fields) for index, (kind, fields) in enumerate(missed)]

    def _is_new(self, kind: str, fields: Mapping[str, Any]) -> bool:
        if kind != "step":
            self._since.append(_contents(kind, fields))
            return True
        generation, step = int(fields["generation"]), int(fields["step"])
        is_new = step > self._newest.get(generation, 0)
        if is_new:
            self._newest[generation] = step
            self._last = generation, step
            self._since.clear()
        return is_new


def _step_of(kind: str, fields: Mapping[str, Any]) -> tuple[int, int] | None:
    return (int(fields["generation"]), int(fields["step"])) if kind == "step" else None


def _contents(kind: str, fields: Mapping[str, Any]) -> str:
    """An entry without its time, which differs between a journal and a driver's memory."""
    told = {name: value for name, value in fields.items() if name != "at"}
    return f"{kind} {json.dumps(told, sort_keys=True, default=str)}"


class Run(ABC):
    """A handle on a run, from `ElasticTrainer.start()` or `raysharded.attach()`. Any thread.

    A change to a run is written to its journal before it takes effect. All of these methods raise RunFailed if the run
    is over, and ClusterError if its driver cannot be reached. A request that the run cannot fulfil raises ConfigError,
    with the reason in one sentence.
    """

    name: str
    url: str
    """The run's folder: its checkpoints and its journal."""

    # -- specific to each kind of handle --

    @abstractmethod
    def status(self) -> Status:
        """The run's status now."""

    @abstractmethod
    def entries(self, after: int = 0, timeout_s: float = 0.0) -> list[Entry]:
        """Journal entries with a number above `after`, as (number, kind, fields), oldest first.

        Waits up to `timeout_s` for the first; returns at most 2,000 at once. A driver keeps its newest 20,000; older
        ones are in the journal. Numbers only grow, and have gaps where another driver began.
        """

    @abstractmethod
    def is_over(self) -> bool:
        """Whether the run has ended, in any way: `wait` then returns, or raises, at once."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> Result:
        """The result, when the run is over. Raises the error that the run failed with, or TimeoutError.

        A run that was stopped raises RunStopped, whose `result` has what it reached.
        """

    def wait_until_begun(self, timeout_s: float | None = None) -> None:
        """Return when a driver leads the run: until then its start may be refused, for another batch size for example.

        Also returns if the run is finished already. Raises the error of a start that failed, or that the run ended with
        since, and TimeoutError.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not self.status().driver:
                if self.is_over():
                    self.wait()
                    return
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"run {self.name!r} has not begun after {timeout_s} s")
                time.sleep(_BEGIN_S)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"Interrupted. The start of run {self.name!r} continues: raysharded.attach({self.name!r}) returns its "
                "handle."
            ) from None

    @abstractmethod
    def _ask(self, what: Ask, **arguments: Any) -> Any:
        """Send a request to the run's driver, and return the result of `RunControl`."""

    # -- observation --

    def follow(self, after: int = 0) -> Iterator[list[Entry]]:
        """Journal entries as they are made, in batches as `entries` returns them, until the run is over.

        A driver that takes over records steps again that the one before had reported and not yet written to the
        journal. They are left out here: a step of a generation comes once. The journal has what the one before had
        written and this follower had not fetched.
        """
        steps = StepsOnce()
        while True:
            over = self.is_over()
            new = self.entries(after, 0.0 if over else _FOLLOW_S)
            if new:
                if after and new[0][0] > after + 1:  # it may be of another driver
                    new = [*steps.missed(self._newest_entries(), new, after), *new]
                after = new[-1][0]
                if left := steps.of(new):
                    yield left
            elif over:
                return

    def _newest_entries(self) -> list[dict[str, Any]]:
        """The newest entries on storage, oldest first; empty if it does not answer."""
        from raysharded.checkpoint import open_storage
        from raysharded.report.recent import RecentReader

        with suppress(StorageError):
            reader = RecentReader(open_storage(self.url))
            reader.read()
            return reader.entries()
        return []

    def metrics(self) -> Any:  # pyarrow's Table; it has no annotations
        """One row per step, from the journal as far as it is written: `step`, `at`, `loss` and measurements.

        The columns are those of `raysharded.report.load_metrics`.
        """
        from raysharded.checkpoint import open_storage
        from raysharded.report.loader import metrics_of

        return metrics_of(open_storage(self.url))

    def report(self) -> RunReport:
        """Report of the journal, as far as it is written."""
        from raysharded.report import load

        return load(self.url)

    # -- requests --

    def pause(self) -> None:
        """Stop at the next step boundary; the workers keep what they hold. No effect on a paused run."""
        self._ask("pause")

    def resume(self) -> None:
        """End a pause: the run continues from its workers' memory. No step is repeated."""
        self._ask("resume")

    def resize(self, workers: int) -> None:
        """Change the number of workers at the next step boundary, within `ScalingConfig.num_workers`.

        No step is repeated. Surplus workers hand over what they hold, and leave.
        """
        require(is_int(workers) and workers >= 1, f"Run.resize: workers={workers!r}: give a whole number of 1 or more.")
        self._ask("resize", workers=workers)

    def drain(self, node: str, *, within_s: float = 300.0) -> None:
        """Have all workers leave a node, given by Ray id or host name, within `within_s`, and start none there."""
        require_number("Run.drain", "within_s", within_s, 0.0)
        self._ask("drain", node=node, within_s=within_s)

    def set_learning_rate(self, factor: float) -> None:
        """Set every learning rate to the task's times `factor`, from the next step boundary on.

        1.0 undoes earlier requests. The factor is part of the run: a repeated step uses the same factor.
        """
        require_number("Run.set_learning_rate", "factor", factor, 0.0)
        self._ask("set_learning_rate", factor=float(factor))

    def rewind(self, step: int, *, skip_data: bool = False) -> None:
        """Go back to the committed checkpoint of this step, and continue from there; newer checkpoints are deleted.

        The samples read since are read again, or skipped with `skip_data`.
        """
        require(is_int(step) and step >= 0, f"Run.rewind: step={step!r}: give a whole number of 0 or more.")
        self._ask("rewind", step=step, skip_data=skip_data)

    def checkpoint(self, timeout_s: float | None = None) -> WrittenCheckpoint:
        """Have a checkpoint of the next step written, and return when it is committed. Any thread except a listener's.

        A checkpoint that is being written comes first. Raises CheckpointError if it cannot be written, and RunFailed if
        the run ends before. Raises TimeoutError after `timeout_s`; it may still be committed.
        """
        written: WrittenCheckpoint = self._ask("checkpoint", timeout_s=timeout_s)
        return written

    def reshard(
        self, shard_group_size: int | EllipsisType | None = ..., *, tensor_parallel_degree: int | None = None
    ) -> None:
        """Form shard groups of this size, or one flat group (None), and tensor parallel groups of this degree.

        The change happens at the next step boundary, and is recorded in the journal before. The mesh is chosen by the
        same rules as after a loss. An omitted argument keeps its last requested value.

        Raises ConfigError for a size or a degree that the run's number of workers does not allow. Also for a degree in
        which its state cannot be cut, or if its task does not define the cut.
        """
        given: dict[str, Any] = {}
        if not isinstance(shard_group_size, EllipsisType):
            given["shard_group_size"] = shard_group_size
        if tensor_parallel_degree is not None:
            given["tensor_parallel_degree"] = tensor_parallel_degree
        self._ask("reshard", given=given)

    def stop(self, *, checkpoint: bool = False, within_s: float | None = None) -> None:
        """End the run; `wait` then raises RunStopped. Started again, it resumes. No effect if the run is over.

        It ends now, without a checkpoint; or, with `checkpoint=True`, after one more checkpoint. After `within_s`
        (default: no limit) it ends without that checkpoint. A second request ends it at once.
        """
        self._ask("stop", checkpoint=checkpoint, within_s=within_s)

    def fork(self, name: str, step: int | None = None, *, storage_path: str | None = None) -> Run:
        """Start the same trainer as another run, which begins with this run's committed checkpoint of `step`.

        `step`: None for the newest; `storage_path`: None for this run's. Returns the new handle; this run continues.

        Raises CheckpointError if there is no such checkpoint, or if the other run already has checkpoints.
        """
        forked: Run = self._ask("fork", name=name, step=step, storage_path=storage_path)
        return forked

    def remark(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Write an entry to the journal of a live run; lost if the run is over."""
        self._ask("remark", kind=kind, fields=dict(fields))

    def _repr_html_(self) -> str:
        """The run as a notebook shows it."""
        from raysharded.checkpoint import open_storage
        from raysharded.report.loader import summary_of
        from raysharded.report.notebook import run_html

        return run_html(self.status(), summary_of(open_storage(self.url)))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} at {self.url}>"
