"""Reports of the workers on the links between them. Handlers of the machine.

Broken links are journaled when they are found and when they are mended. A generation that is being formed of workers
that do not reach each other is stopped at once.
"""

from __future__ import annotations

from raysharded.driver.generation import lifecycle, link_tests
from raysharded.driver.state import broken_links, recovery_timeline
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Command, Outcome, Record, prepend
from raysharded.driver.state.state import Phase, State
from raysharded.ids import WorkerId
from raysharded.protocol.link_messages import LinkReport

_TESTED_IN = (Phase.GATHERING, Phase.FORMING, Phase.TRAINING, Phase.PAUSED)


def on_report(state: State, worker: WorkerId, report: LinkReport, at: float) -> Outcome:
    state = replace(state, links=broken_links.reported(state.links, worker, report))
    return _conclude(state, at)


def on_tick(state: State, at: float) -> Outcome:
    """End a test that takes too long, and begin one that is due."""
    state, concluded = _conclude(state, at)
    if state.phase not in _TESTED_IN or not state.links.broken:
        return state, concluded
    return prepend(link_tests.ask_due(state, at), concluded)


def _conclude(state: State, at: float) -> Outcome:
    test = state.links.test
    if test is None or not broken_links.is_over(test, at):
        return state, []
    was_awaited = link_tests.must_wait(state)
    links, new, mended = broken_links.concluded(state.links, at, state.limits.link_pause_s)
    state = replace(state, links=links)
    commands: list[Command] = []
    if new:
        commands.append(Record(kind="links_broken", fields=link_tests.entry(state, new), durable=True))
        state = replace(state, idle_generations=0)
    if mended:
        fields = {**link_tests.entry(state, mended), "after_s": at - min(link.since for link in mended)}
        commands.append(Record(kind="links_mended", fields=fields, durable=True))
    members = frozenset(state.members)
    if state.phase is Phase.FORMING and any(members.issuperset(link.pair) for link in new):
        incident = recovery_timeline.found(state, at, reason="some members do not reach each other")
        return prepend(lifecycle.stop_all(replace(state, incident=incident), at), commands)
    if was_awaited and not state.awaited:
        return prepend(lifecycle.all_stopped(state, at), commands)
    return prepend(lifecycle.maybe_request_change(state, at), commands) if mended else (state, commands)
