"""Weights of a mixture that are changed while real workers train: each microbatch follows from the journal alone."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import raysharded as rs
from examples.train_packed import NextToken
from raysharded.checkpoint import open_storage
from raysharded.checkpoint.retention.catalog import list_checkpoints
from raysharded.checkpoint.retention.forks.fork import fork
from raysharded.checkpoint.retention.policy import Keep
from raysharded.clock import SystemClock
from raysharded.data.packed.arrange import arrange
from raysharded.data.store.layout import Kind
from raysharded.data.store.writer import StoreWriter
from raysharded.errors import ConfigError
from raysharded.ids import WorkerId
from raysharded.journal.log import Journal
from raysharded.report import load
from raysharded.report.data_audit import audit
from raysharded.testing import Fault, FaultPlan
from tests.cli.test_commands import invoke
from tests.training.harness import Collector, make_driver, make_job, make_limits
from tests.training.test_overrides import Listening, at_checkpoint, at_step, decided, held

pytestmark = pytest.mark.procs
MICROBATCHES, SEQ_LEN = 7, 16
BATCH = 2 * MICROBATCHES
NAMES = ("web", "books", "code")
PLANNED = [(0, {"web": 7.0, "books": 2.0, "code": 1.0}), (9 * BATCH + 5, {"web": 1.0, "books": 1.0})]
PLAIN_STEPS = 7
BY_HAND = {"books": 1.0, "code": 3.0}


class Telling(NextToken):
    """Writes a digest of each microbatch that it computes. Waits in some steps until each has its file."""

    def __init__(self, folder: Path, hold: Collection[int] = ()) -> None:
        super().__init__(vocab_size=257, seq_len=SEQ_LEN, width=16, layers=1)
        self.folder, self.hold = folder, tuple(hold)

    def loss(self, model: nn.Module, batch: Any) -> rs.Loss:
        digest = hashlib.sha256(b"".join(batch[key].numpy().tobytes() for key in sorted(batch)))
        with (self.folder / f"{os.getpid()}.digests").open("a") as file:
            file.write(f"{digest.hexdigest()}\n")
        return super().loss(model, batch)

    def lr_scale(self, step: int) -> float:
        deadline = time.monotonic() + 60.0
        while step in self.hold and not held(self.folder, step).exists():
            time.sleep(0.01)
            assert time.monotonic() < deadline
        return 1.0


def digests(folder: Path) -> set[str]:
    return {line for path in folder.glob("*.digests") for line in path.read_text().split()}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three stores of documents with their plans."""
    return written(tmp_path_factory.mktemp("stores"))


def written(folder: Path, first_token: int = 0) -> Path:
    for seed, name in enumerate(NAMES):
        rng = np.random.default_rng(seed)
        with StoreWriter(str(folder / name), Kind(tokenizer="bytes", vocab_size=257), 9000) as store:
            for number, length in enumerate(rng.integers(1, 40, 1500)):
                tokens = np.append(rng.integers(0, 256, length), 256)
                tokens[0] = tokens[0] if number else first_token
                store.write(tokens.astype(np.uint32))
        arrange(folder / name, seq_len=SEQ_LEN)
    return folder


def mixture(stores: Path) -> rs.Mixture:
    return rs.Mixture(sources(stores), PLANNED, seed=3)


def sources(stores: Path) -> dict[str, rs.PackedDataset]:
    return {name: rs.PackedDataset(stores / name, seq_len=SEQ_LEN) for name in NAMES}


