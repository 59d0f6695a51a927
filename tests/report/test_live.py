"""The display while a run continues."""

from __future__ import annotations

import math
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from raysharded.display.plain_text import brief, brief_error
from raysharded.journal.entry_text import incident_text
from raysharded.report.live.progress import LiveView, progress_text
from raysharded.report.live.tracker import Progress
from tests.report.entries import (
    Entry,
    ManualClock,
    avoided,
    checkpoint,
    failing,
    finished,
    generation,
    late,
    lost,
    recovery,
    run_with_a_loss,
    started,
    step,
)

TRAINING = Progress(doing="", step=41, max_steps=100, loss=2.5, rate=12_345.0, unit="tokens", workers=3, left_s=8000.0)
RECOVERED = (
    "recovered in 0.70 s, 3 to 2 workers: aborted 0.05 s, resharded 0.25 s, first step 0.40 s; "
    "1 step computed again, state from memory"
)


def show(
    entries: list[Entry], *, terminal: bool = False, step_s: float = 1.0, tokens_per_step: int | None = None
) -> str:
    out, clock = StringIO(), ManualClock()
    console = Console(file=out, width=120, force_terminal=terminal, color_system=None)
    with LiveView(console, 6, clock, tokens_per_step=tokens_per_step) as view:
        for kind, fields in entries:
            clock.now += step_s if kind == "step" else 0.0
            view.on_entry(kind, fields)
    return out.getvalue()


def test_the_line_has_step_loss_speed_workers_and_time_left() -> None:
    assert progress_text(TRAINING) == "step 41/100  loss 2.5000  12.3k tokens/s  3 workers  2 h 13 min left"
    assert progress_text(replace(TRAINING, left_s=0.2)).endswith("3 workers  1.00 s left")
    assert progress_text(replace(TRAINING, step=100, left_s=0.0)).endswith("3 workers")


def test_the_line_shows_what_is_done_instead_of_training() -> None:
    waiting = Progress(
        doing="starting workers: 1 ready",
        step=0,
        max_steps=100,
        loss=None,
        rate=math.nan,
        unit="steps",
        workers=0,
        left_s=math.nan,
    )
    assert progress_text(waiting) == "step 0/100  starting workers: 1 ready"


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (lost(3, 41), "worker 3 lost: the process died"),
        (
            recovery(3, 41, steps_redone=1),
            f"step 42: {RECOVERED}",
        ),
        (checkpoint(500), f"step 500: checkpoint committed, fingerprint {500:032x}"),
        (
            ("checkpoint", {"step": 5, "prefix": "p", "fingerprint": "ab", "bytes": 3 << 20, "seconds": 2.0}),
            "step 5: checkpoint committed, fingerprint ab, 3.0 MiB in 2.00 s",
        ),
        (late(5, writing=3), "step 5: checkpoint left out: that of step 3 is being written since 42 s"),
        (("checkpoint_late", {"step": 5}), "step 5: checkpoint left out: the one before is still being written"),
        (failing(9, newest=2), "step 9: 3 checkpoints in a row could not be written: NO CHECKPOINT SINCE STEP 2"),
        (failing(9, newest=0), "step 9: 3 checkpoints in a row could not be written: NO CHECKPOINT AT ALL"),
        (("checkpoint_failed", {"step": 5, "error": "disk full"}), "step 5: checkpoint not written: disk full"),
        (("checkpoint_skipped", {"step": 5, "reason": "damaged"}), "step 5: checkpoint passed over: damaged"),
        (("worker_refused", {"worker": 4, "node": "n", "reason": "CPU"}), "worker 4 on n refused: CPU"),
        (avoided(41), "step 41: node trainer-7 (4f6ad2aa) is avoided after 3 failures; the last: died again"),
        (generation(3, [0, 1], 41)[0], None),
        (
            ("generation", {**generation(3, [0, 1], 41)[0][1], "excluded": [2, 3]}),
            "step 41: continues without workers 2 and 3, which do not reach all others",
        ),
        (("generation", {**generation(3, [0, 1], 41)[0][1], "excluded": [2], "only_saves": True}), None),
        (("generation", {**generation(3, [0, 1], 41)[0][1], "excluded": [2], "hands_over": True}), None),
        (
            ("generation", {**generation(3, [0, 1], 41)[0][1], "excluded": [2]}),
            "step 41: continues without worker 2, which does not reach all others",
        ),
        (("start_failed", {"worker": 4, "reason": "no memory"}), "worker 4 did not start: no memory"),
        (started(40), "step 40: resuming from its checkpoint"),
        (started(0), None),
        (step(3), None),
        (step(3, evaluation={"loss": 1.5}), "step 3: evaluation: loss 1.5000"),
        (finished(6), f"step 6: finished, fingerprint {'f' * 32}"),
        (("failed", {"step": 6, "error": "TaskError: no"}), "step 6: failed"),
        (("stopped", {"step": 6}), "step 6: stopped"),
        (("data", {"num_samples": 3}), None),
        (
            ("waiting", {"ready": 0, "needed": 1, "missing": "Each worker needs 1 GPU."}),
            "0 workers ready, at least 1 needed. Each worker needs 1 GPU.",
        ),
        (
            ("waiting", {"ready": 0, "needed": 1, "missing": ""}),
            "0 workers ready, at least 1 needed; they take long to start",
        ),
        (("something new", {}), None),
    ],
)
def test_what_happens_to_a_run_has_a_line_that_stays(entry: Entry, text: str | None) -> None:
    assert incident_text(*entry) == text


