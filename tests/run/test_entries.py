"""The newest entries of a run, as its followers get them."""

from __future__ import annotations

import threading

import pytest

from raysharded.run.local import EntryBuffer
from raysharded.run.process_hooks import submission_id


def filled(count: int, first: int = 1, **limits: int) -> EntryBuffer:
    entries = EntryBuffer(first, wall=lambda: 7.0, **limits)
    for step in range(1, count + 1):
        entries.add("step", {"step": step})
    return entries


def test_every_follower_gets_every_entry_once_in_order_from_any_position() -> None:
    entries = filled(10, at_once=4)
    seen: list[int] = []
    while new := entries.after(seen[-1] if seen else 0, 0.0):
        assert len(new) <= 4
        seen += [number for number, _, _ in new]
    assert seen == list(range(1, 11))
    assert entries.after(9, 0.0) == [(10, "step", {"at": 7.0, "step": 10})]


def test_who_comes_late_gets_what_is_kept() -> None:
    assert [number for number, _, _ in filled(10, limit=3).after(2, 0.0)] == [8, 9, 10]


def test_numbers_continue_above_those_of_the_driver_before() -> None:
    assert [number for number, _, _ in filled(2, first=1001).after(37, 0.0)] == [1001, 1002]


def test_who_waits_is_woken_by_an_entry_and_by_the_end() -> None:
    entries = filled(1)
    timer = threading.Timer(0.05, entries.add, ("step", {"step": 2}))
    timer.start()
    assert [number for number, _, _ in entries.after(1, 60.0)] == [2]
    timer.join()
    timer = threading.Timer(0.05, entries.close)
    timer.start()
    assert entries.after(2, 60.0) == []
    timer.join()


def test_a_process_knows_its_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    assert submission_id() == ""
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"metadata": {"job_submission_id": "raysubmit_1"}}')
    assert submission_id() == "raysubmit_1"
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "what")
    assert submission_id() == ""
