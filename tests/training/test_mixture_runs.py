"""Runs on mixtures: the same microbatches with any workers and any losses, and the mixture that a run keeps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

import raysharded as rs
from raysharded.checkpoint import newest_complete, open_storage
from raysharded.data.ledger import expected_digest
from raysharded.data.order import Blocks
from raysharded.driver.state.state import State
from raysharded.errors import ConfigError, DataError, InexactError
from raysharded.ids import WorkerId
from raysharded.report import load
from raysharded.testing import Fault, FaultPlan
from tests.training.harness import SEQUENCE, VOCABULARY, Collector, SmallTask, make_driver, make_job, make_limits

MICROBATCHES = 7
BATCH = 2 * MICROBATCHES
CHANGES: list[tuple[int, dict[str, float]]] = [
    (0, {"web": 7, "books": 2, "code": 1}),
    (2 * BATCH + 3, {"web": 1, "books": 1, "code": 1}),
    (5 * BATCH, {"books": 1, "code": 3}),
]


def source(seed: int, number: int) -> list[Any]:
    return list(np.random.default_rng(seed).integers(0, VOCABULARY, (number, SEQUENCE + 1)))


def _mixture(changes: Sequence[tuple[int, dict[str, float]]] = CHANGES, **settings: Any) -> rs.Mixture:
    sources = {"web": source(1, 40), "books": source(2, 9), "code": source(3, 5)}
    return rs.Mixture(sources, changes, seed=8, **settings)


def trained(
    url: str, steps: int, *, workers: int, data: Any = None, plan: FaultPlan | None = None, task: rs.Task | None = None
) -> tuple[State, Collector]:
    job = make_job(
        url,
        task=task or SmallTask(),
        steps=steps,
        microbatches=MICROBATCHES,
        data=data or _mixture(),
        engine=rs.EngineConfig(prefetch=workers > 1),  # a worker alone starts no process that reads
        faults=plan,
    )
    losses = 0 if plan is None else len(plan.faults)
    limits = make_limits(job, workers, min_workers=1 if losses else workers, max_worker_losses=losses, join_wait_s=60.0)
    listener = Collector()
    driver = make_driver(job, limits, listener, metadata={"batch": asdict(job.batch)})
    driver.restore()
    return driver.run(), listener


@pytest.mark.long
def test_four_three_seven_and_one_workers_with_losses_read_the_same_samples_as_one(tmp_path: Any) -> None:
    undisturbed, alone = trained(f"{tmp_path}/alone", 8, workers=1)
    url, state = f"{tmp_path}/run", None
    numbers: dict[int, Any] = {}
    for workers, last in ((4, 2), (3, 4), (7, 6), (1, 8)):
        plan = None
        if workers in (3, 7):
            fault = Fault(worker=WorkerId(1), step=last, phase="backward")
            plan = FaultPlan(faults=(fault,), folder=str(tmp_path / f"faults-{workers}"))
            (tmp_path / f"faults-{workers}").mkdir()
        state, some = trained(url, last, workers=workers, plan=plan)
        assert plan is None or all(plan.fired(fault) for fault in plan.faults)
        numbers |= some.numbers
    assert state is not None
    assert repr(sorted(numbers.items())) == repr(sorted(alone.numbers.items()))
    assert state.result_fingerprint == undisturbed.result_fingerprint
    batch = make_job("", steps=1, microbatches=MICROBATCHES).batch
    blocks = Blocks(-_mixture().order_digest, BATCH)
    for step, found in numbers.items():
        expected = expected_digest(step, batch, len(_mixture()), order=2, blocks=blocks)
        assert found["digest"] == [f"{word:016x}" for word in expected]
    report = load(url)
    assert report.ok, report.ledger
    newest = newest_complete(open_storage(url)).checkpoint
    assert newest is not None
    assert newest.manifest.metadata["blocks"] == [-_mixture().order_digest, BATCH]

    with pytest.raises(ConfigError, match="finds another order of samples than the run began with"):
        trained(url, 9, workers=1, data=_mixture([(0, {"web": 1})]))


@pytest.mark.long  # `tests/data/test_mixture.py` has the order of each weight
def test_other_weights_train_other_samples(tmp_path: Any) -> None:
    runs = [trained(f"{tmp_path}/{workers}", 3, workers=workers, data=data)[1].numbers for workers, data in _two()]
    losses = [[numbers[step]["loss"] for step in (1, 2, 3)] for numbers in runs]
    assert losses[0][:2] == losses[1][:2], "the weights are the same up to there"
    assert losses[0][2] != losses[1][2]


def _two() -> list[tuple[int, rs.Mixture]]:
    """Numbers of workers, and mixtures."""
    return [(2, _mixture()), (1, _mixture(CHANGES[:1]))]


def test_a_run_that_its_mixture_does_not_reach_is_refused_before_its_first_step(tmp_path: Any) -> None:
    data = _mixture(max_epochs={"code": 1})
    steps = next(step for step in itertools.count(1) if step * BATCH > len(data))
    listener = Collector()
    job = make_job(f"{tmp_path}/run", steps=steps, microbatches=MICROBATCHES, data=data)
    with pytest.raises(DataError, match=r"source 'code' has then been read 1 times\. Train for fewer steps, raise max"):
        make_driver(job, make_limits(job, 1), listener).run()
    assert not listener.numbers


class Unsteady:
    """Samples of a generator that is made without a seed."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        return np.random.default_rng().integers(0, VOCABULARY, SEQUENCE + 1)


