from __future__ import annotations

import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from raysharded.config import BatchConfig
from raysharded.data.access.prefetch import Prefetcher
from raysharded.data.access.reader import Draws
from raysharded.data.access.sample_reader import DatasetReader
from raysharded.data.ledger import ReadRecorder, StepReads, check, expected_digest, total
from raysharded.data.loader import Loader, Microbatch, MicrobatchLoader
from raysharded.data.order import positions_of_microbatch, positions_of_step, sample_ids
from raysharded.data.outlook import repeated_samples
from raysharded.errors import ConfigError, DataError, TaskError
from raysharded.overrides import Skips, WeightChanges
from tests.cases import examples

BATCH = BatchConfig(global_batch_size=6, microbatch_size=2, seed=1)
DEADLINE_S = 20.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Squares:
    """A user's dataset: sample i is i*i; keeps count of who reads."""

    def __init__(self, length: int = 50) -> None:
        self._length = length
        self.threads: list[str] = []
        self.was_read = threading.Event()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        self.threads.append(threading.current_thread().name)
        self.was_read.set()
        return index * index


class Drawn(Squares):
    """Its samples are drawn from a global generator."""

    def __getitem__(self, index: int) -> int:
        return random.getrandbits(60)


def test_what_a_dataset_draws_depends_on_the_step_and_the_microbatch_alone() -> None:
    def drawn(step: int, microbatch: int) -> tuple[int, ...]:
        draws = Draws(refuses=False, puts_back=True)
        return tuple(MicrobatchLoader(DatasetReader(Drawn(), draws=draws), BATCH).load(step, microbatch).samples)

    keys = [(step, microbatch) for step in (1, 2) for microbatch in range(3)]
    assert len({drawn(*key) for key in keys}) == len(keys)
    assert [drawn(*key) for key in keys] == [drawn(*key) for key in keys]


