"""Readers of samples: what they are called with, what they return, and what a dataset may have for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from raysharded.data.access.collation import Batch, Wish
from raysharded.data.order import Int64s
from raysharded.overrides import WeightChanges

if TYPE_CHECKING:
    from raysharded.data.dataset import Dataset


@dataclass(frozen=True, slots=True)
class Reads:
    """Samples that were read."""

    samples: list[Any]
    """Empty if a batch was made of them elsewhere, and they were not requested."""
    ids: list[int]
    """Ids of the samples actually read, in order."""
    batch: Batch | None = None
    """The batch that was made of them where they were read; None if none was."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Treatment of the process's generators while samples are read."""

    refuses: bool
    """Whether to reject a dataset whose samples show its draws, as in exact mode."""
    puts_back: bool
    """Whether to restore the generators, where other code draws from them, too."""


@runtime_checkable
class ReadsAhead(Protocol):
    """A dataset that reads samples before they are used. Any thread may call it."""

    @property
    def num_read_ahead(self) -> int: ...

    def read_ahead(self, ids: Int64s, *, anew: bool) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class HasWeights(Protocol):
    """A mixture."""

    def with_changes(self, changes: Sequence[tuple[int, Mapping[str, float]]]) -> Dataset:
        """The mixture of the same sources with other weights from these positions on."""
        ...

    def counts(self, position: int) -> dict[str, int]:
        """Samples of each source below a position. Raises DataError if the mixture ends before it."""
        ...

    def origin(self, position: int) -> tuple[str, int]:
        """(Name of the source, id of the sample in it) at a position."""
        ...


@runtime_checkable
class Reader(Protocol):
    """Reader of one dataset, here or in another process. One call at a time reads."""

    name: str
    """Class name of the dataset."""

    def num_samples(self) -> int:
        """Length of the dataset. Raises DataError if it is empty, TaskError if its `__len__` fails."""
        ...

    def samples_per_block(self) -> int:
        """The dataset's `samples_per_block`, 1 if it has none, or minus its `order_digest`.

        Raises TaskError as `num_samples`, and ConfigError.
        """
        ...

    def order_text(self) -> str:
        """A mixture's `order_text`; empty for other datasets. Raises TaskError as `num_samples`."""
        ...

    def contents(self) -> str:
        """The dataset's `contents_digest`, then `+` and its `stores_digest`; without that, the first alone.

        Empty for a dataset that has neither. Raises TaskError as `num_samples`.
        """
        ...

    def require_position(self, position: int, weights: WeightChanges) -> None:
        """Raise DataError if a mixture, with these changed weights, ends before a position."""
        ...

    def read_samples(
        self, ids: Sequence[int], where: str, number: int, weights: WeightChanges = (), wish: Wish | None = None
    ) -> Reads:
        """The samples with these ids.

        `where`: the time of the read, for errors. `number`: seed for the generators, if they are seeded. `weights`: of
        a mixture, as they were changed while the run trained. `wish`: a batch that is made of them, if this reader
        makes batches.

        Raises TaskError with the user's traceback if the dataset fails, DataError for damaged files, InexactError for a
        sample that shows a draw, RuntimeError after `close`.
        """
        ...

    def check(self, ids: Sequence[int], below: int = 0) -> None:
        """Read the first id once, and each twice more; of a mixture also the first sample of each source.

        `below`: end of the positions of these first samples. Raises InexactError for differences. Takes at most about a
        second.
        """
        ...

    def validate(self) -> None:
        """Call the dataset's `validate()`, if it has one."""
        ...

    def num_read_ahead(self) -> int:
        """Number of samples whose ids `read_ahead` takes in advance; 0: the dataset reads nothing ahead."""
        ...

    def read_ahead(self, ids: Int64s, *, anew: bool, weights: WeightChanges) -> None:
        """Announce that these samples are read next. Does not wait. `anew`: what was announced before is void."""
        ...

    def close(self) -> None:
        """End after the sample that is being read. Thread-safe."""
        ...
