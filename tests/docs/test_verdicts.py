"""Verdicts in docs/report.md: each kind with all of its fields, a line for people, and an alert that exists."""

from __future__ import annotations

import re

import pytest

from raysharded.journal.entry_text import incident_text
from raysharded.metrics import alert_rules
from raysharded.report.history.incidents import KINDS
from tests.docs.blocks import page
from tests.golden import persisted

_ABOUT = ("node", "storage", "checkpoint", "straggler", "task", "waiting")
"""Kinds of incidents that are verdicts; those of workers are only so in part."""
_ASKED = {"drain"}
_SHOWN_MEANWHILE = {"storage_failing"}
"""Shown to people, and in no journal."""

_FIELDS_MADE_ELSEWHERE = {
    "gcs_lost": {"step", "for_s", "left_s"},
    "entries_dropped": {"entries", "steps", "first_step", "last_step"},
}
"""Kinds whose fields the list of persisted strings does not have: they are put together in another function."""


def verdicts() -> dict[str, tuple[set[str], str]]:
    """Kind -> (fields, alert) of each row."""
    text = page("report.md").read_text(encoding="utf-8")
    table = text.partition("## Verdicts in the journal")[2].partition("\n## ")[0]
    found = {}
    for row in re.findall(r"^\| [^|]+\| `(\w+)` \|([^|]+)\|([^|]*)\|$", table, re.MULTILINE):
        kind, fields, alert = row
        found[kind] = set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", fields))), alert.strip()
    return found


def test_every_verdict_of_the_driver_has_a_row() -> None:
    meant = {kind for kind, about in KINDS.items() if about in _ABOUT} - _ASKED - _SHOWN_MEANWHILE
    assert meant | {"worker_died", "repeated_death", "stuck", "generation"} == verdicts().keys()


@pytest.mark.parametrize("kind", sorted(verdicts()))
def test_a_row_has_the_fields_that_are_written(kind: str) -> None:
    fields, alert = verdicts()[kind]
    written = set(persisted.kept()[persisted.ENTRIES].get(kind, ())) - {"at", "kind"}
    if kind == "generation":
        assert fields <= written
    else:
        assert fields == (_FIELDS_MADE_ELSEWHERE.get(kind) or written)
    assert incident_text(kind, _example(fields)) is not None, "a line for people, from these fields alone"
    for name in re.findall(r"`(Raysharded\w+)`", alert):
        assert f"alert: {name}\n" in alert_rules()


def _example(fields: set[str]) -> dict[str, object]:
    values: dict[str, object] = dict.fromkeys(fields, 1)
    values |= {"pairs": [[0, 2]], "nodes": [["a", "b"]], "excluded": [2], "reasons": ["died"], "stderr": ["last"]}
    values |= dict.fromkeys(("node", "host", "phase", "missing", "setting", "error", "reason", "cause"), "text")
    return {name: value for name, value in values.items() if name in fields}
