"""The demo's verdict: it holds only if every promise did."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from raysharded.demo.outcome import Outcome, Training, show
from raysharded.demo.run import run_demo, standard_library_sources
from raysharded.errors import ConfigError
from tests.report.entries import Entry, data, finished, generation, recovery, started, step, write_run

FIELDS = {
    "steps",
    "workers_by_step",
    "recoveries",
    "samples_lost",
    "samples_repeated",
    "fingerprint",
    "fingerprint_undisturbed",
    "identical",
    "tokens_per_s",
}
RECOVERY_FIELDS = {
    "worker",
    "found_s",
    "abort_s",
    "wait_s",
    "reshard_s",
    "first_step_s",
    "total_s",
    "steps_redone",
    "source",
}


def training(folder: Path, entries: list[Entry], kills: list[tuple[float, tuple[int, ...]]]) -> Training:
    return Training(fingerprint="f" * 32, entries=entries, kills=kills, url=write_run(folder, entries))


def disturbed(folder: Path, source: str = "memory") -> Training:
    entries = [
        *[started(), data(), *generation(1, [0, 1, 2, 3], 0, "start"), step(1, 4)],
        *[*generation(2, [0, 2, 3], 1), step(2, 3, 2), recovery(1, 1, 1, found_at=12.5), step(3, 3, 2)],
        *[*generation(3, [0, 4, 2, 3], 3), step(4, 4, 3)],
        *[*generation(4, [4, 3], 4), step(5, 2, 4), recovery(0, 4, lost=[0, 2], found_at=20.0, source=source)],
        *[step(6, 2, 4), finished(6)],
    ]
    return training(folder / "disturbed", entries, [(12.0, (1,)), (19.9, (0, 2))])


def undisturbed(folder: Path) -> Training:
    entries = [started(), data(), *generation(1, [0, 1], 0, "start"), *[step(n) for n in range(1, 7)], finished(6)]
    return training(folder / "undisturbed", entries, [])


def test_a_demo_in_which_all_held_reports_success_and_gives_its_data(tmp_path: Path) -> None:
    outcome = Outcome.of(disturbed(tmp_path), undisturbed(tmp_path), steps=6)
    assert outcome.held, outcome.problems
    found = json.loads(json.dumps(outcome.as_dict()))
    assert found.keys() >= FIELDS
    assert all(entry.keys() == RECOVERY_FIELDS for entry in found["recoveries"])
    assert found["workers_by_step"] == [4, 3, 3, 4, 2, 2]
    assert [entry["worker"] for entry in found["recoveries"]] == [[1], [0, 2]]
    assert found["recoveries"][0]["found_s"] == pytest.approx(0.5)
    assert found["recoveries"][0]["total_s"] == pytest.approx(0.5 + 0.7)
    out = StringIO()
    show(outcome, Console(file=out, width=160))
    assert "Weights identical: yes" in out.getvalue()


def test_other_weights_are_a_broken_promise(tmp_path: Path) -> None:
    other = undisturbed(tmp_path)
    other.fingerprint = "0" * 32
    outcome = Outcome.of(disturbed(tmp_path), other, steps=6)
    assert not outcome.identical
    assert outcome.problems == ("the weights differ",)


def test_a_kill_that_did_not_happen_is_a_broken_promise(tmp_path: Path) -> None:
    first = disturbed(tmp_path)
    del first.kills[1]
    assert not Outcome.of(first, undisturbed(tmp_path), steps=6).held


def test_going_back_to_a_checkpoint_is_a_broken_promise(tmp_path: Path) -> None:
    outcome = Outcome.of(disturbed(tmp_path, source="checkpoint"), undisturbed(tmp_path), steps=6)
    assert outcome.problems == ("a recovery was not made from the survivors' memory",)


def test_after_chaos_only_bits_and_samples_count_and_that_something_struck(tmp_path: Path) -> None:
    first = disturbed(tmp_path, source="checkpoint")
    first.kills = [(1.0, (9,))]
    assert Outcome.of(first, undisturbed(tmp_path), steps=6, chaos=True).held
    first.kills = []
    problems = Outcome.of(first, undisturbed(tmp_path), steps=6, chaos=True).problems
    assert problems == ("no fault struck; let them come more often, or give more steps (--steps)",)


def test_chaos_that_the_demo_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="--chaos: stuck is not for the demo; give kill, stop, term, slow"):
        run_demo(json_path=None, steps=None, workers=None, storage=None, chaos="stuck:every=1s")


def test_a_sample_that_was_read_twice_is_a_broken_promise(tmp_path: Path) -> None:
    entries = [started(), data(), *generation(1, [0, 1], 0, "start"), *[step(n) for n in range(1, 6)]]
    wrong = training(tmp_path / "wrong", [*entries, step(6, digest=["00", "01"], reads=5)], [])
    outcome = Outcome.of(disturbed(tmp_path), wrong, steps=6)
    assert outcome.problems == ("samples: 0 lost, 1 repeated",)


def test_the_demo_trains_on_the_interpreters_own_library() -> None:
    sources = standard_library_sources()
    assert any(path.endswith("/asyncio/base_events.py") for path in sources)
    assert not any("site-packages" in path for path in sources)


def test_too_few_workers_for_the_demo_are_refused() -> None:
    with pytest.raises(ConfigError, match="give 4 or more"):
        run_demo(json_path=None, steps=None, workers=2, storage=None)