def test_without_a_terminal_incidents_come_at_once_and_progress_every_ten_seconds() -> None:
    lines = show(run_with_a_loss(), step_s=4.0).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "step 1/6",
        "worker 1 lost: the process died",
        "step 3/6",
        f"step 3: {RECOVERED}",
        f"step 3: checkpoint committed, fingerprint {3:032x}",
        "step 5: worker 3 joined, 3 workers",
        "step 5: evaluation: loss 1.5000",
        "step 6/6",
        f"step 6: checkpoint committed, fingerprint {6:032x}",
        f"step 6: finished, fingerprint {'f' * 32}",
    ]


def test_a_long_message_becomes_one_short_line() -> None:
    assert brief("died:\n  out of\tmemory") == "died: out of memory"
    assert brief("abcd efgh ijkl mnop", limit=16) == "abcd ... mnop"
    assert brief("x" * 160) == "x" * 160
    raised = "Net.loss in step 1 raised KeyError: 'x' (Raised in worker 0 on a, then in worker 0 on a.)"
    assert brief(raised, limit=60) == "Net.loss in step 1 raised KeyError: 'x'"
    assert brief("Disk full. Free some space. Then start it again.", limit=40) == "Disk full. Free some space. ..."
    path = "/mnt/storage/" + "runs-of-the-team/" * 8 + "gpt-5m/journal/00000380.jsonl"
    error = f"put_if_absent {path} failed: OSError: [Errno 28] No space left on device. Free some space, then retry."
    assert len(error) > 160
    assert brief(error) == (
        "put_if_absent /mnt/storage/run...l/00000380.jsonl failed: OSError: [Errno 28] No space left on device. "
        "Free some space, then retry."
    )
    long = brief(f"the loader failed: {'very ' * 60}late: connection reset by peer")
    assert len(long) <= 160
    assert long.startswith("the loader failed: very")
    assert long.endswith("late: connection reset by peer")


def test_an_error_of_the_users_code_keeps_its_place_and_what_is_wrong() -> None:
    file = "/work/of/the/team/.venv/lib/python3.11/site-packages/transformers/modeling_utils.py"
    error = (
        f"{file}:3789: the values of 'model.embed.weight' were changed between session.build and session.shard, where "
        "a worker that joins would not have the change. Change them in the function that session.build calls."
    )
    told = (
        ".../modeling_utils.py:3789: the values of 'model.embed.weight' were changed between session.build and "
        "session.shard, where a worker that joins would not ..."
    )
    assert brief_error(error) == told
    fields = {"step": 3, "worker": 1, "node": "n", "error": error, "retried": False, "attempt": 1}
    assert incident_text("task_error", fields) == f"step 3: worker 1 on n raised {told}; attempt 1 was the last"
    assert incident_text("start_failed", {"worker": 4, "reason": error}) == f"worker 4 did not start: {told}"
    assert (
        brief_error("Disk full. Free some space. Then start it again.", limit=40) == "Disk full. Free some space. ..."
    )
    assert brief_error("x" * 161) == f"{'x' * 156} ..."
    for message in ("put /mnt/" + "a" * 200 + "/b failed", "s3://bucket/" + "c" * 40 + "/d: " + "very " * 60):
        assert len(brief_error(message)) <= 160


def test_no_line_is_wrapped_outside_a_terminal() -> None:
    reason = "x" * 150
    out = show([("worker_lost", {"worker": 1, "step": 1, "reason": reason})])
    assert out == f"worker 1 lost: {reason}\n"


def test_on_a_terminal_the_line_is_redrawn_and_the_last_one_stays() -> None:
    out = show(run_with_a_loss(), terminal=True)
    assert "\x1b[2K" in out  # erases the line before the next is drawn
    assert "resharding" in out
    assert "step 5: worker 3 joined, 3 workers" in out
    assert "step 6/6" in out.split("finished, fingerprint")[-1]
    assert out.endswith("\x1b[?25h")  # the cursor is back


