"""Records of single journal entries. Pure.

All functions raise KeyError, TypeError or ValueError for an entry that lacks a required field of its kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from raysharded.journal.records import AvoidedNode, CheckpointRecord, Recovery

Entry = Mapping[str, Any]


def recovery(entry: Entry, at: float) -> Recovery:
    return Recovery(
        lost=tuple(map(int, entry["lost"])),
        reasons=tuple(map(str, entry["reasons"])),
        workers_before=int(entry["workers_before"]),
        workers_after=int(entry["workers_after"]),
        found_at=float(entry["found_at"]),
        abort_s=float(entry["abort_s"]),
        wait_s=float(entry.get("wait_s", 0.0)),
        reshard_s=float(entry["reshard_s"]),
        first_step_s=float(entry["first_step_s"]),
        total_s=float(entry["total_s"]),
        steps_redone=int(entry["steps_redone"]),
        source=str(entry["source"]),
        resumed_after_step=int(entry["resumed_after_step"]),
        at=at,
    )


def avoided_node(entry: Entry, at: float) -> AvoidedNode:
    return AvoidedNode(
        node=str(entry["node"]),
        host=str(entry.get("host", "")),
        step=int(entry["step"]),
        failures=int(entry["failures"]),
        reasons=tuple(map(str, entry["reasons"])),
        at=at,
    )


def checkpoint(entry: Entry, at: float) -> CheckpointRecord:
    late = entry["kind"] == "checkpoint_late"
    return CheckpointRecord(
        step=int(entry["step"]),
        prefix=str(entry.get("prefix", "")),
        fingerprint=str(entry.get("fingerprint", "")),
        problem=_why_late(entry) if late else str(entry.get("error", entry.get("reason", ""))),
        at=at,
        size_bytes=whole_or_none(entry.get("bytes")),
        num_files=whole_or_none(entry.get("files")),
        seconds=float(entry.get("seconds", math.nan)),
        retries=int(entry.get("retries", 0)),
        late=late,
    )


def whole_or_none(value: Any) -> int | None:
    """A field that may be missing. Raises TypeError or ValueError unless it is a number."""
    return None if value is None else int(value)


def blocks(value: Any) -> tuple[int, int]:
    """(samples per block, samples per step). Raises TypeError or ValueError unless they are two numbers."""
    samples, batch = value
    return int(samples), int(batch)


def _why_late(entry: Entry) -> str:
    which = f"the one of step {entry['writing']}" if "writing" in entry else "the one before"
    return f"left out: {which} was still being written"