def test_an_unsteady_source_of_small_weight_is_named_before_the_first_step(tmp_path: Any) -> None:
    data = rs.Mixture({"web": source(1, 40), "rare": Unsteady()}, {"web": 0.99, "rare": 0.01}, seed=8)
    first = next(position for position in itertools.count() if data.origin(position)[0] == "rare")
    assert first >= BATCH, "the run does not read it"
    listener = Collector()
    job = make_job(f"{tmp_path}/run", steps=1, microbatches=MICROBATCHES, data=data)
    with pytest.raises(InexactError, match=rf"Mixture\[{first}\], sample \d+ of source 'rare', gave other values"):
        make_driver(job, make_limits(job, 1), listener).run()
    assert not listener.numbers


class TokenShards:
    """Shards of samples that draw nothing and restart at their state."""

    def __init__(self, shards: Sequence[list[Any]] = ()) -> None:
        self.shards = list(shards) or [source(shard, 9 + shard) for shard in range(4)]
        self.num_shards = len(self.shards)

    def open_shard(self, shard: int, epoch: int) -> Any:
        return _Shard(self.shards[shard])


class _Shard:
    def __init__(self, rows: list[Any]) -> None:
        self._rows, self._at = rows, 0

    def __iter__(self) -> Any:
        while self._at < len(self._rows):
            self._at += 1
            yield self._rows[self._at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]


def test_a_stream_trains_the_same_bits_with_a_loss_and_when_resumed(tmp_path: Any) -> None:
    def stream(name: str) -> rs.Stream:
        return rs.Stream(TokenShards(), states=tmp_path / name, every=5)

    undisturbed, alone = trained(f"{tmp_path}/alone", 6, workers=1, data=stream("states of one"))
    fault = Fault(worker=WorkerId(1), step=3, phase="backward")
    (tmp_path / "faults").mkdir()
    plan = FaultPlan(faults=(fault,), folder=str(tmp_path / "faults"))
    _, some = trained(f"{tmp_path}/run", 4, workers=2, data=stream("states"), plan=plan)
    assert plan.fired(fault)
    state, more = trained(f"{tmp_path}/run", 6, workers=1, data=stream("states"))
    assert state.result_fingerprint == undisturbed.result_fingerprint
    assert repr(sorted((some.numbers | more.numbers).items())) == repr(sorted(alone.numbers.items()))
    assert load(f"{tmp_path}/run").ok
    with pytest.raises(ConfigError, match="finds another order of samples than the run began with"):
        trained(f"{tmp_path}/run", 7, workers=1, data=rs.Stream(_Shard(source(1, 5))))
