"""A summary as tables for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from rich.table import Table
from rich.text import Text

from raysharded.display.plain_text import one_line
from raysharded.display.quantities import count, duration, listing, moment, size, steps_done
from raysharded.journal.records import AvoidedNode, CheckpointRecord, Recovery
from raysharded.report.history.incidents import Incident, costliest
from raysharded.report.history.row_table import RowTable
from raysharded.report.history.run_summary import RunSummary
from raysharded.report.history.wall_time import MEANING, MICRO, PARTS, Part, Times

MOST_ROWS = 25
"""Rows of a table. A run of weeks has thousands of incidents, and its report stays a page."""
_ALL = "`raysharded report --json` has all"
_AWAY: dict[Part, str] = {"paused": "the pauses", "no driver": "the time without a driver"}
GOOD, BAD, DIM = "green", "bold red", "dim"


def facts_table() -> Table:
    """An empty table of two columns, name and value, without lines."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style=DIM, no_wrap=True)
    table.add_column(overflow="fold")
    return table


def verdict(*, good: bool, text: str) -> Text:
    """A fact in the colour of success or failure."""
    return Text(text, style=GOOD if good else BAD)


def run_table(summary: RunSummary) -> Table:
    """The run as a whole: its progress, workers and speed."""
    table = facts_table()
    state = verdict(good=summary.status != "failed", text=summary.status)
    table.add_row("run", Text(summary.run))
    look = "; `raysharded status` shows whether its driver works" if summary.status == "unfinished" else ""
    table.add_row("state", Text.assemble(state, f", {steps_done(summary.last_step, summary.max_steps)}{look}"))
    if summary.error:
        table.add_row("error", Text(summary.error))
    if summary.steps:
        newest = summary.steps[-1]
        table.add_row("loss", f"{newest.loss:.6g} in step {newest.step}")
        for name, value in newest.metrics.items():
            table.add_row(Text(one_line(name)), f"{value:.6g} in step {newest.step}")
        workers = np.unique(summary.steps.whole("workers")).tolist()
        table.add_row("workers", f"{workers[0]} to {workers[-1]}" if len(workers) > 1 else str(workers[0]))
    meshes = [generation for generation in summary.generations if generation.mesh]
    if meshes:
        table.add_row("shard groups", Text(f"{meshes[-1].mesh} since step {meshes[-1].step}: {meshes[-1].why}"))
    if summary.slowest:
        slow = summary.slowest
        table.add_row("slowest worker", Text(f"{slow.worker}: {slow.reason}, at step {slow.step}"))
    most_spares = max((len(generation.spares) for generation in summary.generations), default=0)
    if most_spares:
        table.add_row("spares", f"up to {most_spares}")
    if summary.preemptions:
        table.add_row("told to leave", count(summary.preemptions, "worker"))
    for record in summary.evaluated[-1:]:
        numbers = ", ".join(f"{name} {value:.6g}" for name, value in record.evaluation.items())
        table.add_row("evaluation", Text(f"{numbers} in step {record.step}"))
    if summary.checkpoints:
        table.add_row("checkpoints", _saves(summary))
    if summary.failing:
        table.add_row("", _failing(summary))
    add_numbers(table, summary)
    if math.isfinite(summary.first_at):
        resumed = f", resumed {count(summary.starts - 1, 'time')}" if summary.starts > 1 else ""
        table.add_row("started", f"{moment(summary.first_at)}{resumed}")
        table.add_row("time", _times(summary))
    if summary.versions:
        table.add_row("versions", ", ".join(f"{name} {version}" for name, version in summary.versions.items()))
    return table


def add_numbers(table: Table, summary: RunSummary) -> None:
    """Add rows on wrong numbers and audits, if there are any."""
    if summary.skipped_steps:
        steps = listing([str(skipped.step) for skipped in summary.skipped_steps])
        table.add_row("left out", f"step {steps}: a loss or gradient that was not finite")
    if older := summary.rewinds[:-MOST_ROWS]:
        table.add_row("rewound", f"{count(len(older), 'earlier time', 'earlier times')}; {_ALL}")
    for rewind in summary.rewinds[-MOST_ROWS:]:
        past = f", past {count(rewind.samples, 'sample')}" if rewind.samples or not rewind.asked else ""
        asked = ", as requested" if rewind.asked else ""
        what = f"back to step {rewind.to_step} from step {rewind.step}{asked}{past}"
        table.add_row("rewound", what)
    for change in summary.arithmetic_changes:
        table.add_row("arithmetic", Text(f"from step {change.from_step} on, as was accepted: {change.text()}"))
    audits = summary.audits
    if audits.count:
        found = f"{count(audits.count, 'step')} computed twice with the same bits, the newest {audits.newest}"
        table.add_row("audits", f"{found}; {duration(audits.seconds)}")
    for corruption in summary.corruptions:
        workers = listing([str(worker) for worker in corruption.culprits])
        what = f"{corruption.what} of step {corruption.step} on worker {workers}; again from {corruption.verified_step}"
        table.add_row("wrong numbers", verdict(good=False, text=what))


def _saves(summary: RunSummary) -> str:
    failed = sum(not record.prefix and not record.late for record in summary.checkpoints)
    parts = [f"{len(summary.committed)} written"]
    parts += [f"{failed} failed or passed over"] if failed else []
    parts += [f"{len(summary.late)} left out, storage being slower than the interval"] if summary.late else []
    return ", ".join(parts)


def _failing(summary: RunSummary) -> Text:
    since = f"since step {summary.committed[-1].step}" if summary.committed else "at all"
    return verdict(good=False, text=f"no checkpoint {since}: {count(summary.failed_saves, 'failure')} in a row")


