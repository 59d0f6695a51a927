"""Training and evaluation data of a run as one worker reads them, possibly in another process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from raysharded.config import BatchConfig, EngineConfig, EvalConfig
from raysharded.data.access.collation import Collation
from raysharded.data.access.reader import Draws
from raysharded.data.access.reader_process import CollatingReader, DataProcess, DataProcesses, ProcessReader
from raysharded.data.access.sample_reader import DatasetReader
from raysharded.data.access.transport import packed
from raysharded.data.dataset import TokenDataset
from raysharded.data.loader import MicrobatchLoader
from raysharded.data.mixtures.mixture import Mixture
from raysharded.data.packed.packed_dataset import PackedDataset
from raysharded.data.parts import whole
from raysharded.data.streams.numbered_microbatches import MicrobatchFunction, MicrobatchNumbers, MicrobatchStreams
from raysharded.data.streams.own_microbatches import OwnMicrobatches
from raysharded.data.streams.stream import Stream
from raysharded.display.quantities import count
from raysharded.errors import ConfigError
from raysharded.ids import derive_seed

_CHECKED = 2
"""Number of samples, besides the first, that are read twice at the start."""


class Sources:
    """Data that a worker reads. The loaders read one at a time.

    The library's own data, and lists, arrays and tensors, draw nothing, and are read in a thread. Other data are read
    in a separate process, or, without prefetching, in the training thread.
    """

    def __init__(
        self,
        data: Any,
        evaluation: EvalConfig | None,
        batch: BatchConfig,
        engine: EngineConfig,
        settings: Callable[[], object],
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        collates_later: bool = False,
        patience_s: float | None = None,
    ) -> None:
        """`settings`: called in the process of the data once torch is loaded there. `collate`: the task's own.
        `collates_later`: `collate_by` may be called. `patience_s`: as of `DataProcess`."""
        self._evaluation, self._batch, self._prefetches = evaluation, batch, engine.prefetch
        self.collates_later = collates_later
        self._exact = engine.reduction == "exact"
        held_out = None if evaluation is None else evaluation.data
        self._reads_strangers = not all(_draws_nothing(one) for one in (data, held_out))
        self.process: DataProcess | DataProcesses | None = None
        """Process that reads the data; None: this process does."""
        number = 1 if isinstance(data, Stream) else engine.data_processes or 1  # a stream is read in its order
        pickled = b"" if collate is None or not engine.prefetch else _packed(collate)
        beside = self._reads_strangers or engine.data_processes is not None
        collation = Collation(batch.seed) if pickled and beside else None
        self._collating: DataProcesses | None = None
        """Processes that collate what this one reads."""
        may_collate = collation is not None or (collates_later and engine.prefetch and beside)

        def started(*datasets: Any) -> DataProcess:
            return DataProcess(datasets, refuses=self._exact, settings=settings, collate=pickled, patience_s=patience_s)

        self._reader: DatasetReader | ProcessReader | CollatingReader
        self._held_out: DatasetReader | ProcessReader | None = None
        name, held_out_name = type(data).__name__, type(held_out).__name__
        own = DatasetReader(data, draws=self._draws())
        if self._reads_strangers and engine.prefetch:
            self.process = started(data, held_out)
            if number > 1:
                self.process = DataProcesses(self.process, number)
            self._reader = ProcessReader(self.process, 0, name)
            if held_out is not None:
                self._held_out = ProcessReader(self.process, 1, held_out_name)
        else:
            self._reader = own
            if may_collate:
                self._collating = DataProcesses(started(), number)
                self._reader = CollatingReader(own, self._collating)
            if held_out is not None:
                self._held_out = DatasetReader(held_out, lock=own.lock, draws=self._draws())
        num_threads = 1 if self._reader is own else number
        self.training = MicrobatchLoader(
            self._reader, batch, prefetch=engine.prefetch, num_threads=num_threads, collation=collation
        )
        self.held_out = (
            None if self._held_out is None else MicrobatchLoader(self._held_out, batch, prefetch=engine.prefetch)
        )

    def _draws(self) -> Draws | None:
        return Draws(refuses=self._exact, puts_back=True) if self._reads_strangers else None

    def collate_by(self, collate: Callable[[list[Any]], Any] | None) -> None:
        """Make batches by this function in the process that reads the samples, if there is one. Before any is read."""
        process = self.process or self._collating
        if process is None or collate is None or not self._prefetches:
            return
        if pickled := _packed(collate):
            process.collate_by(pickled)
            self.training.collation = Collation(self._batch.seed)

    def check(self) -> None:
        """Read some samples before others wait for this worker, to find errors early.

        In exact mode it also finds samples that differ from one read to the next.
        """
        self._reader.validate()
        ids = _checked_ids(self.training.num_samples, self._batch.seed)
        if self._exact and self._reads_strangers:
            self._reader.check(ids, self.training.num_samples)
        else:
            self._reader.read_samples([0], "at the start", 0)
        if self._held_out is not None and self._evaluation is not None and self.held_out is not None:
            held_out, wanted = self.held_out.num_samples, self._evaluation.num_samples
            if wanted > held_out:
                raise ConfigError(
                    f"EvalConfig.num_samples={wanted}: evaluation.data has {count(held_out, 'sample')}. Take "
                    f"num_samples={held_out} or less."
                )
            last = wanted - 1
            self.held_out.load_range(last, last + 1)
            if self._exact and self._reads_strangers:
                self._held_out.check([last], wanted)

    def stacks(self) -> str:
        """Stacks of the data's process while it reads, as `faulthandler` writes them; empty without a process."""
        return next((found.stacks() for found in (self.process, self._collating) if found is not None), "")

    def close(self) -> None:
        """End the readers. Thread-safe."""
        self.training.close()
        if self.held_out is not None:
            self.held_out.close()


