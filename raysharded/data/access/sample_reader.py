"""Reading of samples by their ids, with the user's errors explained and the process's generators seeded.

A user's dataset may draw from them, though it should not. Each microbatch begins at a seed of its number. Therefore
`torch.manual_seed(index)` in `__getitem__`, and draws that do not show in a sample, behave alike at every size. A
sample that shows a draw is rejected in exact mode: it would differ in each epoch.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raysharded.data.access import generators
from raysharded.data.access.collation import Rows, Wish
from raysharded.data.access.read_errors import explaining, read_again, task_error
from raysharded.data.access.reader import Draws, HasWeights, Reads, ReadsAhead
from raysharded.data.access.repeat_check import differ
from raysharded.data.ledger import ReadRecorder
from raysharded.data.mixtures.schedule import position_of
from raysharded.data.order import Int64s
from raysharded.errors import ConfigError, DataError, InexactError, RayshardedError, is_ctrl_c
from raysharded.ids import derive_seed
from raysharded.overrides import WeightChanges

if TYPE_CHECKING:
    from raysharded.data.dataset import Dataset

_LOOKED_AT = 8
"""Number of samples that move a generator and are read twice; after these, only those numbered 16, 32, 64, ..."""
_CHECK_S = 1.0


@dataclass(frozen=True, slots=True)
class _Looked:
    """One reading of a sample, and its effects on the process's generators."""

    sample: Any
    moved: list[str]
    after: generators.Marks


