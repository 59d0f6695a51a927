"""A run's members and newest incidents, from the end of its journal."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from raysharded.checkpoint import Storage
from raysharded.checkpoint.format.limits import MAX_NUMBER
from raysharded.checkpoint.format.signed_json import MAX_SECONDS
from raysharded.journal import log
from raysharded.journal.entry_text import incident_text
from raysharded.report.history import incidents

_SEGMENTS = 128
"""Number of segments to read: ten minutes of a short run, an hour of a long one."""
_AT_ONCE = 16
_INCIDENTS = 5
_OLDER = 4096
"""Number of segments before them that are searched for the newest members and their processes: a day and more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recent:
    """The content of the newest segments."""

    members: tuple[int, ...]
    """Workers of the newest generation, by rank; empty if it is far older than the segments read."""
    generation: int | None
    pids: Mapping[int, int]
    """Member -> process id on its node, as far as known."""
    nodes: Mapping[int, str]
    """Member -> the host name of its node, as far as known."""
    ready_at: Mapping[int, float]
    """Member -> the time when it was ready, by the driver's clock."""
    step_s: float | None
    """Wall time per step, over the newest consecutive steps of one generation."""
    incidents: tuple[tuple[float, str], ...]
    """The newest few incidents, oldest first: seconds since 1970, and one sentence."""
    last_segment: int
    """Number of the last segment; 0 if there is none."""


def read_recent(storage: Storage) -> Recent:
    """The recent history. Unreadable entries are ignored. Raises StorageError."""
    return RecentReader(storage).read()


class RecentReader:
    """Reads the recent history again and again: every segment once. Not thread-safe."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._window: deque[list[dict[str, Any]]] = deque(maxlen=_SEGMENTS)
        """Entries of the newest segments."""
        self._last_key = ""
        self._generation: tuple[int, tuple[int, ...]] | None = None
        """The newest generation, and its members."""
        self._ready: dict[int, tuple[int, str, float]] = {}
        """Worker -> its process id, its node, and the time when it was ready last."""

    def read(self) -> Recent:
        """The recent history now, as `read_recent`."""
        keys = log.segment_keys(self._storage)
        is_first = not self._last_key
        for part in self._read([key for key in keys if key > self._last_key][-_SEGMENTS:]):
            self._window.append(entries_of(part))
            for entry in self._window[-1]:
                self._add(entry)
        self._last_key = keys[-1] if keys else ""
        if is_first:
            self._look_back(keys[:-_SEGMENTS])
        return self._recent()

    def _recent(self) -> Recent:
        found = [entry for entries in self._window for entry in entries]
        happened = [(float(entry["at"]), text) for entry in found if (text := incident_line(entry)) is not None]
        generation, members = self._generation or (None, ())
        known = {member: self._ready[member] for member in members if member in self._ready}
        return Recent(
            members=members,
            generation=generation,
            pids={member: pid for member, (pid, _, _) in known.items()},
            nodes={member: node for member, (_, node, _) in known.items()},
            ready_at={member: at for member, (_, _, at) in known.items()},
            step_s=_step_s(found),
            incidents=tuple(happened[-_INCIDENTS:]),
            last_segment=int(self._last_key.rpartition("/")[2].split(".")[0]) if self._last_key else 0,
        )

    def _add(self, entry: Mapping[str, Any]) -> None:
        with suppress(*log.DAMAGE):
            if entry["kind"] == "generation":
                self._generation = int(entry["generation"]), tuple(map(int, entry["members"]))
            elif entry["kind"] == "worker_ready":
                self._ready[int(entry["worker"])] = int(entry["pid"]), str(entry["node"]), float(entry["at"])

    def _look_back(self, keys: Sequence[str]) -> None:
        """Find the members and their processes in older segments, if they are not known."""
        for last in range(len(keys), max(0, len(keys) - _OLDER), -_SEGMENTS):
            if self._generation is not None and self._ready.keys() >= set(self._generation[1]):
                return
            for part in reversed(self._read(keys[max(0, last - _SEGMENTS) : last])):
                if b'"generation"' in part or b'"worker_ready"' in part:
                    self._add_older(entries_of(part))

    def _add_older(self, entries: Sequence[Mapping[str, Any]]) -> None:
        generation, ready = self._generation, dict(self._ready)
        for entry in entries:
            self._add(entry)
        self._generation, self._ready = generation or self._generation, {**self._ready, **ready}

    def _read(self, keys: Sequence[str]) -> list[bytes]:
        with ThreadPoolExecutor(_AT_ONCE, "raysharded-journal") as pool:
            return list(pool.map(self._read_one, keys))

    def _read_one(self, key: str) -> bytes:
        try:
            return log.read_segment(self._storage, key)
        except log.DamagedJournal:
            return b""


def entries_of(segment: bytes) -> list[dict[str, Any]]:
    """The entries of a segment, oldest first, without its head, a torn last line and lines that no driver wrote."""
    found = []
    for line in segment.decode(errors="replace").split("\n")[:-1]:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and _is_kind(entry.get("kind")) and _is_time(entry.get("at")):
            found.append(entry)
    return found


def _is_kind(value: object) -> bool:
    return isinstance(value, str) and value != "segment"


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value <= MAX_SECONDS


def incident_line(entry: Mapping[str, Any]) -> str | None:
    """The sentence for an incident; None for other entries, and for those without the needed fields."""
    if entry["kind"] != "recovery" and not incidents.is_incident(entry):
        return None
    try:
        return incident_text(entry["kind"], entry)
    except log.DAMAGE:
        return None


def _step_s(entries: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds per step of the newest steps since the last start of a generation."""
    done: list[tuple[int, float]] = []
    for entry in reversed(entries):
        if entry["kind"] in ("generation", "started", "rewind"):
            break
        if entry["kind"] == "step":
            with suppress(*log.DAMAGE):
                done.append((int(entry["step"]), float(entry["at"])))
    if len(done) < 2 or not 0 < done[0][0] - done[-1][0] <= MAX_NUMBER:
        return None
    return max(0.0, done[0][1] - done[-1][1]) / (done[0][0] - done[-1][0])
