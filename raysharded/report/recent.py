"""A run's members and newest incidents, from the end of its journal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from raysharded.checkpoint import Storage
from raysharded.journal import log
from raysharded.journal.entry_text import incident_text
from raysharded.report.history import incidents

_SEGMENTS = 128
"""Number of segments to read: ten minutes of a short run, an hour of a long one."""
_AT_ONCE = 16
_INCIDENTS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Recent:
    """The content of the newest segments."""

    members: tuple[int, ...]
    """Workers of the newest generation, by rank; empty if it is older than the segments read."""
    generation: int | None
    step_s: float | None
    """Wall time per step, over the newest consecutive steps of one generation."""
    incidents: tuple[tuple[float, str], ...]
    """The newest few incidents, oldest first: seconds since 1970, and one sentence."""
    last_segment: int
    """Number of the last segment; 0 if there is none."""


def read_recent(storage: Storage) -> Recent:
    """The recent history. Unreadable entries are ignored. Raises StorageError."""
    keys = sorted(key for key in storage.list(log.FOLDER) if key.endswith(".jsonl"))
    with ThreadPoolExecutor(_AT_ONCE, "raysharded-journal") as pool:
        found = [entry for part in pool.map(storage.read, keys[-_SEGMENTS:]) for entry in entries_of(part)]
    newest = next((entry for entry in reversed(found) if entry["kind"] == "generation"), None)
    happened = [(float(entry["at"]), text) for entry in found if (text := incident_line(entry)) is not None]
    return Recent(
        members=tuple(newest["members"]) if newest else (),
        generation=int(newest["generation"]) if newest else None,
        step_s=_step_s(found),
        incidents=tuple(happened[-_INCIDENTS:]),
        last_segment=int(keys[-1].rpartition("/")[2].split(".")[0]) if keys else 0,
    )


def entries_of(segment: bytes) -> list[dict[str, Any]]:
    """The entries of a segment, oldest first, without its head, a torn last line and lines that no driver wrote."""
    found = []
    for line in segment.decode(errors="replace").split("\n")[:-1]:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("kind", "segment") != "segment" and "at" in entry:
            found.append(entry)
    return found


def incident_line(entry: Mapping[str, Any]) -> str | None:
    """The sentence for an incident; None for other entries, and for those without the needed fields."""
    if entry["kind"] != "recovery" and not incidents.is_incident(entry):
        return None
    try:
        return incident_text(entry["kind"], entry)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return None


def _step_s(entries: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds per step of the newest steps since the last start of a generation."""
    done: list[tuple[int, float]] = []
    for entry in reversed(entries):
        if entry["kind"] in ("generation", "started", "rewind"):
            break
        if entry["kind"] == "step":
            done.append((int(entry["step"]), float(entry["at"])))
    if len(done) < 2 or done[0][0] <= done[-1][0]:
        return None
    return max(0.0, done[0][1] - done[-1][1]) / (done[0][0] - done[-1][0])
