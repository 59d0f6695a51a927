"""Journals that earlier versions wrote are read forever. Those in tests/golden/journals are never written again."""

from __future__ import annotations

import pytest

from raysharded.driver.replay.rerun import load
from raysharded.errors import StorageError
from tests.golden import persisted, recordings, written


def golden_kinds() -> dict[str, set[str]]:
    """Kind of entry -> fields, of all golden journals: of recorded runs, and of earlier versions."""
    found: dict[str, set[str]] = {}
    earlier = map(recordings.journal_segments, recordings.journal_names())
    for segments in [*map(recordings.segments, recordings.names()), *earlier]:
        for kind, fields in persisted.entries_of(segments).items():
            found.setdefault(kind, set()).update(fields)
    return found


@pytest.mark.parametrize("name", recordings.journal_names())
def test_a_journal_of_an_earlier_version_is_read_as_it_was(name: str) -> None:
    kept = recordings.rendering_of_journal(name).read_text(encoding="utf-8")
    changes = recordings.changes(kept, recordings.rendering(recordings.JOURNALS / name))
    assert not changes, (
        f"of tests/golden/journals/{name} something else is made (-: kept, +: now):\n" + "\n".join(changes[:12]) + "\n"
        "If that is meant: `python -m tests.golden.record_runs --render`, in a commit of its own."
    )


def test_a_recording_of_an_earlier_format_is_refused_with_the_version_that_reads_it() -> None:
    with pytest.raises(StorageError, match=r"a recording of format 1; .* Use the one that wrote it: 0\.1\.0"):
        load(str(recordings.JOURNALS / "2026-11-21-recorded"))


def test_every_kind_of_entry_that_is_written_is_in_a_golden_journal() -> None:
    golden = golden_kinds()
    missing = {kind: entry.where for kind, entry in written.entries().items() if kind not in golden}
    assert not missing, "\n".join(
        f"no golden journal has an entry {kind!r}, which {', '.join(sorted(where))} writes: record a run that has one, "
        "in tests/golden/record_runs.py"
        for kind, where in sorted(missing.items())
    )


def test_a_kind_that_no_golden_journal_has_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {**written.entries(), "an_eclipse": written.Written(where={"raysharded/driver/moon.py:7"})}
    monkeypatch.setattr(written, "entries", lambda: more)
    with pytest.raises(
        AssertionError, match=r"no golden journal has an entry 'an_eclipse', which raysharded/driver/moon"
    ):
        test_every_kind_of_entry_that_is_written_is_in_a_golden_journal()
