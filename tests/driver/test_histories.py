"""The driver's decisions are those of the time when thousands of histories were recorded.

`python -m tests.driver.histories` records them, and shows differences. `make test` runs the first shard of them, `make
test-long` all.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from raysharded.driver.handlers import worker_loss
from raysharded.driver.state.commands import Outcome
from raysharded.driver.state.state import State
from raysharded.protocol.worker_launcher import WorkerLost
from tests.driver import histories
from tests.driver.frozen import (
    FOLDER,
    SHARD,
    WINDOW,
    Difference,
    Digests,
    History,
    difference,
    from_json,
    moments_of,
    num_shards,
    read_digests,
    read_drawn,
    to_json,
)
from tests.driver.shown import difference_text
from tests.paths import ROOT

PARTS = 16
"""Cases of a shard, so that two processes share it."""


@cache
def shard_of(shard: int) -> list[tuple[History, Digests]]:
    return list(zip(read_drawn(shard), read_digests(shard), strict=True))


def check(pairs: list[tuple[History, Digests]]) -> None:
    found = [one for one in (difference(history, recorded) for history, recorded in pairs) if one is not None]
    if found:
        pytest.fail(difference_text(found, len(pairs)), pytrace=False)


@pytest.mark.parametrize("part", range(PARTS))
def test_what_the_driver_decides_is_what_was_recorded(part: int) -> None:
    check(shard_of(0)[part::PARTS])


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("shard", range(1, num_shards()))
def test_what_the_driver_decides_in_all_other_histories_is_what_was_recorded(shard: int, part: int) -> None:
    check(list(zip(read_drawn(shard), read_digests(shard), strict=True))[part::PARTS])


def test_twenty_thousand_histories_of_all_kinds_are_kept_in_less_than_ten_megabytes() -> None:
    assert num_shards() * SHARD >= 20_000
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 10e6
    kinds = Counter(history.kind for history, _ in shard_of(0))
    assert kinds == {kind: round(share * SHARD) for kind, (share, _) in histories.KINDS.items()}
    assert [history.number for history, _ in shard_of(0)] == list(range(SHARD))
    assert [recorded.history for _, recorded in shard_of(0)] == list(range(SHARD))


def test_a_history_is_read_as_it_was_drawn() -> None:
    for history, _ in shard_of(0)[:100]:
        assert from_json(json.loads(json.dumps(to_json(history)))) == history


# -- a difference is found --


@cache
def long_one() -> tuple[History, Digests]:
    return next(pair for pair in shard_of(0) if 2 * WINDOW < pair[1].events < 4 * WINDOW)


def found_with(recorded: Digests) -> Difference:
    found = difference(long_one()[0], recorded)
    assert found is not None
    return found


def test_the_first_events_that_differ_are_found_and_shown() -> None:
    history, recorded = long_one()
    windows = (recorded.windows[0], "0" * 16, *recorded.windows[2:])
    found = found_with(replace(recorded, windows=windows))
    assert (found.first, len(found.moments)) == (WINDOW + 1, WINDOW)
    assert list(found.moments) == moments_of(history)[WINDOW : 2 * WINDOW]
    text = difference_text([found], 125)
    assert f"1 of 125 frozen histories are not as they were recorded: {history.number}." in text
    assert f"history {history.number} ({history.kind}), which differs in events 51 to 100 of {recorded.events}" in text
    assert f"python -m tests.driver.histories compare {history.number}" in text


def test_a_history_that_ends_sooner_or_later_than_it_did_is_found() -> None:
    _, recorded = long_one()
    longer = found_with(replace(recorded, windows=(*recorded.windows, "0" * 16), events=recorded.events + WINDOW))
    assert longer.moments == ()
    assert "Today it ends before that." in difference_text([longer], 1)
    assert found_with(replace(recorded, windows=recorded.windows[:1])).first == WINDOW + 1
    assert found_with(replace(recorded, digest="0" * 32)).moments == ()


def first_found() -> Difference:
    every = (difference(history, recorded) for history, recorded in shard_of(0)[:200])
    return next(one for one in every if one is not None)


def test_commands_in_another_order_are_found_where_the_handler_gave_them(monkeypatch: pytest.MonkeyPatch) -> None:
    original = worker_loss.on_lost

    def other_order(state: State, event: WorkerLost, at: float) -> Outcome:
        state, commands = original(state, event, at)
        return state, commands[::-1]

    monkeypatch.setattr(worker_loss, "on_lost", other_order)
    found = first_found()
    lost = [moment for moment in found.moments if moment.event[0] == "lost" and len(moment.commands) > 1]
    assert lost
    assert "lost worker=" in difference_text([found], 200)


def test_a_driver_that_fails_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(state: State, event: WorkerLost, at: float) -> Outcome:
        raise LookupError("no such worker")

    monkeypatch.setattr(worker_loss, "on_lost", fails)
    assert "raised LookupError: no such worker" in difference_text([first_found()], 200)


def test_a_history_is_compared_with_the_driver_of_another_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("raysharded", "tests/driver"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "tests" / "paths.py", tmp_path / "tests")
    machine = tmp_path / "raysharded" / "driver" / "machine.py"
    machine.write_text(machine.read_text() + "\n\n_step = step\nstep = lambda *event: (_step(*event)[0], [])\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=me", "-c", "user.email=me@localhost"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"], ["tag", "mute"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(histories, "ROOT", tmp_path)
    lines = list(histories._compared(long_one()[0], "mute"))
    assert lines[0].startswith(f"history {long_one()[0].number} ({long_one()[0].kind}): mute with today's tests")
    assert any(line.startswith("    mute   orders nothing") for line in lines)
    assert any(line.startswith("    today  orders ") and not line.endswith("nothing") for line in lines)