def own_microbatches(
    source: MicrobatchStreams | MicrobatchFunction,
    batch: BatchConfig,
    engine: EngineConfig,
    max_steps: int,
    settings: Callable[[], object],
    patience_s: float | None = None,
) -> OwnMicrobatches:
    """The loader of microbatches that a session's function gives: read in a separate process, or, without
    prefetching, in the training thread. `settings`, `patience_s`: as for `Sources`.

    Draws are no error, as each microbatch is read with the generators seeded by its step and index.
    """
    reader: DatasetReader | ProcessReader
    if engine.prefetch:
        process = DataProcess([source], refuses=False, settings=settings, patience_s=patience_s)
        reader = ProcessReader(process, 0, type(source).__name__)
    else:
        reader = DatasetReader(source, draws=Draws(refuses=False, puts_back=True))
    return OwnMicrobatches(source, reader, batch, max_steps=max_steps, prefetch=engine.prefetch)


def held_out_loader(data: Any, batch: BatchConfig, engine: EngineConfig) -> MicrobatchLoader:
    """The loader of held-out data that are given while a run trains.

    The library's own data, and lists, arrays and tensors, are read ahead in a background thread (`engine.prefetch`),
    others in the calling thread. In exact mode some samples are read twice. Raises InexactError if they differ, and as
    `DatasetReader`.
    """
    if _draws_nothing(data):
        return MicrobatchLoader(data, batch, prefetch=engine.prefetch)
    is_exact = engine.reduction == "exact"
    reader = DatasetReader(data, draws=Draws(refuses=is_exact, puts_back=True))
    loader = MicrobatchLoader(reader, batch)
    if is_exact:
        reader.check(_checked_ids(loader.num_samples, batch.seed), loader.num_samples)
    return loader


def _checked_ids(num_samples: int, seed: int) -> list[int]:
    """The ids of samples that are read twice."""
    drawn = [derive_seed(seed, "read twice", number) % num_samples for number in range(_CHECKED)]
    return list(dict.fromkeys([0, *drawn]))


def vocabulary(data: Any) -> int | None:
    """Number of tokens in the vocabulary of token data, also of a mixture of them; None where it is not known."""
    data = whole(data)
    if type(data) is Mixture:
        return next(filter(None, map(vocabulary, data.sources.values())), None)
    return data.vocab_size if type(data) in (TokenDataset, PackedDataset) else None


def _packed(collate: Callable[[list[Any]], Any]) -> bytes:
    """The function's pickle; empty if it has none: then the training thread calls it."""
    try:
        return packed(collate)
    except Exception:  # noqa: BLE001 - the boundary to the user's classes
        return b""


def _draws_nothing(data: Any) -> bool:
    """True if reading it runs none of the user's code."""
    data = whole(data)
    if type(data) is Mixture:
        return all(_draws_nothing(source) for source in data.sources.values())
    torch = sys.modules.get("torch")
    own: tuple[type, ...] = (TokenDataset, PackedDataset, MicrobatchNumbers)
    kinds: tuple[type, ...] = (type(None), *own, list, tuple, range, np.ndarray, np.memmap)
    if torch is not None:
        kinds += (torch.Tensor, torch.utils.data.TensorDataset)
    return type(data) in kinds
