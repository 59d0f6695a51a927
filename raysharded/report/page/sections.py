"""The parts of the page that work without its script: numbers and tables, as HTML.

All text from a journal passes through `markup.text`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raysharded.data.ledger import LedgerReport
from raysharded.display.plain_text import brief
from raysharded.display.quantities import count, duration, listing, moment, size, span, steps_done
from raysharded.journal.records import CheckpointRecord
from raysharded.report.history.incidents import COSTS, LETTERS, NAMES, Cost, Incident, costliest
from raysharded.report.history.run_summary import RunSummary
from raysharded.report.history.wall_time import MEANING, PARTS, Times
from raysharded.report.page.charts import MOST_NAMED, named
from raysharded.report.page.markup import MOST_ROWS, bar, class_of, section, swatch, table, text, verdict

_LONG = 400
"""Maximum number of characters of a message; the journal has the full text."""


def lead(summary: RunSummary, url: str) -> str:
    """The run in a sentence or two."""
    steps = steps_done(summary.last_step, summary.max_steps)
    tone = "bad" if summary.status == "failed" else "good" if summary.status == "finished" else ""
    words = [f'<span class="pill {tone}">{text(summary.status)}</span> {steps}']
    if math.isfinite(summary.first_at):
        words.append(f"begun {text(moment(summary.first_at))}")
    if summary.status == "unfinished":
        words.append(f"newest entry {text(moment(summary.last_at))}: it continues, or its driver died silently")
    return f"{', '.join(words)}. <code>{text(url)}</code>"


def warnings(summary: RunSummary, damage: str, *, ok: bool) -> str:
    """The most important warnings; empty if there are none. `damage`, `ok`: as in `RunReport`."""
    found = []
    if damage:
        found.append(f"The journal is damaged: {brief(damage)}. This report covers what comes before.")
    if summary.error:
        found.append(f"The run failed: {brief(summary.error, _LONG)}")
    if not ok:
        found.append("A promise did not hold: see the proof below.")
    if summary.failing:
        since = f"since step {summary.committed[-1].step}" if summary.committed else "at all"
        found.append(f"No checkpoint {since}: {count(summary.failed_saves, 'failure')} in a row.")
    return "".join(f'<p class="warning">{text(warning)}</p>' for warning in found)


def keys(summary: RunSummary, data: Mapping[str, Any]) -> str:
    """The legend of the charts, with `charts.drawn(summary)`: only of what they show."""
    found = ["Point at a chart, or focus it and use the arrow keys, for its values."]
    if data["marks"]:
        found.append("The marks above the charts, and the dashed lines, are the incidents.")
    undone = sum(summary.track.undone)
    fates = [
        word
        for word, number in (("lost", summary.track.counts.count(0) - undone), ("undone on request", undone))
        if number
    ]
    if fates:
        found.append(f'<span class="swatch-line"></span> Pale lines are steps whose results were {" or ".join(fates)}.')
    left = len(named(summary)) - MOST_NAMED
    if left > 0:
        found.append(f"{count(left, 'more evaluation or metric', 'more evaluations and metrics')} are not drawn.")
    return " ".join(found)


def times(summary: RunSummary) -> str:
    """The whole time as one bar and as a table."""
    whole = summary.times
    if not whole.total:
        return "<p>Nothing took any time yet.</p>"
    parts = [(class_of(part), whole.parts[part]) for part in PARTS if whole.parts[part]]
    said = ", ".join(f"{part} {_share(whole.parts[part], whole)}" for part in PARTS if whole.parts[part])
    rows = [
        (
            f"{swatch(part)}{text(part)}",
            text(duration(whole.seconds(part))),
            _share(whole.parts[part], whole),
            text(MEANING[part]),
        )
        for part in PARTS
        if whole.parts[part]
    ]
    rows.append(
        ("<strong>all</strong>", text(duration(whole.total / 1e6)), "100%", "from the first entry to the newest")
    )
    columns = (("", "name"), ("took", "number"), ("share", "number"), ("what it is", "wide"))
    return bar(parts, "whole", f"The time: {said}.") + table(columns, rows) + _phases(summary)


def incidents(found: Sequence[Incident]) -> str:
    """The incidents, each in a sentence with its costs drawn."""
    if not found:
        return "<p>Nothing happened to this run that is worth a line.</p>"
    shown = costliest(found, MOST_ROWS)
    most = max(incident.cost_s for incident in found)
    rows = []
    for number in shown:
        incident = found[number]
        letter = (
            f'<span class="kind k-{incident.kind}" title="{NAMES[incident.kind]}" role="img" '
            f'aria-label="{NAMES[incident.kind]}">{LETTERS[incident.kind]}</span>'
        )
        cost = f"{text(span(incident.cost_s))}{_costbar(incident.costs, most)}" if incident.costs else ""
        rows.append((letter, text(duration(incident.at_s)), str(incident.step), text(incident.text), cost))
    costs = [cost for number in shown for cost in found[number].costs]
    names = [name for name in COSTS if any(cost.name == name and cost.seconds > 0 for cost in costs)]
    legend = "".join(
        f"<li>{swatch(f'c-{name}')}<strong>{text(name)}</strong>: {text(COSTS[name])}</li>" for name in names
    )
    kinds = ", ".join(
        f"{LETTERS[kind]}: {NAMES[kind]}" for kind in NAMES if any(found[number].kind == kind for number in shown)
    )
    columns = (
        ("", "name"),
        ("after", "number"),
        ("at step", "number"),
        ("what happened", "wide"),
        ("cost", "cost-cell"),
    )
    left = len(found) - len(shown)
    more = f'<p class="note">And {left} more, which cost less.</p>' if left else ""
    marks = [f'data-incident="{number}"' for number in shown]
    key = f'<p class="note">{text(kinds)}.</p>'
    legend = f'<ul class="legend">{legend}</ul>' if legend else ""
    return f"{legend}{table(columns, rows, attributes=marks)}{more}{key}"


def more(summary: RunSummary) -> str:
    """Stragglers, workers that joined or left, avoided nodes: sections for those that exist."""
    found = (
        ("stragglers", "Stragglers", _stragglers(summary)),
        ("workers", "Workers", _workers(summary)),
        ("nodes", "Avoided nodes", _nodes(summary)),
    )
    return "".join(section(name, title, content) for name, title, content in found if content)


def _stragglers(summary: RunSummary) -> str:
    columns = (("step", "number"), ("worker", "number"), ("how slow", "wide"))
    slow = [event for event in summary.worker_events if event.what == "slow"]
    rows = [(str(event.step), str(event.worker), text(event.reason)) for event in slow]
    return table(columns, rows) if rows else ""


def _workers(summary: RunSummary) -> str:
    columns = (("step", "number"), ("worker", "number"), ("what", "name"), ("why", "wide"))
    others = [event for event in summary.worker_events if event.what != "slow"]
    rows = [(str(one.step), str(one.worker), text(one.what), text(brief(one.reason, _LONG))) for one in others]
    return table(columns, rows) if rows else ""


def _nodes(summary: RunSummary) -> str:
    columns = (("step", "number"), ("node", "wide"), ("failures", "number"), ("the last ones", "wide"))
    rows = [
        (
            str(node.step),
            text(f"{node.host or '?'} ({node.node[:8]})"),
            str(node.failures),
            "<br>".join(text(brief(reason, _LONG)) for reason in node.reasons),
        )
        for node in summary.avoided_nodes
    ]
    return table(columns, rows) if rows else ""


def checkpoints(found: Sequence[CheckpointRecord]) -> str:
    """The checkpoints that were written, failed, or were skipped."""
    if not found:
        return "<p>None was written.</p>"
    columns = (("step", "number"), ("when", "name"), ("size", "number"), ("took", "number"), ("what", "wide"))
    rows = [
        (
            str(record.step),
            text(moment(record.at)),
            text(size(record.size_bytes)) if record.size_bytes is not None else "",
            text(duration(record.seconds)) if math.isfinite(record.seconds) else "",
            f"<code>{text(record.prefix)}</code>{' (deleted)' if record.deleted else ''}"
            if record.prefix
            else f'<span class="bad">{text(brief(record.problem, _LONG))}</span>',
        )
        for record in found
    ]
    return table(columns, rows)


def proof(summary: RunSummary, ledger: LedgerReport | None) -> str:
    """The promises, and whether they held."""
    rows: list[tuple[str, str]] = []
    if ledger is None:
        rows.append(("samples", "nothing to check: no step was recorded, or not what it should have read"))
    else:
        for what, number in (("lost", ledger.samples_lost), ("repeated", ledger.samples_repeated)):
            least = "" if ledger.exact or not number else "at least "
            rows.append((f"samples {what}", verdict(not number, f"{least}{number}")))
        rows.append(("steps checked", f"{ledger.steps_checked}, against what each should have read"))
        for what, steps in (("without record", ledger.steps_missing), ("read wrongly", ledger.steps_wrong)):
            if steps:
                rows.append((f"steps {what}", verdict(False, _some(steps))))
    undone = sum(summary.track.undone)
    again = summary.track.counts.count(0) - undone
    if not summary.differences:
        same = (
            f"{count(again, 'step')} lost; each that was computed again came out the same" if again else "none was lost"
        )
        rows.append(("steps computed again", verdict(True, same)))
    if undone:
        rows.append(("steps undone", f"{undone}, which somebody took back"))
    for difference in summary.differences[:MOST_ROWS]:
        what = f"step {difference.step}: another {listing(difference.fields)} when it was computed again"
        rows.append(("not the same", verdict(False, what)))
    if summary.audits.count:
        audits = f"{count(summary.audits.count, 'step')} computed twice with the same bits"
        rows.append(("audits", verdict(True, f"{audits}, the newest {summary.audits.newest}")))
    for bad in summary.corruptions:
        who = listing([str(worker) for worker in bad.culprits])
        found = f"{bad.what} of step {bad.step} on worker {who}; computed again from step {bad.verified_step}"
        rows.append(("wrong numbers", verdict(False, found)))
    if summary.fingerprint:
        rows.append(("fingerprint of the final state", f"<code>{text(summary.fingerprint)}</code>"))
    rows += [
        (f"fingerprint of step {record.step}", f"<code>{text(record.fingerprint)}</code>")
        for record in summary.committed[-20:]
        if record.fingerprint
    ]
    if summary.versions:
        rows.append(("versions", text(", ".join(f"{name} {version}" for name, version in summary.versions.items()))))
    return table((("", "name"), ("", "wide")), [(text(name), value) for name, value in rows])


def _phases(summary: RunSummary) -> str:
    """The steps' time by phase, as measured by one worker."""
    steps = summary.steps
    seconds = {name: float(np.nansum(steps.named("seconds", name))) for name in steps.names("seconds")}
    whole = sum(seconds.values())
    if not whole:
        return ""
    ranked = sorted(seconds.items(), key=lambda item: -item[1])
    told = ", ".join(f"{brief(name, 40)} {value / whole:.1%}" for name, value in ranked if value / whole >= 0.0005)
    return f'<p class="note">Within the steps, as one worker measured it: {text(told)}.</p>'


def _share(micros: int, whole: Times) -> str:
    return f"{micros / whole.total:.1%}"


def _costbar(costs: Sequence[Cost], most: float) -> str:
    """A bar whose length is the cost relative to the highest cost."""
    parts = [(class_of(f"c-{cost.name}"), cost.seconds) for cost in costs if cost.seconds > 0]
    if not parts:
        return ""
    total = sum(seconds for _, seconds in parts)
    label = ", ".join(f"{cost.name} {span(cost.seconds)}" for cost in costs if cost.seconds > 0)
    return bar([*parts, ("rest", max(0.0, most - total))], "cost", label)


def _some(steps: Sequence[int]) -> str:
    left = len(steps) - 8
    return ", ".join(map(str, steps[:8])) + (f" and {left} more" if left > 0 else "")
