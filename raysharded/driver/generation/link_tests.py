"""Tests of the links between workers, when a generation fails although no worker is lost. Pure; below the lifecycle.

A collective that breaks without a loss, or in which all wait for each other, does not report whom it could not
reach. So all workers that are ready connect to each other, beside what they do. The driver waits for their reports
before it forms the next generation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from raysharded.driver.state import broken_links
from raysharded.driver.state.broken_links import BrokenLink, Pair
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import CheckLinks, Outcome
from raysharded.driver.state.state import Phase, State
from raysharded.ids import GenerationId
from raysharded.protocol.link_messages import LinkCheck
from raysharded.protocol.messages import Stopped, StopReason

_KNOWN = GenerationId(0)
"""In place of a generation: a test of links that are known to be broken."""


def ask(state: State, pairs: frozenset[Pair], at: float, *, generation: GenerationId = _KNOWN) -> Outcome:
    """Have the workers of these pairs test the links between them."""
    if not pairs:
        return state, []
    links = broken_links.begun(state.links, pairs, generation, at)
    host, port, keys = state.rendezvous
    spec = LinkCheck(
        number=links.num_tests,
        pairs=tuple(sorted(pairs)),
        host=host,
        port=port,
        prefix=f"{keys}/links{links.num_tests}",
    )
    return replace(state, links=links), [CheckLinks(spec=spec)]


def ask_all(state: State, at: float) -> Outcome:
    """Test the links between all members of the current generation, once for each generation."""
    if state.links.tested >= state.generation:
        return state, []
    pairs = broken_links.all_pairs(state.ready.intersection(state.members))
    return ask(state, pairs, at, generation=state.generation)


def ask_due(state: State, at: float) -> Outcome:
    """Test the links that have been broken for a while."""
    return ask(state, broken_links.due(state.links, at), at)


def is_suspicious(state: State, stops: Sequence[Stopped]) -> bool:
    """Whether a generation failed, and neither a loss nor an error explains it."""
    whole = state.ready.issuperset(state.members) and len(state.members) > 1
    if not whole or not stops or state.links.tested >= state.generation:
        return False
    return all(stop.reason is StopReason.ABORTED for stop in stops)


def must_wait(state: State) -> bool:
    """Whether reports about the links of a failed generation are awaited."""
    test = state.links.test
    return test is not None and test.generation == state.generation and state.phase is Phase.STOPPING


def entry(state: State, links: Iterable[BrokenLink]) -> dict[str, Any]:
    """Fields of a journal entry about links: the pairs of workers, and of their nodes."""
    pairs = [link.pair for link in links]
    nodes = {(_node(state, one), _node(state, other)): None for one, other in pairs}
    return {"step": state.step, "pairs": [list(pair) for pair in pairs], "nodes": [list(both) for both in nodes]}


def text(state: State) -> str:
    """A sentence about the links for which a run waits; empty if all ready workers reach each other."""
    apart = [link for link in state.links.broken if state.ready.issuperset(link.pair)]
    pairs = {frozenset((_node(state, one), _node(state, other))): None for one, other in (link.pair for link in apart)}
    return " ".join(f"{' and '.join(sorted(both))} do not reach each other; they are tested again." for both in pairs)


def left_out(state: State) -> str:
    """A sentence about ready workers that the run continues without; empty without any. Any thread."""
    found = text(state) if state.phase is not Phase.OVER else ""
    return found[:-1] if found else ""


def _node(state: State, worker: int) -> str:
    facts = next((facts for one, facts in state.facts.items() if one == worker), None)
    return facts.node if facts else "?"