def run(
    url: Path,
    stores: Path,
    steps: int,
    workers: int,
    *,
    hold: Collection[int] = (),
    listener: Collector | None = None,
    faults: Sequence[Fault] = (),
    least: int = 1,
    data: rs.Mixture | None = None,
) -> tuple[str | None, Collector]:
    """The fingerprint that the run ends with; it resumes from the folder's contents."""
    told = url.with_name(f"{url.name} tells")
    told.mkdir(exist_ok=True)
    plan = FaultPlan(faults=tuple(faults), folder=str(told)) if faults else None
    alone = workers == 1 and not hold and not faults
    job = make_job(
        str(url),
        task=Telling(told, hold),
        data=data or mixture(stores),
        microbatches=MICROBATCHES,
        steps=steps,
        engine=rs.EngineConfig(prefetch=not alone),  # what others are compared with starts no process that reads
        save_every=2,
        faults=plan,
    )
    losses = {"max_worker_losses": 2 * len(faults), "join_wait_s": 60.0} if faults else {}
    limits = replace(
        make_limits(job, workers, prepare_within_s=0.0, **losses), min_workers=least if faults else workers
    )
    listener = listener or Collector()
    driver = make_driver(job, limits, listener, keep=Keep(last=99), metadata={"batch": asdict(job.batch)})
    if isinstance(listener, Listening):
        listener.driver = driver
    driver.restore()
    fingerprint = driver.run().result_fingerprint
    assert plan is None or all(plan.fired(fault) for fault in faults)
    return fingerprint, listener


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, stores: Path) -> tuple[str | None, Collector]:
    """A run of one worker whose weights nobody changes."""
    return run(tmp_path_factory.mktemp("plain") / "run", stores, PLAIN_STEPS, 1)


def decided_before(url: Path, other: Path) -> None:
    """A journal that has the changes of weights and the skipped data of another run before the run begins, and its
    rules."""
    rules, changes = decided(other, "started")[0]["numerics"], decided(other, "mixture_weights")
    skips: list[Any] = next((rewind["skips"] for rewind in reversed(decided(other, "rewind"))), [])
    journal = Journal(open_storage(str(url)), SystemClock(), "before")
    journal.append("started", {"resumed_after_step": 0, "skips": skips, "numerics": rules})
    for change in changes:
        fields = {key: change[key] for key in ("step", "weights", "from_step", "from_position")}
        journal.append("mixture_weights", fields, durable=True)
    journal.flush()


def test_changed_weights_give_the_same_microbatches_after_a_loss_when_resumed_and_in_a_fork(
    tmp_path: Path, stores: Path, plain: tuple[str | None, Collector]
) -> None:
    url, steps = tmp_path / "run", 9
    told = tmp_path / "run tells"
    listener = Listening(at_step(2), lambda driver: driver.set_mixture_weights(BY_HAND), before=held(told, 4))
    kill = Fault(worker=WorkerId(1), step=7, phase="backward")
    run(url, stores, steps, 2, hold=[4], listener=listener, faults=[kill])
    (decision,) = decided(url, "mixture_weights")
    first = decision["from_step"]
    assert 4 <= first <= 7
    assert decision["from_position"] == (first - 1) * BATCH
    assert load(str(url)).ok

    alone = tmp_path / "alone"
    decided_before(alone, url)
    later, undisturbed = run(alone, stores, steps + 2, 1)
    assert {step: numbers for step, numbers in undisturbed.numbers.items() if step <= steps} == listener.numbers
    assert digests(told) < digests(tmp_path / "alone tells")
    assert len(digests(told)) == steps * MICROBATCHES
    assert plain[1].numbers[first]["loss"] != listener.numbers[first]["loss"]
    by_hand = mixture(stores).with_changes([(decision["from_position"], BY_HAND)])
    samples = [by_hand.origin(position)[0] for position in range(decision["from_position"], 9 * BATCH)]
    assert "web" not in samples
    read = audit(str(url))
    assert read.ok
    assert {one.name: one.read for one in read.sources} == by_hand.counts(steps * BATCH)
    assert all(abs(one.read - one.wanted) < 1 + len(PLANNED) for one in read.sources)
    told_there = invoke("data", "audit", url)
    assert told_there.exit_code == 0
    assert f"{steps * BATCH} samples in {steps} steps: 0 missing, 0 repeated" in told_there.stdout

    refs = [ref for ref in list_checkpoints(open_storage(str(url))) if ref.complete]
    before, forked = tmp_path / "before", tmp_path / "forked"
    shutil.copytree(url, before)
    for ref in [ref for ref in refs if ref.step >= first]:
        shutil.rmtree(before / ref.prefix)
    assert refs[-1].step == steps
    fork(open_storage(str(url)), refs[-1], open_storage(str(forked)))
    for copy in (before, forked):
        assert run(copy, stores, steps + 2, 1)[0] == later
        assert digests(copy.with_name(f"{copy.name} tells")) <= digests(tmp_path / "alone tells")
    assert decided(forked, "mixture_weights") == []  # the checkpoint has it


