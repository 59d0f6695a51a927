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

from raysharded.display.plain_text import masked
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
    "set_mixture_weights",
    "rewind",
    "reshard",
    "remark",
    "fork",
]
"""Requests to a run; `raysharded.run.control.RunControl` answers them."""
_FOLLOW_S = 5.0
_ENTRIES_COMPARED = 4096
"""Number of entries since the newest step that a follower compares with the journal."""
_RECORDED = ("recording", "event")
"""Kinds of entries that only a journal has."""
ENTRIES_OF_ONE = 1 << 40
"""Entry numbers reserved for one driver actor's process: the next one's are above them."""
_BEGIN_S = 0.2
"""Interval at which a start is checked."""


class Follower:
    """New entries of a run for one reader: each step once, and none that an earlier driver has written left out.

    A driver that takes over records steps again that the one before had reported and not yet written to the journal.
    Entries that the one before had written, and this reader had not fetched, are read from the journal.
    """

    def __init__(self, run: Run, after: int = 0) -> None:
        """`after`: number of the entry to begin after."""
        self._run, self._after, self._seen = run, after, Seen()
        self._since: int | None = None
        """Number of the last entry of the driver before, until the next one's first entry is there."""
        self._held: list[Entry] = []
        """Entries of the next driver meanwhile."""

    def next(self, timeout_s: float) -> list[Entry]:
        """The entries since the last call; waits up to `timeout_s` for the first."""
        new = self._run.entries(self._after, timeout_s)
        if not new:
            return []
        if self._since is None and self._after and self._run.is_restarted(self._after, new[0][0]):
            self._since = self._after
        self._after = new[-1][0]
        if self._since is None:
            return self._seen.of(new)
        self._held += new
        return self.rest() if any(kind == "started" for _, kind, _ in self._held) else []

    def rest(self) -> list[Entry]:
        """The entries that were held back. Call it also when the run is over."""
        if self._since is None:
            return []
        missed = self._seen.missed(self._run.newest_entries(), self._held, self._since)
        held, self._held, self._since = self._held, [], None
        return self._seen.of([*missed, *held])


class Seen:
    """Entries that one reader has seen. A generation's steps only grow."""

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
        """Entries that earlier drivers have written and the reader has not seen, numbered from `after` on.

        `journal`: its newest entries. `new`: the first entries of another driver. Empty if nothing that was seen is in
        the journal.
        """
        theirs = {_contents(kind, fields) for _, kind, fields in new}
        start = next((_contents(kind, fields) for _, kind, fields in new if kind == "started"), None)
        written = [(str(entry["kind"]), {k: v for k, v in entry.items() if k != "kind"}) for entry in journal]
        contents = [_contents(*entry) for entry in written]
        ends = next((at for at, one in enumerate(contents) if one == start), len(written))
        known = {*self._since, *theirs}
        if self._last is not None:
            seen = [at for at, entry in enumerate(written[:ends]) if _step_of(*entry) == self._last]
        else:
            seen = [at for at, one in enumerate(contents[:ends]) if one in self._since]
        if not seen:
            return []
        found = [
            entry
            for entry, one in zip(written[seen[-1] + 1 : ends], contents[seen[-1] + 1 :], strict=False)
            if entry[0] not in _RECORDED and one not in known
        ]
        return [(after + 1 + index, kind, fields) for index, (kind, fields) in enumerate(found)]

    def _is_new(self, kind: str, fields: Mapping[str, Any]) -> bool:
        if kind != "step":
            if kind not in _RECORDED:
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
    """An entry as the journal has it, without its time, which differs between a journal and a driver's memory."""
    from raysharded.journal.log import plain

    told = {name: value for name, value in fields.items() if name != "at"}
    return f"{kind} {json.dumps(plain(told), sort_keys=True, default=str)}"


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

        Each step of a generation comes once, also if another driver takes over: see `Follower`.
        """
        follower = Follower(self, after)
        while True:
            over = self.is_over()
            new = follower.next(0.0 if over else _FOLLOW_S) or (follower.rest() if over else [])
            if new:
                yield new
            elif over:
                return

    def is_restarted(self, after: int, number: int) -> bool:
        """Whether entry `number` is of a later driver than entry `after`, which may have written more since."""
        return False

    def newest_entries(self) -> list[dict[str, Any]]:
        """The newest entries of the journal on storage, oldest first; empty if it does not answer."""
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

    def set_mixture_weights(self, weights: Mapping[str, float]) -> None:
        """Read the sources of the run's `Mixture` with these weights, from the next step boundary on.

        Sources that are left out have none. The weights hold until the next position of the mixture's own list, if it
        has one. They are part of the run: a sample that is read again comes from the same source.
        """
        require(isinstance(weights, Mapping), f"Run.set_mixture_weights: weights={weights!r}: give a dict by source.")
        self._ask("set_mixture_weights", weights=dict(weights))

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
        return f"<{type(self).__name__} {self.name!r} at {masked(self.url)}>"
