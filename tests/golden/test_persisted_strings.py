"""Strings that lie on storage, and that scripts and dashboards match, stay. `persisted` makes their list."""

from __future__ import annotations

import pytest

from tests.golden import persisted, written


@pytest.fixture(scope="module")
def now() -> persisted.Strings:
    return persisted.observe()


@pytest.mark.procs
def test_every_string_that_was_ever_persisted_is_still_written(now: persisted.Strings) -> None:
    found = persisted.differences(persisted.kept(), now)
    assert not found, (
        "\n".join(found) + "\nWhat lies on storage is read by later versions, and scripts match the rest. If a string "
        "is to go, delete it from tests/golden/persisted-strings.json, in a commit of its own."
    )


def test_what_is_gone_is_named_with_the_place_that_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    where = {"driver/handlers/hang_watchdog.py:226"}
    sources = {"stuck": written.Written(where=where, fields={"reason"}), "pause": written.Written(where=where)}
    monkeypatch.setattr(written, "entries", lambda: sources)
    kept: persisted.Strings = {
        persisted.ENTRIES: {"stuck": ["deadline_s", "reason", "worker"], "segment": ["writer"], "pause": []},
        persisted.RECORDED: {"Ready": ["facts", "worker"]},
        "loggers": {"raysharded.host": "raysharded/run/hosted/driver_actor.py"},
    }
    now: persisted.Strings = {
        persisted.ENTRIES: {"stuck": ["worker"]},
        persisted.RECORDED: {"Ready": ["worker"]},
        "loggers": {"raysharded.hosts": "raysharded/run/hosted/driver_actor.py"},
    }
    assert persisted.differences(kept, kept) == []
    assert persisted.differences(kept, now) == [
        (
            f"{persisted.ENTRIES}: 'stuck' has no field 'deadline_s' any more "
            "(written by driver/handlers/hang_watchdog.py:226)"
        ),
        "fields of journal entries, by kind: the journal entry 'segment' is gone, with its fields writer",
        "fields of what a recording is told, by class: 'Ready' has no field 'facts' any more",
        "loggers: 'raysharded.host' is gone; it was written by raysharded/run/hosted/driver_actor.py",
    ]
    assert persisted.merged(kept, now)["loggers"] == {**kept["loggers"], **now["loggers"]}
