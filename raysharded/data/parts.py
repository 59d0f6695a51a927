"""A dataset in two parts: one to train on, and one that is held out.

Runs of consecutive samples are held out, evenly spread over the data. A run is a block of samples that are read
together, or a part of one, so that there are 1,024 runs or more. With whole blocks the part to train on has the blocks
of the data, and reading it costs no more. The samples of both parts follow from the length of the data, their blocks
and the share alone.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from raysharded.data.dataset import Dataset, TokenDataset
from raysharded.data.order import Int64s, sample_ids
from raysharded.errors import ConfigError, DataError

Which = Literal["training", "held_out"]
_LEAST_RUNS = 1024
_SPREAD_RUNS = 64
"""Runs that the first held-out samples are taken from in turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The samples of both parts. Pure.

    Laws: the ids of the part `training`, and those of `held_out`, are together `arange(num_samples)`, each once.
    """

    num_samples: int
    run: int
    """Samples of a run, a power of two."""
    held_runs: Int64s = field(repr=False)
    """Numbers of the runs that are held out, ascending."""

    @classmethod
    def of(cls, num_samples: int, samples_per_block: int, share: float) -> Layout:
        """At least one run is held out. Raises DataError if none is left to train on."""
        most = max(1, num_samples // _LEAST_RUNS)
        run = min(samples_per_block, 1 << (most.bit_length() - 1))
        number = num_samples // run
        held = max(1, round(share * number))
        if held >= number:
            raise DataError(
                f"the data have {num_samples} samples: too few to hold out a share of {share:g} and to train on the "
                "others. Give more data, or a smaller held_out."
            )
        places = np.arange(held, dtype=np.int64)
        return cls(num_samples=num_samples, run=run, held_runs=(2 * places + 1) * number // (2 * held))

    @property
    def num_held_out(self) -> int:
        return len(self.held_runs) * self.run

    def training(self, indexes: Int64s) -> Int64s:
        """The ids of the samples to train on, in their order."""
        runs, places = np.divmod(indexes, self.run)
        gaps = self.held_runs - np.arange(len(self.held_runs))
        before = np.searchsorted(gaps, runs, side="right")
        found: Int64s = (runs + before) * self.run + places
        return found

    def held_out(self, indexes: Int64s) -> Int64s:
        """The ids of the held-out samples. The first ones are of up to 64 runs in turn, from all over the data."""
        number = len(self.held_runs)
        order = sample_ids(0, np.arange(number, dtype=np.int64), number)
        groups, within = np.divmod(indexes, _SPREAD_RUNS * self.run)
        sizes = np.minimum(number - groups * _SPREAD_RUNS, _SPREAD_RUNS)
        places, turns = np.divmod(within, sizes)
        found: Int64s = self.held_runs[order[groups * _SPREAD_RUNS + turns]] * self.run + places
        return found


class DatasetPart:
    """The samples of a dataset that are trained on, or those that are held out.

    The part to train on reads ahead as the dataset does, and has its blocks. Any thread may read it, if that holds for
    the dataset. A dataset that both parts share is read and cached once.
    """

    def __init__(self, dataset: Dataset, which: Which, *, held_out: float = 0.01) -> None:
        """`held_out`: the share of the samples that are held out, above 0 and below 1. Raises ConfigError; reads
        nothing."""
        if which not in get_args(Which):
            raise ConfigError(f"DatasetPart.which={which!r}: choose one of {', '.join(map(repr, get_args(Which)))}.")
        if not isinstance(held_out, int | float) or isinstance(held_out, bool) or not 0 < held_out < 1:
            raise ConfigError(f"DatasetPart.held_out={held_out!r}: give a number above 0 and below 1.")
        self.dataset, self.which, self.share = dataset, which, float(held_out)
        self._layout: Layout | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"DatasetPart({self.dataset!r}, {self.which!r}, held_out={self.share:g})"

    @property
    def seq_len(self) -> int | None:
        """Tokens of a sample; None if the dataset does not have any."""
        return getattr(self.dataset, "seq_len", None)

    @property
    def samples_per_block(self) -> int:
        """That of the dataset; 1 for held-out samples, which are read in turn from many blocks."""
        return _per_block(self.dataset) if self.which == "training" else 1

    @property
    def contents_digest(self) -> str:
        """Digest of what decides the samples of the part."""
        layout = self._opened()
        about = [self.which, layout.num_samples, layout.run, len(layout.held_runs)]
        return blake3(json.dumps([*about, str(getattr(self.dataset, "contents_digest", ""))]).encode()).hexdigest()

    @property
    def stores_digest(self) -> str:
        """That of the dataset; empty if it has none."""
        return str(getattr(self.dataset, "stores_digest", ""))

    def __len__(self) -> int:
        layout = self._opened()
        return layout.num_held_out if self.which == "held_out" else layout.num_samples - layout.num_held_out

    def __getitem__(self, index: int, /) -> Any:
        """Sample `index` of the part. Raises IndexError outside [0, len), and what the dataset raises."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self!r}")
        return self.dataset[int(self.ids(np.asarray([index]))[0])]

    def read_rows(self, indexes: Sequence[int]) -> npt.NDArray[np.int64] | None:
        """These samples of the part, as `TokenDataset.read_rows`; None for other datasets."""
        dataset, length = self.dataset, len(self)
        if type(self) is not DatasetPart or not isinstance(dataset, TokenDataset):
            return None
        if not all(0 <= index < length for index in indexes):
            return None
        return dataset.read_rows(self.ids(np.asarray(indexes, dtype=np.int64)).tolist())

    def ids(self, indexes: npt.NDArray[np.int64]) -> Int64s:
        """The ids of the part's samples in the dataset; same shape."""
        layout = self._opened()
        return layout.training(indexes) if self.which == "training" else layout.held_out(indexes)

    @property
    def num_read_ahead(self) -> int:
        """Number of samples that `read_ahead` is worth; 0: it does nothing."""
        found: int = getattr(self.dataset, "num_read_ahead", 0) if self.which == "training" else 0
        return found

    def read_ahead(self, ids: Int64s, *, anew: bool = False) -> None:
        """Begin to read these samples of the part to train on, as the dataset does."""
        if self.num_read_ahead and callable(announce := getattr(self.dataset, "read_ahead", None)):
            announce(self.ids(ids), anew=anew)

    def close(self) -> None:
        """End the threads of the dataset, if it reads ahead."""
        if callable(getattr(self.dataset, "read_ahead", None)) and callable(
            end := getattr(self.dataset, "close", None)
        ):
            end()

    def validate(self) -> None:
        """Check the dataset, and that both parts have samples. Raises DataError."""
        if callable(check := getattr(self.dataset, "validate", None)):
            check()
        self._opened()

    def require_local_files(self) -> None:
        """Raise DataError if the dataset has a path of this machine without data."""
        if callable(require := getattr(self.dataset, "require_local_files", None)):
            require()

    def _opened(self) -> Layout:
        with self._lock:
            if self._layout is None:
                if hasattr(self.dataset, "order_digest"):
                    raise ConfigError(
                        f"{self!r}: a {type(self.dataset).__name__} decides the order of its samples. Hold out a part "
                        "of the data that it reads."
                    )
                self._layout = Layout.of(len(self.dataset), _per_block(self.dataset), self.share)
            return self._layout

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_layout", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _layout=None, _lock=threading.Lock())


def split(dataset: Dataset, *, held_out: float = 0.01) -> tuple[DatasetPart, DatasetPart]:
    """(Samples to train on, held-out samples) of a map-style dataset.

    `held_out`: the share that is held out, in runs of consecutive samples, evenly spread over the data. The parts
    follow from the length of the data and their blocks alone. So they are the same in every process and after every
    restart. A document at the border of a run may be in both. Raises ConfigError; reads nothing.
    """
    return DatasetPart(dataset, "training", held_out=held_out), DatasetPart(dataset, "held_out", held_out=held_out)


def whole(data: Any) -> Any:
    """The dataset of a part; other data as they are."""
    while type(data) is DatasetPart:
        data = data.dataset
    return data


def _per_block(dataset: Dataset) -> int:
    return int(getattr(dataset, "samples_per_block", 1))