class Gated(Squares):
    """Reads wait until the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.reading = threading.Event()

    def __getitem__(self, index: int) -> int:
        self.reading.set()
        assert self.gate.wait(DEADLINE_S)
        return super().__getitem__(index)


def _ids(step: int, microbatch: int) -> list[int]:
    positions = positions_of_microbatch(step, microbatch, BATCH.global_batch_size, BATCH.microbatch_size)
    ids: list[int] = sample_ids(BATCH.seed, positions, 50).tolist()
    return ids


def test_a_microbatch_has_its_samples_in_order_and_the_proof_of_their_reading() -> None:
    loader = MicrobatchLoader(Squares(), BATCH)
    assert loader.num_samples == 50
    for step in (1, 2, 9):
        parts = [loader.load(step, index) for index in range(BATCH.num_microbatches)]
        for index, part in enumerate(parts):
            assert (part.step, part.index, part.num_reads) == (step, index, 2)
            assert part.ids.tolist() == _ids(step, index)
            assert part.samples == [i * i for i in _ids(step, index)]
        assert total(part.digest for part in parts) == expected_digest(step, BATCH, 50)


@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("load"), st.integers(1, 4), st.integers(0, 2)),
            st.tuples(st.just("plan"), st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), max_size=8)),
        ),
        max_size=15,
    )
)
@settings(max_examples=examples(20, of=40), deadline=None)
def test_prefetching_never_changes_what_is_loaded(events: list[tuple[Any, ...]]) -> None:
    plain, ahead = MicrobatchLoader(Squares(), BATCH), MicrobatchLoader(Squares(), BATCH, prefetch=True)
    try:
        for event in events:
            if event[0] == "plan":
                ahead.plan(event[1])
                plain.plan(event[1])
            else:
                a, b = plain.load(*event[1:]), ahead.load(*event[1:])
                assert (a.step, a.index, a.samples, a.digest, a.num_reads) == (
                    b.step,
                    b.index,
                    b.samples,
                    b.digest,
                    b.num_reads,
                )
                assert a.ids.tolist() == b.ids.tolist()
    finally:
        ahead.close()


def test_planned_microbatches_are_read_beside_the_caller_and_only_once() -> None:
    dataset = Squares()
    loader = MicrobatchLoader(dataset, BATCH, prefetch=True)
    plan = [(step, index) for step in (1, 2, 3) for index in range(3)]
    loader.plan(plan)
    assert dataset.was_read.wait(DEADLINE_S), "before anybody loads"
    for step, index in plan:
        assert loader.load(step, index).samples == [i * i for i in _ids(step, index)]
    loader.close()
    assert len(dataset.threads) == 18
    assert "raysharded-prefetch" in dataset.threads


def test_what_could_not_be_read_ahead_is_read_again_once_it_is_planned_again() -> None:
    is_away = threading.Event()
    is_away.set()

    def read(key: int) -> int:
        if is_away.is_set():
            raise OSError("the server is away")
        return key

    prefetcher = Prefetcher(read, depth=3)
    try:
        prefetcher.plan([1, 2, 3])
        outcome = prefetcher.take(1)
        wait_until(lambda: len(vars(prefetcher)["_ready"]) == 2)
        is_away.clear()
        prefetcher.plan([1, 2, 3])
        wait_until(lambda: len(vars(prefetcher)["_ready"]) == 3)
        taken = [prefetcher.take(key) for key in (1, 2, 3)]
    finally:
        prefetcher.close()
    assert outcome is None or isinstance(outcome.error, OSError)
    assert [one.value for one in taken if one is not None] == [1, 2, 3]


def test_a_prefetcher_whose_thread_cannot_start_is_closed_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot_start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    prefetcher = Prefetcher(str, depth=2, num_threads=2)
    monkeypatch.setattr(threading.Thread, "start", cannot_start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        prefetcher.plan([1, 2])
    monkeypatch.undo()
    assert prefetcher.take(1) is None, "the caller reads it"
    prefetcher.plan([2])
    wait_until(lambda: bool(vars(prefetcher)["_ready"]))
    prefetcher.close()


def test_prefetching_stays_within_its_bound() -> None:
    read: list[int] = []
    progress = threading.Condition()

    def note(key: int) -> int:
        with progress:
            read.append(key)
            progress.notify_all()
        return key

    prefetcher = Prefetcher(note, depth=2)
    prefetcher.plan(range(10))
    with progress:
        assert progress.wait_for(lambda: len(read) == 2, DEADLINE_S)
    for key in range(10):
        outcome = prefetcher.take(key)
        assert outcome is None or outcome.value == key
        with progress:
            assert len(read) <= key + 3
    prefetcher.close()


def test_what_is_not_at_the_head_of_the_plan_is_loaded_without_waiting_for_the_rest() -> None:
    loader = MicrobatchLoader(Squares(), BATCH, prefetch=True)
    loader.plan([(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)])
    assert loader.load(2, 1).ids.tolist() == _ids(2, 1)
    assert loader.load(7, 0).ids.tolist() == _ids(7, 0)
    assert loader.load(1, 0).ids.tolist() == _ids(1, 0)
    loader.close()


def test_a_new_plan_replaces_the_old_one() -> None:
    dataset = Gated()
    loader = MicrobatchLoader(dataset, BATCH, prefetch=True)
    loader.plan([(1, 0), (1, 1), (1, 2)])
    assert dataset.reading.wait(DEADLINE_S)
    loader.plan([(5, 0)])
    dataset.gate.set()
    assert loader.load(5, 0).ids.tolist() == _ids(5, 0)
    loader.close()
    assert len(dataset.threads) == 4  # (1, 0), which was being read, and (5, 0)


def test_close_ends_the_thread_between_two_samples_and_wakes_who_waits() -> None:
    before = set(threading.enumerate())  # of other tests of this process
    dataset = Gated()
    loader = MicrobatchLoader(dataset, BATCH, prefetch=True)
    loader.plan([(1, 0), (1, 1)])
    assert dataset.reading.wait(DEADLINE_S)
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            loader.load(1, 0)
        except RuntimeError as error:
            outcome.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    closer = threading.Thread(target=loader.close)
    closer.start()
    assert vars(loader._reader)["_closing"].wait(DEADLINE_S)
    dataset.gate.set()
    closer.join(DEADLINE_S)
    waiter.join(DEADLINE_S)
    assert [str(error) for error in outcome] == ["this loader is closed"]
    assert len(dataset.threads) == 1  # of two samples
    assert "raysharded-prefetch" not in [thread.name for thread in set(threading.enumerate()) - before]
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        loader.load(1, 0)


class Broken(Squares):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def __getitem__(self, index: int) -> int:
        if index == _ids(1, 1)[1]:
            raise type(self.error)(*self.error.args)
        return super().__getitem__(index)


@pytest.mark.parametrize("prefetch", [False, True])
def test_an_exception_of_the_users_dataset_is_a_task_error_with_its_traceback(prefetch: bool) -> None:
    loader = MicrobatchLoader(Broken(KeyError("no such row")), BATCH, prefetch=prefetch)
    loader.plan([(1, 0), (1, 1), (1, 2)])
    assert loader.load(1, 0).num_reads == 2
    for _ in range(2):  # also at a retry
        with pytest.raises(TaskError) as caught:
            loader.load(1, 1)
        error = pickle.loads(pickle.dumps(caught.value))
        assert f"Broken[{_ids(1, 1)[1]}] raised in step 1, microbatch 1: KeyError: 'no such row'" in str(error)
        assert "raise type(self.error)" in error.user_traceback
        assert "raysharded/data/" not in error.user_traceback
    assert loader.load(1, 2).num_reads == 2
    loader.close()


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_data_error_passes_through(prefetch: bool) -> None:
    loader = MicrobatchLoader(Broken(DataError("a.parquet: truncated")), BATCH, prefetch=prefetch)
    loader.plan([(1, 1)])
    with pytest.raises(DataError, match=r"^a\.parquet: truncated$"):
        loader.load(1, 1)
    loader.close()


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_dataset_that_ends_the_process_has_a_bug_like_any_other(prefetch: bool) -> None:
    loader = MicrobatchLoader(Broken(SystemExit(3)), BATCH, prefetch=prefetch)
    loader.plan([(1, 0), (1, 1)])
    loader.load(1, 0)
    with pytest.raises(TaskError, match=r"raised in step 1, microbatch 1: SystemExit: 3"):
        loader.load(1, 1)
    loader.close()


def test_ctrl_c_while_a_sample_is_read_stays_one() -> None:
    with pytest.raises(KeyboardInterrupt):
        MicrobatchLoader(Broken(KeyboardInterrupt()), BATCH).load(1, 1)


def test_datasets_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(ConfigError, match="generator is not a map-style dataset"):
        MicrobatchLoader((i for i in range(3)), BATCH)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="Squares has no samples"):
        MicrobatchLoader(Squares(0), BATCH).load(1, 0)

    class NoLength(Squares):
        def __len__(self) -> int:
            raise OSError("the index is gone")

    with pytest.raises(TaskError, match=r"NoLength.__len__\(\) raised .*the index is gone"):
        MicrobatchLoader(NoLength(), BATCH).load(1, 0)


def test_held_out_data_is_read_in_plain_order() -> None:
    loader = MicrobatchLoader(Squares(10), BATCH)
    assert loader.load_range(3, 6) == [9, 16, 25]
    assert loader.load_range(10, 10) == []
    with pytest.raises(DataError, match=r"Squares has 10 samples, not 8 \.\. 11"):
        loader.load_range(8, 12)
    with pytest.raises(TaskError, match=r"Broken\[\d+\] raised in evaluation"):
        MicrobatchLoader(Broken(ValueError("bad")), BATCH).load_range(0, 50)


def test_held_out_data_is_read_ahead_in_the_background_two_at_a_time() -> None:
    gated = Gated()
    loader = MicrobatchLoader(gated, BATCH, prefetch=True)
    try:
        loader.plan_ranges([(0, 2), (2, 4), (4, 6)])
        assert gated.reading.wait(DEADLINE_S)
        assert not gated.was_read.is_set()
        gated.gate.set()
        assert [loader.load_range(start, start + 2) for start in (0, 2, 4)] == [[0, 1], [4, 9], [16, 25]]
        assert gated.threads[:2] == ["raysharded-prefetch"] * 2  # the first range, which was in progress
        assert loader.load_range(4, 6) == [16, 25]  # again, as padding does
        assert gated.threads[-2:] == [threading.current_thread().name] * 2
    finally:
        loader.close()


class ReadsAs:
    """A faulty loader: it reads the ids that `fault` returns for the right ones."""

    def __init__(self, dataset: Squares, fault: Callable[[list[int]], Sequence[int]]) -> None:
        self._dataset, self._fault = dataset, fault

    def load(self, step: int, microbatch: int) -> Microbatch:
        recorder = ReadRecorder(self._dataset)
        samples = [recorder[i] for i in self._fault(_ids(step, microbatch))]
        return Microbatch.from_reads(step, microbatch, samples, recorder=recorder, batch=BATCH)

    def skip(self, skips: Skips, order: int = 1, blocks: tuple[int, int] = (1, 1), weights: WeightChanges = ()) -> None:
        pass

    def plan(self, upcoming: Sequence[tuple[int, int]]) -> None:
        pass

    def plan_ranges(self, ranges: Sequence[tuple[int, int]]) -> None:
        pass

    def load_range(self, start: int, stop: int) -> list[Any]:
        return [self._dataset[i] for i in range(start, stop)]

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("fault", "lost", "repeated"),
    [
        (lambda ids: ids, 0, 0),
        (lambda ids: [ids[0], ids[0]], 1, 1),  # one read twice in place of another
        (lambda ids: [*ids, ids[1]], 0, 1),  # one read twice
        (lambda ids: ids[:-1], 1, 0),  # one skipped
        (lambda _: [], 2, 0),
    ],
)
def test_a_loader_that_repeats_or_drops_samples_is_found(
    fault: Callable[[list[int]], Sequence[int]], lost: int, repeated: int
) -> None:
    good, bad = MicrobatchLoader(Squares(), BATCH), ReadsAs(Squares(), fault)
    records, read_ids = {}, {}
    for step in range(1, 5):
        loaders: list[Loader] = [good, bad if step == 3 else good, good]
        parts = [loader.load(step, index) for index, loader in enumerate(loaders)]
        digest = total(part.digest for part in parts)
        records[step] = StepReads(digest=digest, num_reads=sum(part.num_reads for part in parts))
        read_ids[step] = np.concatenate([part.ids for part in parts]).tolist()
    for ids in (None, read_ids):
        report = check(records, final_step=4, batch=BATCH, num_samples=50, read_ids=ids)
        assert report.steps_wrong == ((3,) if lost or repeated else ())
        assert (report.samples_lost, report.samples_repeated) == (lost, repeated)
        assert report.ok == (lost == repeated == 0)


def test_a_sample_moved_to_another_microbatch_is_found() -> None:
    first, second = _ids(1, 0), _ids(1, 1)
    parts = [
        ReadsAs(Squares(), lambda _: [*first, second[0]]).load(1, 0),
        ReadsAs(Squares(), lambda _: second[1:]).load(1, 1),
        MicrobatchLoader(Squares(), BATCH).load(1, 2),
    ]
    read = np.concatenate([part.ids for part in parts])
    assert sorted(read.tolist()) == sorted(sample_ids(1, positions_of_step(1, 6), 50).tolist())
    assert total(part.digest for part in parts) != expected_digest(1, BATCH, 50)


def test_importing_the_data_package_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys, raysharded.data, raysharded.data.loader as l\n"
        "assert not {'torch', 'ray', 'pyarrow', 'fsspec'} & set(sys.modules)\n"
        "from raysharded.data import *\n"
        "import raysharded.data.pack\n"
        "assert not {'torch', 'ray', 'tokenizers'} & set(sys.modules)\n"
        "assert sorted(raysharded.data.__all__) == sorted(raysharded.data._EXPORTS)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class OneReader(Squares):
    """Notices when a second thread reads beside the first."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def __getitem__(self, index: int) -> int:
        assert self._lock.acquire(blocking=False), "read by two threads at once"
        try:
            time.sleep(0.001)
            return super().__getitem__(index)
        finally:
            self._lock.release()


def test_two_loaders_with_one_lock_do_not_read_at_once() -> None:
    dataset = OneReader()
    training = MicrobatchLoader(dataset, BATCH, prefetch=True)
    held_out = MicrobatchLoader(dataset, BATCH, lock=training.lock)
    keys = [(step, microbatch) for step in range(1, 6) for microbatch in range(3)]
    training.plan(keys)
    for key in keys:
        assert held_out.load_range(0, 3) == [0, 1, 4]
        assert training.load(*key).samples == [index**2 for index in _ids(*key)]
    training.close()


class Unsized:
    def __len__(self) -> int:
        raise OSError("not mounted")


@pytest.mark.parametrize("data", [range(8), range(9), range(0), Unsized()])
def test_data_for_a_whole_step_or_of_unknown_length_need_no_word(data: Any) -> None:
    assert repeated_samples(data, BatchConfig(global_batch_size=8, microbatch_size=2)) == ()


def test_fewer_samples_than_a_step_takes_are_named_with_the_setting() -> None:
    (told,) = repeated_samples(range(7), BatchConfig(global_batch_size=8, microbatch_size=2))
    assert "7 samples, and a step takes 8 (BatchConfig.global_batch_size)" in told