class DatasetReader:
    """A `Reader` in this process."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        lock: threading.Lock | None = None,
        draws: Draws | None = None,
        note: Callable[[int], object] = lambda _: None,
    ) -> None:
        """`lock`: the lock of another reader whose dataset may share objects with this one.

        `draws`: None for a dataset that is known to draw nothing. `note`: called with each sample's id before it is
        read.
        """
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"{type(dataset).__name__} is not a map-style dataset. Give one with __len__() and __getitem__(index)."
            )
        self.name = type(dataset).__name__
        self.lock = lock or threading.Lock()
        """Held by the thread that reads the dataset."""
        self._dataset, self._draws, self._note = dataset, draws, note
        self._closing, self._weighing = threading.Event(), threading.Lock()
        self._changed: tuple[WeightChanges, Dataset] | None = None
        """Changed weights, and the mixture with them."""
        self._moves = 0
        """Number of samples that moved a generator. After the first, the generators are seeded for each sample."""

    def num_samples(self) -> int:
        with self.lock, self._explaining("__len__()"):
            length = len(self._dataset)
        if length < 1:
            raise DataError(f"{self.name} has no samples. Give data with at least 1.")
        return length

    def is_read_anywhere(self) -> bool:
        """False for data that are read in their order, which go back to a place in many reads."""
        return not _limit_of(self._dataset)

    def samples_per_block(self) -> int:
        with self.lock, self._explaining("samples_per_block"):
            if isinstance(digest := getattr(self._dataset, "order_digest", None), int):
                return -digest
            found = getattr(self._dataset, "samples_per_block", 1)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1 or found & (found - 1):
            raise ConfigError(f"{self.name}.samples_per_block={found!r}: give a power of two, or leave it out.")
        return found

    def order_text(self) -> str:
        with self.lock, self._explaining("order_text"):
            found = getattr(self._dataset, "order_text", "")
        return found if isinstance(found, str) else ""

    def contents(self) -> str:
        with self.lock, self._explaining("contents_digest"):
            found = [getattr(self._dataset, name, "") for name in ("contents_digest", "stores_digest")]
        contents, stores = (one if isinstance(one, str) else "" for one in found)
        return f"{contents}+{stores}" if stores else contents

    def require_position(self, position: int, weights: WeightChanges) -> None:
        with self.lock, self._explaining("__len__()"):
            dataset = self._weighted(weights)
            if isinstance(dataset, HasWeights):
                dataset.counts(position + 1)

    def _explaining(self, what: str) -> AbstractContextManager[None]:
        return explaining(f"{self.name}.{what}", "at the start")

    def read_samples(
        self, ids: Sequence[int], where: str, number: int, weights: WeightChanges = (), wish: Wish | None = None
    ) -> Reads:
        dataset = self._weighted(weights)
        with self.lock:
            if self._draws is None:
                return self._read_rows(dataset, ids, where) or self._read(dataset, ids, where)
            with self._kept():
                return self._read_settled(dataset, ids, where, number, self._draws)

    def _weighted(self, weights: WeightChanges) -> Dataset:
        """The dataset; a mixture with changed weights."""
        if not weights or not isinstance(self._dataset, HasWeights):
            return self._dataset
        with self._weighing:
            if self._changed is None or self._changed[0] != weights:
                changes = [(position, dict(given)) for _, position, given in weights]
                self._changed = weights, self._dataset.with_changes(changes)
            return self._changed[1]

    def check(self, ids: Sequence[int], below: int = 0) -> None:
        if limit := _limit_of(self._dataset):
            ids = [index % limit for index in ids]
        with self.lock, self._kept():
            ids = list(dict.fromkeys([ids[0], *self._of_each_source(below), *ids[1:]]))
            self._sample(self._dataset, ids[0], "at the start")  # a first read may set things up; later ones only read
            began, first = time.monotonic(), []
            for index in ids:
                first.append(self._looked_at(index, 0))
                if time.monotonic() - began > _CHECK_S / 2:
                    break
            for index, before in reversed(list(zip(ids, first, strict=False))):  # later, and after another one
                self._compare(index, before, self._looked_at(index, 1))

    def _of_each_source(self, below: int) -> list[int]:
        """The position of the first sample of each source of a mixture, if it is below this one."""
        if not isinstance(self._dataset, HasWeights):
            return []
        end = min(below, len(self._dataset))
        began, found = time.monotonic(), []
        for name, number in self._dataset.counts(end).items():
            if number:
                found.append(position_of(self._dataset, name, 0, end))
            if time.monotonic() - began > _CHECK_S / 2:  # hundreds of sources
                break
        return found

    def validate(self) -> None:
        with self.lock:
            validate = getattr(self._dataset, "validate", None)
            if callable(validate):
                validate()

    def num_read_ahead(self) -> int:
        return self._dataset.num_read_ahead if isinstance(self._dataset, ReadsAhead) else 0

    def read_ahead(self, ids: Int64s, *, anew: bool, weights: WeightChanges) -> None:
        dataset = self._weighted(weights)
        if isinstance(dataset, ReadsAhead) and not self._closing.is_set():
            dataset.read_ahead(ids, anew=anew)

    def close(self) -> None:
        self._closing.set()
        if isinstance(self._dataset, ReadsAhead):
            self._dataset.close()

    def _kept(self) -> contextlib.AbstractContextManager[None]:
        return generators.kept() if self._draws is not None and self._draws.puts_back else contextlib.nullcontext()

    def _read_rows(self, dataset: Dataset, ids: Sequence[int], where: str) -> Reads | None:
        """The samples of data that give them as the rows of one array; None for other data."""
        recorder = ReadRecorder(dataset)
        rows = self._attempt(lambda: recorder.read_rows(ids), where, ids)
        return None if rows is None else Reads(Rows(rows), recorder.ids.tolist())

    def _read(self, dataset: Dataset, ids: Sequence[int], where: str) -> Reads:
        recorder = ReadRecorder(dataset)
        return Reads([self._sample(recorder, index, where) for index in ids], recorder.ids.tolist())

    def _read_settled(self, dataset: Dataset, ids: Sequence[int], where: str, number: int, draws: Draws) -> Reads:
        if not self._moves:
            before = _settle(number)
            reads = self._read(dataset, ids, where)
            if not draws.refuses or not generators.moved(before, generators.marks()):
                return reads
        recorder = ReadRecorder(dataset)
        return Reads(
            [
                self._settled_sample(dataset, recorder, index, where, derive_seed(number, place))
                for place, index in enumerate(ids)
            ],
            recorder.ids.tolist(),
        )

    def _settled_sample(self, dataset: Dataset, recorder: ReadRecorder, index: int, where: str, number: int) -> Any:
        before = _settle(number)
        sample = self._sample(recorder, index, where)
        moved = generators.moved(before, generators.marks())
        if moved:
            self._moves += 1
            if self._moves <= _LOOKED_AT or self._moves & (self._moves - 1) == 0:
                _settle(derive_seed(number, "again"))
                if differ(sample, self._sample(dataset, index, where)):
                    raise self._drawn(dataset, moved[0], index, where)
        return sample

    def _looked_at(self, index: int, number: int) -> _Looked:
        before = _settle(number)
        sample = self._sample(self._dataset, index, "at the start")
        after = generators.marks()
        return _Looked(sample, [] if self._draws is None else generators.moved(before, after), after)

    def _compare(self, index: int, one: _Looked, other: _Looked) -> None:
        drawn = [name for name in one.moved if name in other.moved and one.after[name] != other.after[name]]
        if drawn:  # a generator that the dataset seeds would be in the same state both times
            raise self._drawn(self._dataset, drawn[0], index, "at the start")
        if differ(one.sample, other.sample):
            raise InexactError(
                f"{self.name}[{index}]{_of_source(self._dataset, index)} gave other values when it was read a second "
                "time: the same index must give the same sample every time. Look for the clock, for a generator that "
                "is made once and not seeded for each sample, and for what reading changes. Draw from a generator that "
                "is made in __getitem__ and seeded with the index; or waive identical bits with "
                'EngineConfig(reduction="fast").'
            )

    def _drawn(self, dataset: Dataset, generator: str, index: int, where: str) -> InexactError:
        return InexactError(
            f"{self.name}.__getitem__ draws from {generator}'s global generator, for sample {index}"
            f"{_of_source(dataset, index)} {where}: it would give another sample each time. Draw from a separate "
            "generator, seeded with the sample's index, or seed that one with it; or waive identical bits with "
            'EngineConfig(reduction="fast").'
        )

    def _sample(self, dataset: Dataset, index: int, where: str) -> Any:  # the user's dataset may return anything
        self._note(index)
        return self._attempt(lambda: dataset[index], where, index)

    def _attempt(self, read: Callable[[], Any], where: str, index: int | Sequence[int]) -> Any:
        """The result of a read of a sample, or of several."""
        if self._closing.is_set():
            raise RuntimeError("this loader is closed")
        try:
            return read_again(read, lambda: f"{self.name}[{index}] {where}")
        except RayshardedError:
            raise
        except BaseException as error:  # the boundary to the user's code, which may call sys.exit()
            if is_ctrl_c(error):
                raise
            raise task_error(f"{self.name}[{index}]", where, error, self._hint(error)) from error

    def _hint(self, error: BaseException) -> str:
        """Further advice for the user. It begins with a space unless it is empty."""
        if not isinstance(error, KeyError) or not isinstance(self._dataset, Mapping) or not self._dataset:
            return ""
        keys = ", ".join(repr(key) for key in list(self._dataset)[:4])
        return f" A {self.name} of {keys} is not a dataset: give one of them, [{next(iter(self._dataset))!r}]."


def _settle(number: int) -> generators.Marks:
    generators.seed(number)
    return generators.marks()


def _limit_of(dataset: Dataset) -> int:
    """Samples that a check may read, of data that are not read at any place; 0: all."""
    limit = getattr(dataset, "num_checked", None)
    return limit if isinstance(limit, int) and limit > 0 else 0


def _of_source(dataset: Dataset, position: int) -> str:
    """The source and the sample at a position of a mixture, in words that begin with a comma; else empty."""
    if not isinstance(dataset, HasWeights):
        return ""
    name, index = dataset.origin(position)
    return f", sample {index} of source {name!r},"
