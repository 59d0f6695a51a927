"""Another learning rate, and rewinds, while real workers train: the bits follow from the journal alone."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from raysharded.checkpoint import open_storage
from raysharded.checkpoint.retention.catalog import list_checkpoints
from raysharded.checkpoint.retention.forks.fork import fork
from raysharded.checkpoint.retention.policy import Keep
from raysharded.clock import SystemClock
from raysharded.driver.driver import Driver
from raysharded.journal.log import Journal, read
from raysharded.report import load
from raysharded.testing import Fault, FaultPlan
from tests.cases import tried_each_time
from tests.training.harness import Collector, GptTask, SmallTask, make_driver, make_job, make_limits

pytestmark = pytest.mark.procs
STEPS, MICROBATCHES, BATCH = 8, 4, 8
METADATA = {"batch": {"global_batch_size": BATCH, "microbatch_size": 2, "seed": 5}, "reduction": "exact"}
Entries = list[Mapping[str, Any]]


class Held(SmallTask):
    """No worker applies the update of certain steps before each has its file: before the driver has received a request.
    No other step begins meanwhile. Of earlier steps every second has its checkpoint before the next but one begins:
    while one is being written, none is made."""

    def __init__(self, folder: Path, steps: Collection[int]) -> None:
        self._folder, self._steps = folder, steps

    def lr_scale(self, step: int) -> float:
        if self._steps:
            time.sleep(0.05)  # leaves the driver time to notify the workers
        deadline = time.monotonic() + 60.0
        while (step in self._steps and not held(self._folder, step).exists()) or (
            step % 2 and 3 <= step <= max(self._steps, default=0) - 2 and not self._is_saved(step - 1)
        ):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return super().lr_scale(step)

    def _is_saved(self, step: int) -> bool:
        return any(ref.step == step and ref.complete for ref in list_checkpoints(open_storage(str(self._folder))))


def held(folder: Path, step: int) -> Path:
    return folder.with_name(f"{folder.name} may apply step {step}")


class Died(BaseException):
    """The driver ends in the middle of something."""


class Listening(Collector):
    """Collects the journal, and does something at an entry, once."""

    def __init__(
        self, at: Callable[[str, Mapping[str, Any]], bool], do: Callable[[Driver], None], *, before: Path
    ) -> None:
        """`before`: the file of the step that waits until the driver has received the request of `do`."""
        super().__init__()
        self._at, self._do, self._before = at, do, before
        self.driver: Driver | None = None

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        super().__call__(kind, fields)
        if self.driver is not None and self._at(kind, fields):
            driver, self.driver = self.driver, None
            asked = driver.state.changes_asked
            self._do(driver)
            threading.Thread(target=self._let_go, args=(driver, asked), daemon=True).start()

    def _let_go(self, driver: Driver, asked: int) -> None:
        while driver.state.changes_asked == asked:
            time.sleep(0.005)
        self._before.touch()


def at_step(number: int) -> Callable[[str, Mapping[str, Any]], bool]:
    return lambda kind, fields: kind == "step" and fields["step"] == number


def at_checkpoint(number: int) -> Callable[[str, Mapping[str, Any]], bool]:
    return lambda kind, fields: kind == "checkpoint" and fields["step"] == number


def run(
    folder: Path,
    workers: int,
    *,
    steps: int = STEPS,
    hold: Collection[int] = (),
    listener: Collector | None = None,
    faults: FaultPlan | None = None,
    losses: int = 0,
) -> tuple[str | None, Collector]:
    """The fingerprint that the run in the folder ends with; it resumes from the folder's contents."""
    job = make_job(
        str(folder),
        task=Held(folder, hold),
        microbatches=MICROBATCHES,
        steps=steps,
        save_every=2,
        faults=faults,
    )
    listener = listener or Collector()
    limits = make_limits(job, workers, prepare_within_s=0.0, max_worker_losses=losses)
    limits = replace(limits, min_workers=1 if losses else workers)
    driver = make_driver(job, limits, listener, keep=Keep(last=99), metadata=METADATA)
    if isinstance(listener, Listening):
        listener.driver = driver
    driver.restore()
    return driver.run().result_fingerprint, listener


def undisturbed(rates: tuple[tuple[int, float], ...], steps: int = STEPS) -> str | None:
    """The result of a run whose journal has these decisions from the beginning: one worker, and no disturbance."""
    return fingerprints(rates)[steps]


@cache
def fingerprints(rates: tuple[tuple[int, float], ...]) -> dict[int, str]:
    """Those of the checkpoints of such a run, by step: of each even one."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(open_storage(folder), SystemClock(), "before")
        journal.append("started", {"resumed_after_step": 0, "skips": []})
        for first, factor in rates:
            fields = {"step": first - 1, "factor": factor, "from_step": first}
            journal.append("learning_rate", fields, durable=True)
        journal.flush()
        listener = run(Path(folder), 1, steps=STEPS + 2, hold=[STEPS + 3])[1]  # a step that never comes: none is held
        return {fields["step"]: fields["fingerprint"] for kind, fields in listener.entries if kind == "checkpoint"}


def decided(folder: Path, kind: str) -> Entries:
    """The entries of a kind in the run's journal."""
    return [entry for entry in read(open_storage(str(folder))) if entry["kind"] == kind]


