"""Processes that read a worker's data: several at once, reads that hang or fail, batches that are made there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raysharded.actors.step.collation import Collator, is_equal
from raysharded.config import BatchConfig, EngineConfig
from raysharded.data import MicrobatchLoader, Stream
from raysharded.data.access.collation import Collation, Wish, collate_here
from raysharded.data.access.read_errors import read_again
from raysharded.data.access.reader import Reads
from raysharded.data.access.reader_process import CollatingReader, DataProcess, DataProcesses, ProcessReader
from raysharded.data.access.sample_reader import DatasetReader
from raysharded.data.access.started_process import CannotLeave
from raysharded.data.access.transport import packed
from raysharded.data.sources import Sources
from raysharded.errors import ConfigError, InexactError, TaskError
from raysharded.task import Task
from tests.cases import tried_each_time
from tests.data.samples import Large, OnceEach, Restarting, Slow, Together, Unlike, leave_torch_alone
from tests.forked import readers_as_in_a_worker as readers_as_in_a_worker

pytestmark = [pytest.mark.procs, pytest.mark.usefixtures("readers_as_in_a_worker")]
BATCH = BatchConfig(global_batch_size=6, microbatch_size=2, seed=1)


def pad(samples: list[Any]) -> Any:
    """A batch whose tensors have unusual strides, small and large, and draws."""
    rows = torch.stack([torch.as_tensor(sample.pop("values")) for sample in samples]).double()
    return {
        "rows": rows,
        "columns": rows.t(),
        "drawn": torch.rand(3) + np.random.random(),
        "pixels": torch.rand(2, 3, 40, 40).to(memory_format=torch.channels_last),
        "one": torch.rand(1, 1, 3, 3).to(memory_format=torch.channels_last),
        "same": [rows[0]] * 2,
        "wide": rows[:, ::2],
        "names": [sample["name"] for sample in samples],
    }


def cannot_leave(samples: list[Any]) -> Any:
    return lambda: samples


def only_here(samples: list[Any]) -> Any:
    raise RuntimeError("this process has no tokenizer")


def processes_of(data: Any, number: int = 1, **settings: Any) -> DataProcesses:
    first = DataProcess([data], refuses=True, settings=leave_torch_alone, **settings)
    return DataProcesses(first, number)


def wait_until_read(loader: MicrobatchLoader, number: int) -> None:
    deadline = time.monotonic() + 60
    while len(vars(loader)["_prefetcher"]._ready) < number:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def padding() -> Iterator[ProcessReader]:
    process = DataProcess([Large(9000)], refuses=True, settings=leave_torch_alone, collate=packed(pad))
    yield ProcessReader(process, 0, "Large")
    process.close()


def test_a_read_that_hangs_fails_or_dies_is_named_and_done_again_with_the_same_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = OnceEach(tmp_path)
    process = DataProcess([data], refuses=True, settings=leave_torch_alone, patience_s=2.0)
    reader = ProcessReader(process, 0, "OnceEach")
    try:
        assert reader.read_samples([0], "now", 0).samples[0]["number"] == 0  # the first one may take any time
        pids = [process.pid]
        for index in (3, 4, 5, 6):
            (sample,) = reader.read_samples([index], "in step 9", 0).samples
            assert sample["number"] == index
            assert sample["values"].tolist() == [index] * 3
            pids.append(process.pid)
    finally:
        process.close()
    assert (len(set(pids[:3])), len(set(pids[2:]))) == (3, 1), "what hangs is replaced, what fails is read again"
    hanging, killed = caplog.messages
    assert "did not answer for 2." in hanging
    assert "at OnceEach[3], in samples.py:" in hanging
    assert "in __getitem__, and was killed" in hanging
    assert "was ended by SIGKILL (out of memory?) at OnceEach[4]" in killed


def test_a_process_that_hangs_in_its_first_read_is_replaced_if_another_one_has_read(tmp_path: Path) -> None:
    first = DataProcess([OnceEach(tmp_path)], refuses=True, settings=leave_torch_alone, patience_s=2.0)
    processes = [first, first.another()]
    one, other = (ProcessReader(process, 0, "OnceEach") for process in processes)
    with ThreadPoolExecutor(1) as caller:
        try:
            one.read_samples([0], "now", 0)
            pid = processes[1].pid
            (sample,) = caller.submit(other.read_samples, [3], "now", 0).result(60).samples
            assert sample["number"] == 3
            assert processes[1].pid != pid
        finally:
            for process in processes:
                process.close()


def test_a_stream_that_catches_up_is_not_taken_for_a_hang_and_one_that_hangs_meanwhile_is(tmp_path: Path) -> None:
    data = Stream(Slow(tmp_path, hangs_at=130))
    process = DataProcess([data], refuses=True, settings=leave_torch_alone, patience_s=1.0)
    reader = ProcessReader(process, 0, "Stream")
    try:
        assert reader.read_samples([0], "now", 0).samples == [0]
        vars(process)["_started"].start_s = 0.0  # it may have started slowly, which makes the limit longer
        pid, began = process.pid, time.monotonic()
        assert reader.read_samples([119], "now", 0).samples == [119]
        assert time.monotonic() - began > 2.0
        assert process.pid == pid
        assert vars(process)["_longest"].seconds < 1.0, "a way to a place is no measure for a read"
        assert reader.read_samples([135], "now", 0).samples == [135]
        assert process.pid != pid
    finally:
        process.close()


def test_a_read_that_fails_is_logged_and_done_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, caplog_level = OnceEach(tmp_path), logging.WARNING
    with caplog.at_level(caplog_level, "raysharded.data"):
        DatasetReader(data).read_samples([5, 6], "in step 2, microbatch 1", 0)
    assert [message.partition(" raised")[0] for message in caplog.messages] == [
        "OnceEach[5] in step 2, microbatch 1",
        "OnceEach[5] in step 2, microbatch 1",
        "OnceEach[6] in step 2, microbatch 1",
    ]
    assert "OSError: [Errno 5] Input/output error: 'shard-7.tar'; it is read again" in caplog.messages[0]


@pytest.mark.parametrize(
    ("error", "pauses"),
    [(OSError(5, "I/O"), [0.1, 1.0]), (ConnectionResetError(), [0.1, 1.0]), (FileNotFoundError(2, "x"), [0.0])],
)
def test_what_cannot_be_read_is_tried_two_or_three_times(error: Exception, pauses: list[float]) -> None:
    slept: list[float] = []

    def read() -> None:
        raise error

    with pytest.raises(type(error)):
        read_again(read, lambda: "it", slept.append)
    assert slept == pauses


def test_a_process_that_dies_at_a_sample_again_is_an_error_that_names_it(tmp_path: Path) -> None:
    processes = processes_of(Unlike(tmp_path))
    try:
        with pytest.raises(TaskError, match=r"both times at read_samples\(.*\) at Unlike\[1\]\."):
            ProcessReader(processes, 0, "Unlike").read_samples([0, 1], "now", 0)
    finally:
        processes.close()


def test_several_processes_read_at_once_and_give_the_samples_of_one(tmp_path: Path) -> None:
    data, number = Together(tmp_path, 3), 3
    processes = processes_of(data, number)
    reader = ProcessReader(processes, 0, "Together")
    several = MicrobatchLoader(reader, BATCH, prefetch=True, num_threads=number)
    plain = MicrobatchLoader(Large(3), BATCH)
    keys = [(step, index) for step in range(1, 6) for index in range(3)]
    try:
        several.plan(keys)
        found = [several.load(*key) for key in keys]
    finally:
        several.close()
    for microbatch, expected in zip(found, (plain.load(*key) for key in keys), strict=True):
        assert microbatch.digest == expected.digest
        assert [sample["number"] for sample in microbatch.samples] == microbatch.ids.tolist()
    assert len({sample["pid"] for microbatch in found for sample in microbatch.samples}) == number
    assert all(pid is not None for pid in processes.pids)


def test_a_batch_of_the_process_has_the_bits_strides_and_draws_of_one_that_is_made_here(padding: ProcessReader) -> None:
    for number, keeps_samples in ((5, True), (6, False)):
        reads = padding.read_samples([3, 4], "now", 0, (), Wish(number, keeps_samples=keeps_samples))
        assert reads.batch is not None
        assert len(reads.samples) == (2 if keeps_samples else 0)
        assert reads.ids == [3, 4]
        here = collate_here(pad, [Large(9000)[index] for index in (3, 4)], number).value
        assert is_equal(here, reads.batch.value)
        other = {**here, "pixels": here["pixels"].contiguous()}
        assert not is_equal(other, reads.batch.value), "strides count"
        first, second = reads.batch.value["same"]
        assert first is second
    assert padding.read_samples([3], "now", 0).batch is None


@pytest.mark.parametrize("collate", tried_each_time([cannot_leave], [cannot_leave, only_here]))
def test_what_cannot_be_made_there_leaves_the_samples_and_is_not_asked_for_again(collate: Any, tmp_path: Path) -> None:
    processes = processes_of(Large(3), collate=packed(collate))
    reader, collation = ProcessReader(processes, 0, "Large"), Collation(seed=1)
    loader = MicrobatchLoader(reader, BATCH, prefetch=True, collation=collation)
    try:
        loader.plan([(1, 0), (1, 1)])
        wait_until_read(loader, 2)
        microbatch = loader.load(1, 0)
        assert microbatch.batch is None
        assert len(microbatch.samples) == 2
        assert collation.is_refused
        assert collation.wish(2, 0) is None
    finally:
        loader.close()


def test_samples_that_are_read_here_are_collated_in_processes() -> None:
    reader = DatasetReader([{"values": np.full(3, index), "name": str(index)} for index in range(50)])
    processes = processes_of(None, 2, collate=packed(pad))
    loader = MicrobatchLoader(
        CollatingReader(reader, processes), BATCH, prefetch=True, num_threads=2, collation=Collation(BATCH.seed)
    )
    try:
        loader.plan([(1, 0), (1, 1), (1, 2)])
        wait_until_read(loader, 3)
        for index in range(3):
            microbatch = loader.load(1, index)
            assert microbatch.batch.value["names"] == [str(number) for number in microbatch.ids]
        assert loader.load(2, 0).batch is None, "what was not announced is not collated"
    finally:
        loader.close()


class Locked:
    """A sample that cannot be pickled."""

    def __init__(self, index: int) -> None:
        self.index, self.lock = index, threading.Lock()


def count_of(samples: list[Any]) -> int:
    return len(samples)


def test_samples_that_cannot_be_pickled_are_left_to_the_training_thread() -> None:
    reader, processes = (
        DatasetReader([Locked(index) for index in range(50)]),
        processes_of(None, collate=packed(count_of)),
    )
    collation = Collation(BATCH.seed)
    loader = MicrobatchLoader(CollatingReader(reader, processes), BATCH, prefetch=True, collation=collation)
    try:
        loader.plan([(1, 0)])
        wait_until_read(loader, 1)
        taken = loader.load(1, 0)
        assert [sample.index for sample in taken.samples] == taken.ids.tolist()
        assert taken.batch is None
        assert collation.is_refused
    finally:
        loader.close()


def strides_of(samples: list[Any]) -> Any:
    return [tuple(sample.stride()) for sample in samples], torch.stack(samples)


def test_a_request_that_cannot_be_pickled_loses_no_memory_that_is_free_again() -> None:
    process = DataProcess([Large(30_000)], refuses=True, settings=leave_torch_alone, collate=packed(strides_of))
    try:
        process.ask("read_samples", 0, [1, 2], "now", 0)
        for _ in range(3):
            with pytest.raises(CannotLeave, match=r"cannot pickle '_thread\.lock'"):
                process.ask("collate", [Locked(1)], [1], Wish(1, keeps_samples=True))
            process.ask("read_samples", 0, [1, 2], "now", 0)
        assert len(vars(process)["_started"].receiver._segments) == 1, "the free one is used each time"
        wide = torch.arange(60_000.0).view(200, 300).t()
        reads = process.ask("collate", [wide, wide], [1, 2], Wish(1, keeps_samples=True))
        assert reads.batch.value[0] == [(1, 300)] * 2, "samples come with their strides"
        assert torch.equal(reads.batch.value[1][0], wide)
    finally:
        process.close()


def test_the_number_of_processes_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"data_processes=0: give a whole number of 1 or more, or None"):
        EngineConfig(data_processes=0)
    with pytest.raises(ConfigError, match="data_processes needs prefetch=True"):
        EngineConfig(data_processes=2, prefetch=False)


def test_a_stream_is_read_by_one_process_in_its_order() -> None:
    engine = EngineConfig(data_processes=3)
    for data, pids in ((Stream(Restarting()), 1), (Large(3), 3)):
        sources = Sources(data, None, BATCH, engine, leave_torch_alone)
        try:
            assert isinstance(sources.process, DataProcess if pids == 1 else DataProcesses)
            assert vars(sources.training)["_prefetcher"]._num_threads == pids
        finally:
            sources.close()
    own = Sources([1, 2, 3], None, BATCH, engine, leave_torch_alone)
    assert own.process is None
    own.close()


class Stateful:
    """A function that makes batches, with a number that it adds, and a count of its calls."""

    def __init__(self) -> None:
        self.added = self.calls = 0

    def __call__(self, samples: list[Any]) -> torch.Tensor:
        self.calls += 1
        return torch.tensor([sample["number"] + self.added for sample in samples])


def stepped(function: Stateful, steps: range, change: Callable[[int], None], **engine: Any) -> list[bool]:
    """Whether the batch of each step was made where the samples are read."""
    settings = EngineConfig(**engine)
    sources = Sources(Large(3), None, BATCH, settings, leave_torch_alone, collate=function)
    task = Task()
    task.collate = function
    loader, is_exact = sources.training, settings.reduction == "exact"
    made = Collator(task, torch.device("cpu"), 1, loader.collation, lambda *_: None, is_exact=is_exact)
    found = []
    try:
        for step in steps:
            loader.plan([(step, 0)])
            if loader.collation is not None:
                wait_until_read(loader, 1)
            taken = loader.load(step, 0)
            batch = made.training_batch(taken)
            assert taken.batch is not None or (batch - torch.as_tensor(taken.ids) == function.added).all()
            found.append(taken.batch is not None)
            change(step)
    finally:
        sources.close()
    return found


def test_a_collate_that_depends_on_what_has_changed_is_refused_in_a_watched_step() -> None:
    def made_ahead(**engine: Any) -> list[bool]:
        function = Stateful()
        return stepped(function, range(1, 12), lambda step: setattr(function, "added", int(step >= 4)), **engine)

    with pytest.raises(InexactError, match=r"Task\.collate makes another batch in step 8 than the process that reads"):
        made_ahead()
    assert not any(made_ahead(prefetch=False))
    assert made_ahead(reduction="fast") == [True] * 8 + [False] * 3, "from then on the training thread makes them"


@pytest.mark.long  # the test above has a function that counts, too
def test_a_collate_may_count_its_calls() -> None:
    function = Stateful()
    assert all(stepped(function, range(1, 10), lambda _: None))
    assert 0 < function.calls < 9


def test_the_first_batch_of_a_generation_and_one_of_each_watched_step_are_compared() -> None:
    collation = Collation(seed=1)
    collation.judge(is_equal=True)

    def compared(*keys: tuple[int, int]) -> list[tuple[int, int]]:
        wishes = {key: collation.wish(*key) for key in keys}
        return [key for key, wish in wishes.items() if wish is not None and wish.keeps_samples]

    assert compared((6, 0), (6, 1), (7, 0), (8, 0), (8, 1), (9, 0)) == [(6, 0), (8, 0)]
    assert [compared((8, 0), (8, 1)) for _ in range(2)] == [[(8, 0)]] * 2, "also if it is read again"
    collation.restart()
    assert compared((9, 1), (9, 2), (16, 3)) == [(9, 1), (16, 3)]


def test_a_collation_is_proved_once_and_refused_for_good() -> None:
    collation = Collation(seed=1)
    assert collation.wish(1, 0) == Wish(collation.wish(1, 0).number, keeps_samples=True)  # type: ignore[union-attr]
    collation.judge(is_equal=True)
    wish = collation.wish(1, 1)
    assert wish is not None
    assert not wish.keeps_samples
    assert not collation.judge(is_equal=False), "a batch may have been used that is another one"
    assert collation.wish(1, 0) is None
    assert "another one" in collation.reason
    assert Reads([], []).batch is None
