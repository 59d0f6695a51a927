"""A `collate` that changes its samples in place: allowed for samples of one read, refused for the dataset's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import raysharded as rs
from raysharded.actors.step.collation import Collator
from raysharded.config import BatchConfig, EngineConfig
from raysharded.data import MicrobatchLoader, Stream
from raysharded.data.access.sample_changes import are_changed, copies_before
from raysharded.data.sources import Sources
from raysharded.errors import InexactError
from tests.cases import tried_each_time
from tests.data.samples import Restarting, leave_torch_alone
from tests.forked import readers_as_in_a_worker as readers_as_in_a_worker

BATCH = BatchConfig(global_batch_size=4, microbatch_size=2, seed=1)
CPU = torch.device("cpu")
IN_PLACE = r"\.collate changes its samples in place, and the dataset has them in its memory"


class Rows:
    """Samples in its memory, or copies of them."""

    def __init__(self, *, copies: bool) -> None:
        self.rows = [torch.arange(10) + 10 * index for index in range(16)]
        self.copies = copies

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"ids": self.rows[index].clone() if self.copies else self.rows[index]}


def masked_in_place(samples: list[Any]) -> torch.Tensor:
    for sample in samples:
        sample["ids"][torch.rand(10) < 0.15] = 103
    return torch.stack([sample["ids"] for sample in samples])


def doubled_in_place(samples: list[Any]) -> torch.Tensor:
    return torch.stack([sample["ids"].mul_(2) for sample in samples])


def doubled(samples: list[Any]) -> torch.Tensor:
    return torch.stack([sample["ids"] * 2 for sample in samples])


def padded_to(length: int, samples: list[Any]) -> torch.Tensor:
    for sample in samples:
        sample["ids"] += [0] * (length - len(sample["ids"]))
    return torch.tensor([sample["ids"] for sample in samples])


def padded_to_nine(samples: list[Any]) -> torch.Tensor:
    return padded_to(9, samples)


def padded_to_longest(samples: list[Any]) -> torch.Tensor:
    return padded_to(max(len(sample["ids"]) for sample in samples), samples)


def lists() -> list[Any]:
    return [{"ids": list(range(1, 2 + index % 7))} for index in range(16)]


def collator(loader: MicrobatchLoader, collate: Any, *, is_exact: bool = True) -> Collator:
    task = rs.Task()
    task.collate = collate
    again = loader.samples_again if loader.lends_memory else None
    return Collator(task, CPU, BATCH.seed, loader.collation, lambda *_: None, is_exact=is_exact, again=again)


def batches(data: Any, collate: Any, *, steps: int = 9, is_exact: bool = True) -> list[torch.Tensor]:
    """The batches of data that the training thread reads, and collates."""
    loader = MicrobatchLoader(data, BATCH)
    made = collator(loader, collate, is_exact=is_exact)
    keys = [(step, index) for step in range(1, steps + 1) for index in range(2)]
    return [made.training_batch(loader.load(*key)).clone() for key in keys]


@pytest.mark.parametrize("collate", [masked_in_place, doubled_in_place])
def test_a_change_in_place_of_the_datasets_own_memory_is_refused_by_name(collate: Any) -> None:
    with pytest.raises(InexactError, match=r"^Task" + IN_PLACE):
        batches(Rows(copies=False), collate, steps=2)
    with pytest.raises(InexactError, match=IN_PLACE):
        batches([{"ids": torch.arange(10)} for _ in range(16)], collate, steps=2)
    batches(Rows(copies=False), collate, is_exact=False)


def test_samples_of_one_read_may_be_changed_in_place() -> None:
    fresh = Rows(copies=True)
    for found, expected in zip(batches(fresh, doubled_in_place), batches(fresh, doubled), strict=True):
        assert torch.equal(found, expected)
    batches(fresh, masked_in_place)


def test_a_change_in_place_that_changes_no_later_batch_is_none() -> None:
    found = batches(lists(), padded_to_nine)
    assert {tuple(batch.shape) for batch in found} == {(2, 9)}
    with pytest.raises(InexactError, match=IN_PLACE):
        batches(lists(), padded_to_longest)


def test_samples_that_padding_collates_again_are_not_taken_for_the_datasets_memory() -> None:
    loader = MicrobatchLoader(Rows(copies=True), BATCH)
    made, taken = collator(loader, doubled_in_place), loader.load(1, 0)
    for _ in range(3):
        made.training_batch(taken, is_padding=True)
    assert torch.equal(made.training_batch(loader.load(1, 0)), doubled(loader.load(1, 0).samples))


def test_a_change_in_place_of_held_out_samples_is_refused() -> None:
    def collate_twice(*, copies: bool) -> None:
        loader = MicrobatchLoader(Rows(copies=copies), BATCH)
        made = collator(loader, doubled_in_place)
        for step in (100, 200):
            made.held_out_batch(loader.load_range(0, 2), [0, 1], step, 0, lambda: loader.load_range(0, 2))

    collate_twice(copies=True)
    with pytest.raises(InexactError, match=IN_PLACE):
        collate_twice(copies=False)


def test_data_that_are_read_in_their_order_are_not_read_again() -> None:
    assert MicrobatchLoader(Rows(copies=False), BATCH).lends_memory
    assert not MicrobatchLoader(Stream(Restarting()), BATCH).lends_memory


@pytest.fixture
def opened(readers_as_in_a_worker: None) -> Iterator[Callable[..., tuple[MicrobatchLoader, Collator]]]:
    """A function that opens data, with a `collate` that is called where they are read."""
    found: list[Sources] = []

    def open_(data: Any, collate: Any, **engine: Any) -> tuple[MicrobatchLoader, Collator]:
        settings = EngineConfig(**engine)
        found.append(Sources(data, None, BATCH, settings, leave_torch_alone, collate=collate, patience_s=60.0))
        found[-1].training.skip((), 2, (1, 4))
        return found[-1].training, collator(found[-1].training, collate, is_exact=settings.reduction == "exact")

    yield open_
    for sources in found:
        sources.close()


def read_ahead(opened: tuple[MicrobatchLoader, Collator], steps: range) -> list[tuple[torch.Tensor, bool]]:
    """The batches, and whether each was made where the samples are read."""
    (loader, made), found = opened, []
    for step in steps:
        for index in range(2):
            loader.plan([(step, index)])
            deadline = time.monotonic() + 60
            while not vars(loader)["_prefetcher"]._ready:
                assert time.monotonic() < deadline
                time.sleep(0.002)
            taken = loader.load(step, index)
            found.append((made.training_batch(taken), taken.batch is not None))
    return found


@pytest.mark.procs
@pytest.mark.parametrize("engine", tried_each_time([{}], [{}, {"data_processes": 2}]))
def test_the_process_that_reads_finds_changes_in_place_too(opened: Any, engine: dict[str, Any]) -> None:
    with pytest.raises(InexactError, match=IN_PLACE):
        read_ahead(opened(Rows(copies=False), masked_in_place, **engine), range(1, 2))


@pytest.mark.procs
def test_batches_of_samples_of_one_read_are_the_same_wherever_they_are_made(opened: Any) -> None:
    found = read_ahead(opened(Rows(copies=True), doubled_in_place), range(1, 6))
    assert all(is_ahead for _, is_ahead in found)
    for (batch, _), expected in zip(found, batches(Rows(copies=True), doubled, steps=5), strict=True):
        assert torch.equal(batch, expected), "also the first one, which is made at both places"


@pytest.mark.procs
def test_lists_that_processes_collate_may_not_be_changed_in_place_either(opened: Any) -> None:
    with pytest.raises(InexactError, match=IN_PLACE):
        read_ahead(opened(lists(), padded_to_longest, data_processes=2), range(1, 3))
    read_ahead(opened(lists(), padded_to_nine), range(1, 3))


@dataclass
class Pair:
    ids: torch.Tensor
    of: Any = None


class Named(NamedTuple):
    ids: np.ndarray[Any, Any]


class Plain:
    def __init__(self) -> None:
        self.ids, self.inner = [1, 2], Pair(torch.zeros(2))


def test_copies_are_of_containers_arrays_and_attributes_and_other_objects_stay() -> None:
    shared = torch.zeros(3)
    pair = Pair(shared)
    pair.of = pair
    samples: list[Any] = [{"a": shared, "b": [shared, 1.5]}, pair, Named(np.zeros(2)), Plain(), (b"x", None)]
    copies = copies_before(samples)
    assert not are_changed(copies, samples)
    assert copies[0]["a"] is copies[0]["b"][0]
    assert copies[3].inner is samples[3].inner
    shared += 1
    assert [are_changed([one], [other]) for one, other in zip(copies, samples, strict=True)] == [True, True] + [
        False
    ] * 3
    samples[2].ids[0] = 1
    samples[3].ids.append(3)
    assert are_changed(copies[2:3], samples[2:3])
    assert are_changed(copies[3:4], samples[3:4])