def test_documents_of_the_same_number_and_lengths_are_other_contents(tmp_path: Path, stores: Path) -> None:
    others = written(tmp_path / "others", first_token=7)
    assert len(mixture(others)) == len(mixture(stores))
    assert mixture(others).order_text == mixture(stores).order_text
    assert mixture(others).contents_digest != mixture(stores).contents_digest


@pytest.mark.long
def test_a_run_keeps_its_packing_plans_and_is_refused_with_others_of_the_same_length(
    tmp_path: Path, stores: Path, plain: tuple[str | None, Collector]
) -> None:
    url = tmp_path / "run"
    run(url, stores, 1, 1)
    others = written(tmp_path / "others", first_token=7)
    with pytest.raises(ConfigError, match="of the same length with other contents than the run began with"):
        run(url, others, 2, 1)
    assert run(url, stores, PLAIN_STEPS, 1)[0] == plain[0]
    (entry,) = [fields for kind, fields in plain[1].entries if kind == "data"]
    assert entry["data_contents"] == mixture(stores).contents_digest


class GoingBack(Listening):
    """Goes back once the checkpoint of the step `at` is written.

    Lets the step behind each earlier checkpoint begin when that is written: while one is, the next is left out.
    """

    def __init__(self, told: Path, at: int, *, to: int, skip_data: bool = False, before: int) -> None:
        super().__init__(at_checkpoint(at), lambda driver: driver.rewind(to, skip_data), before=held(told, before))
        self._told, self._at_step = told, at

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        super().__call__(kind, fields)
        if kind == "checkpoint" and fields["step"] < self._at_step:
            held(self._told, fields["step"] + 1).touch()


