"""The findings of the trials of `benchmarks.recovery`, as lines of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.incidents import Incident
from benchmarks.result import NOT_SEEN, Line, ratios
from benchmarks.subjects import OURS

NAME = "recovery"
LIMIT_S = 120.0
"""The wait for a subject to get beyond the broken step ends then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The cost of a planned change of the number of workers."""

    until_s: float
    """From the request to the first step of the new number of workers."""
    pause_s: float
    """The longest time between two new steps on the way, less a normal step before."""
    steps_again: int
    samples_lost: int
    samples_repeated: int
    loss_difference: float | None


_ROWS = {  # of an incident: (its words, unit)
    "found_s": ("found", "s"),
    "stopped_s": ("survivors stopped", "s"),
    "restored_s": ("state restored", "s"),
    "first_step_s": ("first step done", "s"),
    "beyond_s": ("progress beyond the broken step", "s"),
    "extra_s": ("progress beyond the broken step, less a normal step", "s"),
    "steps_again": ("steps computed again", "steps"),
    "samples_lost": ("samples lost", "samples"),
    "samples_repeated": ("samples repeated", "samples"),
    "loss_difference": ("largest loss difference to the undisturbed run", ""),
    "workers_after": ("workers at the first new step", "workers"),
    "normal_step_s": ("normal step before it", "s"),
}
_OF_PROGRESS = ("steps_again", "samples_lost", "samples_repeated", "loss_difference", "workers_after")
"""Fields without a meaning for a subject that was not seen beyond the broken step."""
_ASKED: dict[tuple[str, str], str] = {
    ("SIGKILL", "extra_s"): "at most 0.7",
    ("SIGKILL", "steps_again"): "exactly 0",
    ("SIGKILL", "samples_lost"): "exactly 0",
    ("SIGKILL", "samples_repeated"): "exactly 0",
    ("SIGKILL", "loss_difference"): "exactly 0",
}
_PLANNED_ROWS = {
    "until_s": ("first step of the new number", "s"),
    "pause_s": ("longest pause between new steps, less a normal step", "s"),
    "steps_again": ("steps computed again", "steps"),
    "samples_lost": ("samples lost", "samples"),
    "samples_repeated": ("samples repeated", "samples"),
    "loss_difference": ("largest loss difference to the undisturbed run", ""),
}


def incident_lines(fault: str, subject: str, found: Sequence[Incident]) -> list[Line]:
    """All rows of one subject and fault."""
    lines = []
    for name, (words, unit) in _ROWS.items():
        seen = [None if name in _OF_PROGRESS and one.beyond_s is None else getattr(one, name) for one in found]
        values = [float(value) for value in seen if value is not None]
        late = sum(one.beyond_s is None for one in found)
        note = NOT_SEEN
        if name in ("beyond_s", "extra_s", "first_step_s") and late:
            note = f"> {LIMIT_S:.0f} s in {late} of {len(found)}: not waited for any longer"
        asked = _ASKED.get((fault, name)) if subject == OURS.name else None
        lines.append(
            Line(
                benchmark=NAME,
                what=f"{fault}: {words}",
                subject=subject,
                unit=unit,
                values=values,
                asked=asked,
                note=note if len(values) < len(seen) or not seen else "",
            )
        )
    return lines


def compared_lines(fault: str, found: Mapping[str, Sequence[Incident]]) -> list[Line]:
    """The ratio of each peer's time until progress to ours, pair by pair; one that was cut off counts with the
    limit."""
    ours = [_beyond(one) for one in found.get(OURS.name, ())]
    lines = []
    for name, incidents in found.items():
        theirs = [_beyond(one) for one in incidents]
        pairs = min(len(ours), len(theirs))
        if name == OURS.name or not pairs:
            continue
        late = any(one.beyond_s is None for one in incidents)
        lines.append(
            Line(
                benchmark=NAME,
                what=f"{fault}: how many times as long until progress beyond the broken step",
                subject=name,
                unit="",
                values=theirs[:pairs],
                ratio=ratios(theirs[:pairs], ours[:pairs]),
                against=f"over {OURS.name}",
                asked="at least 8" if fault == "SIGKILL" else None,
                note=f"at least: it was not waited for longer than {LIMIT_S:.0f} s" if late else "",
            )
        )
    return lines


def _beyond(one: Incident) -> float:
    return LIMIT_S if one.beyond_s is None else one.beyond_s


def planned_lines(what: str, subject: str, found: Sequence[Planned | None]) -> list[Line]:
    """All rows of one subject and change; None stands for a change that was not done within the limit."""
    lines = []
    late = sum(one is None for one in found)
    for name, (words, unit) in _PLANNED_ROWS.items():
        values = [float(value) for one in found if one and (value := getattr(one, name)) is not None]
        note = "" if values else NOT_SEEN
        if name in ("until_s", "pause_s") and late:
            note = f"> {LIMIT_S:.0f} s in {late} of {len(found)}: not waited for any longer"
        whole = f"{what}: {words}"
        lines.append(Line(benchmark=NAME, what=whole, subject=subject, unit=unit, values=values, note=note))
    return lines
