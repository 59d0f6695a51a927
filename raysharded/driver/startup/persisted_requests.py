"""What people asked of a run last, by its journal: so that a later driver keeps to it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def asked_last(
    entries: Iterable[Mapping[str, Any]], scaling: object, kind: str, what: Callable[[Mapping[str, Any]], T]
) -> T | None:
    """`what` the newest entry of this kind says, of drivers that had this configuration of their workers, as this one
    has; None: nobody asked, or it was configured otherwise since.

    One after which the run failed before it did a step does not count, but what was asked for before it: every driver
    would fail in the same way.
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
    """Whether the last word on it is that the run is to be paused. A generation that was formed to train, and the
    run's end, are other words; so is a driver that has started its workers anew: the first one that is ready then, with
    none taken over, says so."""
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
    """Node id -> within how many seconds its workers were to leave; of the nodes that were drained since workers were
    last started anew."""
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