class Both(Listening):
    """Two that listen to one run."""

    def __init__(self, first: Listening, then: Listening) -> None:
        self._two = first, then
        Collector.__init__(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "driver":
            for one in self._two:
                one.driver = value
        else:
            super().__setattr__(name, value)

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        for one in self._two:
            one(kind, fields)


@pytest.mark.long
def test_changed_weights_hold_after_going_back_with_skipped_data_and_across_limits_of_sources(
    tmp_path: Path, stores: Path
) -> None:
    """One limit before the change and the skipped data, one after them. The two runs are the ones to compare."""
    url, told, steps = tmp_path / "run", tmp_path / "run tells", 15
    parts = sources(stores)
    limits = {name: number / len(parts[name]) for name, number in (("web", 20.5), ("code", 100.5))}
    data = rs.Mixture(parts, PLANNED[:1], seed=3, max_epochs=limits, at_limit="reweight")

    first = Listening(at_step(2), lambda driver: driver.set_mixture_weights(BY_HAND), before=held(told, 4))
    then = GoingBack(told, 8, to=8, skip_data=True, before=11)
    fingerprint, _ = run(url, stores, steps, 2, hold=[3, 4, 5, 7, 11], listener=Both(first, then), data=data)

    (decision,), (rewind,) = decided(url, "mixture_weights"), decided(url, "rewind")
    assert decision["from_step"] <= 7 < rewind["to_step"]
    assert rewind["skip_samples"] >= BATCH
    decided_before(tmp_path / "alone", url)
    alone, _ = run(tmp_path / "alone", stores, steps, 1, data=data)
    assert alone == fingerprint
    assert digests(tmp_path / "alone tells") <= digests(told)

    as_read = data.with_changes([(decision["from_position"], BY_HAND)])
    begin = rewind["to_step"] * BATCH
    resumed = begin + rewind["skip_samples"]
    end = resumed + (steps - rewind["to_step"]) * BATCH
    web, code = as_read.ended
    assert (web.name, code.name) == ("web", "code")
    assert web.position < decision["from_position"] < begin < resumed < code.position < end
    counts = [as_read.counts(position) for position in (begin, resumed, end)]
    found = audit(str(url))
    assert found.ok
    assert {one.name: one.read for one in found.sources} == {
        name: counts[0][name] + counts[2][name] - counts[1][name] for name in NAMES
    }
    assert {one.name: one.skipped for one in found.sources} == {
        name: counts[1][name] - counts[0][name] for name in NAMES
    }
    assert all(abs(one.read - one.wanted) <= 2 + len(found.sources) for one in found.sources)
    (skipped,) = found.skipped
    assert (skipped.reason, skipped.after_step) == ("asked", rewind["to_step"])
    assert (skipped.first_position, skipped.samples) == (begin, rewind["skip_samples"])


@pytest.mark.long
def test_going_back_to_before_the_change_undoes_it(tmp_path: Path, stores: Path) -> None:
    url, told = tmp_path / "run", tmp_path / "run tells"
    first = Listening(at_step(2), lambda driver: driver.set_mixture_weights(BY_HAND), before=held(told, 4))
    then = GoingBack(told, 6, to=2, before=9)
    fingerprint, _ = run(url, stores, 11, 1, hold=[3, 4, 5, 9], listener=Both(first, then))
    (rewind,) = decided(url, "rewind")
    assert (rewind["to_step"], len(decided(url, "mixture_weights"))) == (2, 1)
    assert run(tmp_path / "plain", stores, 11, 1)[0] == fingerprint
    assert load(str(url)).ok


@pytest.mark.long  # fifty losses, each with a replacement that is waited for
def test_four_three_seven_and_one_workers_with_fifty_kills_read_the_microbatches_of_one(
    tmp_path: Path, stores: Path
) -> None:
    url, told = tmp_path / "run", tmp_path / "run tells"
    phases: tuple[str, ...] = ("data", "forward", "backward", "agree", "apply")
    fingerprint, kills, begins = None, 0, 0
    for workers, last, number in ((4, 24, 16), (3, 44, 16), (7, 60, 12), (1, 68, 6)):
        first = last - number - 1  # in the first part after the change of the weights: no step is begun with others
        faults = [
            Fault(worker=WorkerId(worker), step=first + worker, phase=phases[(kills + worker) % len(phases)])
            for worker in range(number)  # those who replace the lost ones have the next numbers
        ]
        listener = Listening(at_step(2), lambda driver: driver.set_mixture_weights(BY_HAND), before=held(told, 4))
        hold, listening = ([4], listener) if not begins else ([], None)
        fingerprint, _ = run(url, stores, last, workers, hold=hold, listener=listening, faults=faults, least=workers)
        kills, begins = kills + number, last
    assert kills == 50
    (decision,) = decided(url, "mixture_weights")
    assert decision["from_step"] < 7
    decided_before(tmp_path / "alone", url)
    assert run(tmp_path / "alone", stores, begins, 1)[0] == fingerprint
    assert digests(told) == digests(tmp_path / "alone tells")
    assert len(digests(told)) == begins * MICROBATCHES
    report = load(str(url))
    assert report.ok, report.as_dict()
    assert report.ledger is not None
    assert report.ledger.steps_checked == begins
    assert len(decided(url, "worker_lost")) >= kills
