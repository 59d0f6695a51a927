"""Chaos: the faults that it parses, its times, and that a run survives it and reports the deliberate faults."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.checkpoint import newest_complete, open_storage
from raysharded.errors import ConfigError, RunFailed
from raysharded.journal.entry_text import incident_text
from raysharded.report import load
from raysharded.testing import Chaos, FaultPlan, chaos_for
from raysharded.testing.hazards import Hazard, moments, parse_hazards
from raysharded.testing.processes import ProcessLauncher
from tests.ray.leftovers import wait_until
from tests.training.harness import GptTask, Tokens, train


def small(storage: str) -> rs.ElasticTrainer:
    return rs.ElasticTrainer(
        task=GptTask(),
        data=Tokens(),
        batch=rs.BatchConfig(global_batch_size=16, microbatch_size=2, seed=5),
        scaling=rs.ScalingConfig(num_workers=(1, 3)),
        run=rs.RunConfig(
            name="run",
            storage_path=storage,
            max_steps=1_000_000,
            failure=rs.FailureConfig(progress_timeout_s=30.0, task_error_retries=10),
        ),
    )


def test_the_text_of_hazards_is_understood() -> None:
    assert parse_hazards("kill:every=30s, stop:every=2m,slow:every=500ms:seconds=1.5,term:every=1h,drop:every=7") == (
        Hazard(kind="kill", every_s=30.0),
        Hazard(kind="stop", every_s=120.0),
        Hazard(kind="slow", every_s=0.5, seconds=1.5),
        Hazard(kind="term", every_s=3600.0),
        Hazard(kind="drop", every_s=7.0),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no fault; give some, as in"),
        ("explode:every=1s", "there is no fault 'explode'; choose one of kill, stop"),
        ("kill", "does not set an interval: add every=, as in kill:every=30s"),
        ("kill:every=soon", "every='soon' is invalid"),
        ("kill:every=0s", "every='0s' is invalid"),
        ("kill:every=1s:often", "'often' is an invalid setting"),
        ("kill:every=1s:minutes=3", "'minutes=3' is an invalid setting"),
    ],
)
def test_what_is_not_understood_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_hazards(text)


def test_hazards_strike_about_as_often_as_configured_at_the_same_moments_for_the_same_seed() -> None:
    hazards = parse_hazards("kill:every=10s,stop:every=40s")
    first, again, other = (list(itertools.islice(moments(hazards, seed), 500)) for seed in (1, 1, 2))
    assert first == again != other
    assert [at for at, _ in first] == sorted(at for at, _ in first)
    counts = Counter(hazard.kind for _, hazard in first)
    elapsed = first[-1][0]
    assert counts["kill"] == pytest.approx(elapsed / 10, rel=0.1)
    assert counts["stop"] == pytest.approx(elapsed / 40, rel=0.1)


def test_what_workers_do_to_themselves_needs_a_plan_that_listens(tmp_path: Path) -> None:
    run: Any = None
    with pytest.raises(ConfigError, match="listens=True"):
        Chaos(run, "stuck:every=1s")
    with pytest.raises(ConfigError, match="listens=True"):
        Chaos(run, "stuck:every=1s", plan=FaultPlan(faults=(), folder=str(tmp_path)))


def test_what_workers_do_to_themselves_needs_a_storage_that_they_see_as_files(tmp_path: Path) -> None:
    remote, local = small("memory://chaos"), small(str(tmp_path))
    with pytest.raises(ConfigError, match="storage_path that is a folder"):
        chaos_for(remote, "kill:every=1s,stuck:every=1s")
    chaos_for(remote, "kill:every=1s")  # signals need none
    chaos_for(local, "stuck:every=1s")
    first = local.faults.folder
    chaos_for(local, "stuck:every=1s")
    assert local.faults.listens
    assert local.faults.folder != first  # older orders do not count now


def test_the_live_line_distinguishes_injected_faults_from_real_ones() -> None:
    fields = {"fault": "slow", "worker": 3, "step": 12, "seconds": 5.0}
    assert incident_text("chaos", fields) == "step 12: chaos: slow for 5.00 s for worker 3"


@pytest.mark.procs
@pytest.mark.alone
def test_a_run_survives_chaos_with_the_same_bits_and_its_report_lists_what_was_injected(tmp_path: Path) -> None:
    trainer = small(str(tmp_path))
    trainer.faults = plan = FaultPlan(faults=(), folder=str(tmp_path), listens=True)
    run = trainer.start_with(ProcessLauncher)
    with Chaos(run, "kill:every=3s,slow:every=3s:seconds=0.3,raise:every=3s", plan=plan) as chaos:
        wait_until(lambda: {struck.kind for struck in chaos.struck} == {"kill", "slow", "raise"}, "all kinds", 120)
    newest = run.status().step
    wait_until(lambda: run.status().step >= newest + 3, "going on")
    run.stop(checkpoint=True)
    with pytest.raises(RunFailed, match="Stopped"):
        run.wait(240)
    report = load(trainer.url)
    injected = [event for event in report.summary.worker_events if event.what == "injected"]
    assert [(event.worker, event.reason.split()[0]) for event in injected] == [
        (struck.worker, struck.kind) for struck in chaos.struck
    ]
    lost = {event.worker for event in report.summary.worker_events if event.what == "lost"}
    assert {event.worker for event in injected if event.reason == "kill"} <= lost
    assert report.ok
    saved = newest_complete(open_storage(trainer.url)).checkpoint
    assert saved is not None
    assert saved.manifest.metadata["fingerprint"] == train(1, steps=saved.step, microbatches=8).fingerprint
