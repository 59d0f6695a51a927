"""The latest user requests in a run's journal, which a later driver keeps to. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def asked_last(
    entries: Iterable[Mapping[str, Any]], scaling: object, kind: str, what: Callable[[Mapping[str, Any]], T]
) -> T | None:
    """`what` of the newest entry of this kind; None without a request, or if the configuration changed since.

    Only entries of drivers count that had the same worker configuration as this one. An entry after which the run
    failed before it did a step does not count, because every driver would fail in the same way; the one before it does.
    """
    asked: T | None = None
    proven: T | None = None
    configured: object = None
    was_formed = False
    for entry in entries:
        match entry["kind"]:
            case "started":
                asked, proven = (asked, proven) if entry.get("scaling") == configured else (None, None)
                configured = entry.get("scaling")
            case found if found == kind:
                asked = what(entry)
                was_formed = False
            case "generation":
                was_formed = True
            case "step" if was_formed:
                proven = asked
            case "failed" if was_formed:
                asked = proven
    return asked if configured == scaling else None


def is_paused(entries: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the run is to be paused, according to the newest entry that decides it.

    A generation formed to train, and the run's end, end a pause. So does a driver that started its workers anew: its
    first ready worker, with none taken over, shows that.
    """
    paused = since_started = workers_are_known = False
    for entry in entries:
        match entry["kind"]:
            case "started":
                since_started = workers_are_known = False
            case "taken_over" if entry["workers"]:
                workers_are_known = True
            case "worker_ready" if not workers_are_known:
                paused, workers_are_known = since_started, True
            case "pause":
                paused = since_started = True
            case "generation":
                paused = paused and bool(entry.get("paused"))
            case "resume" | "pause_refused" | "finished" | "failed" | "stopped":
                paused = False
    return paused


def drained(entries: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Node id -> seconds in which its workers were to leave: nodes drained since workers were last started anew."""
    found: dict[str, float] = {}
    since_started: dict[str, float] = {}
    are_the_same = True
    for entry in entries:
        match entry["kind"]:
            case "started":
                since_started, are_the_same = {}, False
            case "taken_over" if entry["workers"]:
                are_the_same = True
            case "generation" if not are_the_same:
                found, are_the_same = since_started, True
            case "drain":
                told = dict.fromkeys(entry["nodes"], float(entry["within_s"]))
                found, since_started = found | told, since_started | told
    return found