def test_speed_counts_tokens_or_samples_or_steps() -> None:
    first = [*generation(1, [0], 0), step(1), step(2)]
    assert "512 tokens/s" in show([started(), *first], terminal=True, step_s=2.0, tokens_per_step=1024)
    assert "2 samples/s" in show([started(), *first], terminal=True, step_s=2.0)
    assert "0.5 steps/s" in show([("started", {}), *first], terminal=True, step_s=2.0)


def test_speed_and_time_left_are_those_of_this_generation() -> None:
    out, clock = StringIO(), ManualClock()
    with LiveView(Console(file=out), 102, clock) as view:
        for entry in generation(1, [0, 1], 0):
            view.on_entry(*entry)
        clock.now += 1.0
        view.on_entry(*step(1))
        clock.now += 1000.0  # a long recovery
        for entry in generation(2, [0], 1):
            view.on_entry(*entry)
        clock.now += 2.0
        view.on_entry(*step(2, 1))
        progress = view.progress()
    assert (progress.rate, progress.left_s, progress.workers) == (0.5, 200.0, 1)


def test_closing_twice_or_before_anything_happened_is_fine() -> None:
    for entries in ([], [started()]):
        out = StringIO()
        view = LiveView(Console(file=out, force_terminal=True), 6, ManualClock())
        for entry in entries:
            view.on_entry(*entry)
        view.close()
        view.close()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_closed_terminal_does_not_end_the_run(terminal: bool) -> None:
    class Gone(StringIO):
        failed = 0

        def write(self, text: str) -> int:
            Gone.failed += 1
            raise BrokenPipeError("nobody reads this")

    with LiveView(Console(file=Gone(), force_terminal=terminal), 6, ManualClock()) as view:
        for kind, fields in run_with_a_loss():
            view.on_entry(kind, fields)
        assert view.progress().step == 6
    assert Gone.failed >= 1


def test_that_there_is_no_checkpoint_stays_in_the_line_until_there_is_one() -> None:
    before = [started(), *generation(1, [0, 1], 0), step(1), step(2), failing(2, newest=1)]
    assert show([*before, step(6)]).splitlines()[-1].endswith("NO CHECKPOINT SINCE STEP 1")
    assert "NO CHECKPOINT" not in show([*before, checkpoint(3), step(6)]).splitlines()[-1]


def test_a_gcs_that_is_back_and_storage_that_is_back_end_their_own_warnings() -> None:
    begun = [started(), *generation(1, [0, 1], 0), step(1)]
    lost = ("gcs_lost", {"step": 1, "for_s": 6.0, "left_s": 54.0})
    back = ("gcs_back", {"step": 1, "after_s": 7.0})
    stored = ("storage_back", {"after_s": 9.0})
    assert "GCS" in show([*begun, lost, stored, step(6)]).splitlines()[-1]
    assert "GCS" not in show([*begun, lost, back, step(6)]).splitlines()[-1]
    failing = ("storage_failing", {"error": "no space", "for_s": 5.0})
    assert "STORAGE FAILS" in show([*begun, failing, back, step(6)]).splitlines()[-1]
    assert "STORAGE FAILS" not in show([*begun, failing, stored, step(6)]).splitlines()[-1]


def test_avoided_nodes_are_counted_in_the_line() -> None:
    entries = [started(), *generation(1, [0, 1], 0), step(1), avoided(1), step(6)]
    assert show(entries).splitlines()[-1].endswith("1 node avoided")
    node, host = avoided(1)[1]["node"], "trainer-7"
    lost_node = ("node_lost", {"node": node, "host": host, "step": 1, "reason": "it does not answer"})
    back = ("node_back", {"node": node, "host": host, "step": 1, "after_s": 9.0})
    allowed = ("node_allowed", {"node": node, "host": host, "step": 1, "reason": "an hour has passed"})
    assert "avoided" not in show([*entries[:-1], lost_node, step(6)]).splitlines()[-1], "a lost node gets none anyway"
    assert show([*entries[:-1], lost_node, back, step(6)]).splitlines()[-1].endswith("1 node avoided")
    assert "avoided" not in show([*entries[:-1], allowed, step(6)]).splitlines()[-1]
    assert "avoided" not in show([started(), allowed, step(6)]).splitlines()[-1], "a follower may begin anywhere"
    assert "avoided" not in show([*entries[:-1], started(1), step(6)]).splitlines()[-1], "another driver judges anew"
