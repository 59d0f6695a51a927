"""Runs of real workers with faults of every kind, told to today's driver: it decides as it did, and today's readers
make of their journals what they made then. `record_runs` made them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from raysharded.checkpoint import open_storage
from raysharded.driver.handlers import hang_watchdog
from raysharded.driver.state.commands import Command, Record
from raysharded.driver.state.events import Event
from raysharded.journal import log
from raysharded.journal.reader import read_segments
from tests.golden import recordings
from tests.paths import ROOT

_SHOWN = 12


def differences(name: str) -> list[str]:
    """What the machine decides otherwise today, in a recorded run."""
    return [f"{name}: {found}" for replay in recordings.replays(name) for found in replay.differences]


@pytest.mark.parametrize("name", recordings.names())
def test_the_driver_decides_as_it_did_and_readers_read_what_they_read(name: str, tmp_path: Path) -> None:
    found = differences(name)
    assert not found, (
        f"{len(found)} differences in the recorded run {name!r}:\n" + "\n".join(found[:_SHOWN]) + "\n"
        "If the driver is meant to decide otherwise: `python -m tests.golden.record_runs` records it anew, in a commit "
        "of its own."
    )
    run = recordings.unpack(name, tmp_path)
    changes = recordings.changes(recordings.kept_rendering(name), recordings.rendering(run, recordings.replays(name)))
    assert not changes, (
        f"of the recorded run {name!r} something else is made (-: kept, +: now):\n" + "\n".join(changes[:_SHOWN]) + "\n"
        "If that is meant: `python -m tests.golden.record_runs --render`, in a commit of its own."
    )


def test_what_is_made_of_a_run_may_be_more_and_not_less_or_something_else() -> None:
    kept = "generation = 1\nok = true\n"
    assert recordings.changes(kept, "generation = 1\nnews = []\nok = true\n") == []
    assert recordings.changes(kept, "generation = 1\n") == ["-ok = true"]
    assert recordings.changes(kept, "generation = 2\nok = true\n") == ["-generation = 1", "+generation = 2"]


def test_every_entry_is_read_as_its_line_says(tmp_path: Path) -> None:
    for name in recordings.names():
        storage = open_storage(str(recordings.unpack(name, tmp_path)))
        lines = [json.loads(line) for _, data in read_segments(storage) for line in data.decode().splitlines()]
        assert list(log.read(storage)) == [entry for entry in lines if entry["kind"] != "segment"]


def test_the_runs_have_every_event_and_every_command() -> None:
    moments = [
        moment for name in recordings.names() for replay in recordings.replays(name) for moment in replay.moments
    ]
    seen = {type(moment.event) for moment in moments} | {type(one) for moment in moments for one in moment.commands}
    missing = sorted(kind.__name__ for kind in {*get_args(Event), *get_args(Command)} - seen)
    assert not missing, f"no recorded run has {missing}: record one, in tests/golden/record_runs.py"


def test_nothing_of_the_machine_that_recorded_them_is_in_them() -> None:
    for name in recordings.names():
        text = b"".join(recordings.segments(name).values()).decode()
        for path in ("/tmp/", "/root/", str(ROOT), "/Users/", str(Path.home()) + "/"):
            assert path not in text, f"{name} has a path below {path}"
    packed = sum(path.stat().st_size for path in recordings.RUNS.iterdir())
    assert packed < 1_000_000


def test_another_decision_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a handler of the driver were changed: a straggler has no node any more."""
    name, slow = "a-slow-worker-is-replaced", hang_watchdog._straggler

    def without_node(*args: Any) -> Record:
        record = slow(*args)
        return replace(record, fields={key: value for key, value in record.fields.items() if key != "node"})

    assert not differences(name)
    recordings.replays.cache_clear()
    with monkeypatch.context() as changed:
        changed.setattr(hang_watchdog, "_straggler", without_node)
        found = differences(name)
    recordings.replays.cache_clear()
    assert found
    assert all('straggler: node is "node-a"; the machine writes missing' in one for one in found)