def test_another_learning_rate_gives_the_same_bits_at_any_size_after_a_loss_and_when_resumed(tmp_path: Path) -> None:
    url = tmp_path / "run"
    faults = FaultPlan(faults=(Fault(worker=1, step=7, phase="backward"),), folder=str(tmp_path))  # type: ignore[arg-type]
    listener = Listening(at_step(2), lambda driver: driver.set_learning_rate(0.25), before=held(url, 4))
    fingerprint, _ = run(url, 2, hold=[4], listener=listener, faults=faults, losses=1)
    (decision,) = decided(url, "learning_rate")
    first = decision["from_step"]
    assert 4 <= first <= 6
    assert faults.fired(faults.faults[0])
    assert fingerprint == undisturbed(((first, 0.25),))
    assert fingerprint != undisturbed(())
    assert all(recovery["source"] == "memory" for recovery in decided(url, "recovery"))
    for step, numbers in listener.numbers.items():
        factor = 0.25 if step >= first else 1.0
        assert numbers["lr"] == pytest.approx(1e-2 * GptTask().lr_scale(step) * factor, rel=1e-12)

    refs = [ref for ref in list_checkpoints(open_storage(str(url))) if ref.complete]
    expected = undisturbed(((first, 0.25),), STEPS + 2)
    before, forked = tmp_path / "before", tmp_path / "forked"
    shutil.copytree(url, before)
    for ref in [ref for ref in refs if ref.step >= first]:
        shutil.rmtree(before / ref.prefix)
    newer = next(ref for ref in refs if first <= ref.step < STEPS)
    fork(open_storage(str(url)), newer, open_storage(str(forked)))
    for copy, resumed_at, workers in ((before, first - 1, 2), (forked, newer.step, 1)):
        fingerprint, listener_ = run(copy, workers, steps=STEPS + 2)
        assert min(listener_.numbers) - 1 <= resumed_at
        assert fingerprint == expected
    assert decided(forked, "learning_rate") == []  # the checkpoint has it


def test_a_run_that_went_back_has_the_bits_of_one_that_never_went_past(tmp_path: Path) -> None:
    url, steps = tmp_path / "run", STEPS + 2

    first = Listening(at_step(2), lambda driver: driver.set_learning_rate(0.25), before=held(url, 4))
    then = Listening(at_checkpoint(6), lambda driver: driver.rewind(2), before=held(url, 7))

    class Two(Collector):
        def __call__(self, kind: str, fields: dict[str, Any]) -> None:
            first(kind, fields)
            then(kind, fields)

    job = make_job(str(url), task=Held(url, [4, 7]), microbatches=MICROBATCHES, steps=steps, save_every=2)
    driver = make_driver(job, make_limits(job, 2, prepare_within_s=0.0), Two(), keep=Keep(last=99), metadata=METADATA)
    first.driver = then.driver = driver
    driver.restore()
    state = driver.run()
    (decision,), (rewind,) = decided(url, "learning_rate"), decided(url, "rewind")
    assert decision["from_step"] <= 6
    assert (rewind["to_step"], rewind["who"], rewind["learning_rate"], rewind["skips"]) == (2, "asked", [], [])
    assert rewind["distrusted"]
    assert state.result_fingerprint == undisturbed((), steps)
    report = load(str(url))
    assert report.ok, report.as_dict()
    assert report.ledger is not None
    assert report.ledger.steps_checked == steps
    assert (report.ledger.samples_lost, report.ledger.samples_repeated) == (0, 0)
    assert sum(report.summary.track.undone) == rewind["step"] - 2
    assert report.summary.times.parts["lost"] < report.summary.times.parts["undone"]
    gone = {entry["prefix"] for entry in decided(url, "checkpoint")} & set(rewind["distrusted"])
    there = {ref.prefix for ref in list_checkpoints(open_storage(str(url))) if ref.complete}
    assert gone
    assert there.isdisjoint(rewind["distrusted"])


def test_the_data_read_since_is_passed_over_if_that_is_wanted(tmp_path: Path) -> None:
    url = tmp_path / "run"
    at = Listening(at_checkpoint(4), lambda driver: driver.rewind(2, skip_data=True), before=held(url, 5))
    fingerprint, _ = run(url, 1, hold=[5], listener=at)
    (rewind,) = decided(url, "rewind")
    assert rewind["skips"] == [[2, (rewind["step"] - 2) * BATCH]]
    assert fingerprint != undisturbed(())
    report = load(str(url))
    assert report.ok, report.as_dict()
    assert [(span.first_step, span.skipped) for span in report.summary.spans] == [(1, 0), (3, rewind["skip_samples"])]


@pytest.mark.parametrize(
    "before", tried_each_time(["the checkpoints are deleted"], ["it is on record", "the checkpoints are deleted"])
)
def test_a_driver_that_dies_on_the_way_back_has_gone_back_or_not(
    before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = tmp_path / "run"

    def die(*_: Any, **__: Any) -> None:
        raise Died

    def back(driver: Driver) -> None:
        record = driver._recorder.record
        if before == "the checkpoints are deleted":
            monkeypatch.setattr(driver._committer, "distrust", die)
        else:
            monkeypatch.setattr(
                driver._recorder,
                "record",
                lambda kind, *args, **how: (die if kind == "rewind" else record)(kind, *args, **how),
            )
        driver.rewind(2)

    listener = Listening(at_checkpoint(4), back, before=held(url, 5))
    with pytest.raises(Died):
        run(url, 1, hold=[5], listener=listener)
    assert bool(decided(url, "rewind")) == (before != "it is on record")
    there = max(ref.step for ref in list_checkpoints(open_storage(str(url))) if ref.complete)
    assert there >= 4
    fingerprint, then = run(url, 1)
    (started,) = [fields for kind, fields in then.entries if kind == "started"]
    assert started["resumed_after_step"] == (2 if decided(url, "rewind") else there)
    assert fingerprint == undisturbed(())