def _times(summary: RunSummary) -> str:
    text = f"{duration(summary.elapsed_s)} at work"
    if summary.steps:
        text += f", {summary.goodput:.1%} of that in steps that count"
    times = summary.times
    if away := [text for part, text in _AWAY.items() if times.parts[part]]:
        share = f", {times.parts['computing'] / times.total:.1%} of that in steps that count" if summary.steps else ""
        text += f"; {duration(times.total / MICRO)} with {' and '.join(away)}{share}"
    if summary.starting_cpu_s:
        cpu = duration(summary.starting_cpu_s)
        text += f"; the processes of all workers took {cpu} of CPU time to start, mostly for imports"
    return text


def time_table(times: Times) -> RowTable:
    """The division of the run's time."""
    table = RowTable("time")
    table.add_column("part")
    table.add_column("took", right=True)
    table.add_column("of all", right=True)
    table.add_column("what it is", long="wrap")
    for part in PARTS:
        if times.parts[part]:
            share = times.parts[part] / times.total
            table.add_row(part, duration(times.seconds(part)), f"{share:.1%}", MEANING[part])
    table.add_row("all", duration(times.total / MICRO), "100%", "from the first entry to the newest")
    return table


def incident_table(incidents: Sequence[Incident]) -> RowTable:
    """The incidents in order; if there are many, those with the highest cost."""
    table = RowTable("incidents")
    table.add_column("at", right=True)
    table.add_column("step", right=True)
    table.add_column("cost", right=True)
    table.add_column("what happened", long="wrap")
    shown = costliest(incidents, MOST_ROWS)
    for incident in map(incidents.__getitem__, shown):
        cost = duration(incident.cost_s) if incident.costs else ""
        table.add_row(duration(incident.at_s), str(incident.step), cost, Text(incident.text))
    if len(shown) < len(incidents):
        table.add_row("", "", "", f"and {len(incidents) - len(shown)} more, which cost less; {_ALL}")
    return table


def recovery_table(recoveries: Sequence[Recovery], *, found_s: Sequence[float] | None = None) -> RowTable:
    """One row per recovery. `found_s`: seconds from each loss to its detection, if known. The total then begins at the
    loss, otherwise at the detection."""
    table = RowTable("recoveries")
    table.add_column("lost")
    ranks = {"workers": 0, "state from": 3, "after step": 2, **({"found": 4} if found_s is not None else {})}
    waited = any(recovery.wait_s for recovery in recoveries)
    ranks |= {"aborted": 5, **({"waited": 4} if waited else {}), "resharded": 6, "first step": 7, "total": 0}
    for name, rank in ranks.items():
        table.add_column(name, right=name != "state from", rank=rank)
    table.add_column("computed again", right=True)
    for number, recovery in enumerate(recoveries):
        found = [] if found_s is None else [found_s[number]]
        parts = [*found, recovery.abort_s, *([recovery.wait_s] if waited else []), recovery.reshard_s]
        parts += [recovery.first_step_s, recovery.total_s + sum(found)]
        table.add_row(
            listing([str(worker) for worker in recovery.lost]) or "none",
            f"{recovery.workers_before} to {recovery.workers_after}",
            recovery.source,
            str(recovery.resumed_after_step),
            *map(duration, parts),
            count(recovery.steps_redone, "step"),
        )
    return table


def worker_table(summary: RunSummary) -> RowTable:
    """The workers that left or joined, in order; if there are many, the newest."""
    table = RowTable("workers")
    table.add_column("step", right=True)
    table.add_column("worker", right=True)
    table.add_column("what")
    table.add_column("why", long="wrap")
    if older := summary.worker_events[:-MOST_ROWS]:
        table.add_row("", "", f"{len(older)} earlier", _ALL)
    for event in summary.worker_events[-MOST_ROWS:]:
        table.add_row(str(event.step), str(event.worker), event.what, Text(event.reason))
    return table


def node_table(nodes: Sequence[AvoidedNode]) -> RowTable:
    """The nodes that get no new workers; if there are many, the newest."""
    table = RowTable("avoided nodes")
    table.add_column("step", right=True)
    table.add_column("node", long="shorten")
    table.add_column("failures", right=True)
    table.add_column("the last ones", long="wrap")
    if older := nodes[:-MOST_ROWS]:
        table.add_row("", f"{len(older)} earlier", "", _ALL)
    for node in nodes[-MOST_ROWS:]:
        name = f"{node.host or '?'} ({node.node[:8]})"
        table.add_row(str(node.step), name, str(node.failures), Text("; ".join(node.reasons)))
    return table


def checkpoint_table(checkpoints: Sequence[CheckpointRecord]) -> RowTable:
    """The checkpoints that were written, failed, or were skipped; if there are many, the newest."""
    table = RowTable("checkpoints")
    table.add_column("step", right=True)
    table.add_column("when")
    table.add_column("size", right=True)
    table.add_column("took", right=True)
    table.add_column("folder", long="shorten")
    table.add_column("fingerprint", long="shorten")
    if older := checkpoints[:-MOST_ROWS]:
        table.add_row("", f"{len(older)} earlier", "", "", _ALL)
    for record in checkpoints[-MOST_ROWS:]:
        where = Text("deleted" if record.deleted else record.prefix)
        if not record.prefix:
            where = verdict(good=False, text=record.problem)
            where.no_wrap = False  # a sentence
        how_much = size(record.size_bytes) if record.size_bytes is not None else ""
        took = duration(record.seconds) if math.isfinite(record.seconds) else ""
        table.add_row(str(record.step), moment(record.at), how_much, took, where, record.fingerprint)
    return table
