"""The links between workers, as far as they are known to be broken. Pure.

Workers test the links between them when their collectives fail and none of them is lost: each connects to every other
and waits for its answer. A pair of which either one fails is broken. Broken pairs are tested again from time to time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

from raysharded.driver.state.changed import replace
from raysharded.ids import GenerationId, WorkerId
from raysharded.protocol.link_messages import LinkReport

_BEFORE_THE_FIRST = GenerationId(0)
ANSWER_S = 15.0
"""Time after which a worker that has not reported on its links is no longer waited for."""
_LONGEST_PAUSE_S = 600.0

Pair: TypeAlias = tuple[WorkerId, WorkerId]
"""Two workers, the lower number first."""


def pair_of(one: WorkerId, other: WorkerId) -> Pair:
    return (one, other) if one < other else (other, one)


def all_pairs(workers: Iterable[WorkerId]) -> frozenset[Pair]:
    return frozenset(combinations(sorted(workers), 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenLink:
    """Two workers that cannot reach each other. Times are the driver's monotonic seconds."""

    pair: Pair
    since: float
    tests: int = 1
    """Tests in a row that have failed."""
    next_at: float
    """Time of the next test."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkTest:
    """A test of links by the workers at their ends, until all of them have reported."""

    number: int
    asked_at: float
    generation: GenerationId
    """Generation after whose failure it was requested; 0 for one of links that are known to be broken."""
    pairs: frozenset[Pair]
    awaited: frozenset[WorkerId]
    failed: frozenset[Pair] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Knowledge about the links between the workers."""

    broken: tuple[BrokenLink, ...] = ()
    """By pair."""
    test: LinkTest | None = None
    num_tests: int = 0
    tested: GenerationId = _BEFORE_THE_FIRST
    """Newest generation after whose failure links were tested."""

    @property
    def pairs(self) -> frozenset[Pair]:
        """Pairs that cannot reach each other."""
        return frozenset(link.pair for link in self.broken)


def begun(links: Links, pairs: frozenset[Pair], generation: GenerationId, at: float) -> Links:
    """The links with a new test, which replaces an older one."""
    test = LinkTest(
        number=links.num_tests + 1,
        asked_at=at,
        generation=generation,
        pairs=pairs,
        awaited=frozenset(worker for pair in pairs for worker in pair),
    )
    return replace(links, test=test, num_tests=test.number, tested=max(links.tested, generation))


def reported(links: Links, worker: WorkerId, report: LinkReport) -> Links:
    """The links after a worker's report about its own."""
    test = links.test
    if test is None or report.number != test.number or worker not in test.awaited:
        return links
    failed = test.failed | {pair_of(worker, peer) for peer in report.failed}
    return replace(links, test=replace(test, awaited=test.awaited - {worker}, failed=failed & test.pairs))


def concluded(links: Links, at: float, pause_s: float) -> tuple[Links, tuple[BrokenLink, ...], tuple[BrokenLink, ...]]:
    """The links after the test, those that are newly broken, and those that are mended.

    A pair of which one end has not reported, and the other has found nothing, stays what it was. `pause_s`: time until
    a newly broken link is tested again.
    """
    test = links.test
    assert test is not None
    known: Mapping[Pair, BrokenLink] = {link.pair: link for link in links.broken}
    unsure = {pair for pair in test.pairs if test.awaited.intersection(pair)}
    after: dict[Pair, BrokenLink] = {pair: link for pair, link in known.items() if pair not in test.pairs}
    for pair in test.failed | {pair for pair in unsure if pair in known}:
        before = known.get(pair)
        tests = before.tests + 1 if before else 1
        since = before.since if before else at
        after[pair] = BrokenLink(pair=pair, since=since, tests=tests, next_at=at + _pause_s(pause_s, tests))
    new = tuple(after[pair] for pair in sorted(after.keys() - known.keys()))
    mended = tuple(known[pair] for pair in sorted(known.keys() - after.keys()))
    return replace(links, test=None, broken=_in_order(after)), new, mended


def _pause_s(first_s: float, tests: int) -> float:
    return min(first_s * 2.0 ** min(tests - 1, 10), _LONGEST_PAUSE_S)


def _in_order(links: Mapping[Pair, BrokenLink]) -> tuple[BrokenLink, ...]:
    return tuple(links[pair] for pair in sorted(links))


def due(links: Links, at: float) -> frozenset[Pair]:
    """Broken pairs that are to be tested now; none while another test is under way."""
    if links.test is not None:
        return frozenset()
    return frozenset(link.pair for link in links.broken if link.next_at <= at)


def is_over(test: LinkTest, at: float) -> bool:
    """Whether all have reported, or nobody is waited for any longer."""
    return not test.awaited or at - test.asked_at >= ANSWER_S


def without(links: Links, worker: WorkerId) -> Links:
    """The links without those of a worker that has exited."""
    test = links.test
    if test is not None:
        left = frozenset(pair for pair in test.pairs if worker not in pair)
        test = replace(test, awaited=test.awaited - {worker}, pairs=left, failed=test.failed & left)
        links = replace(links, test=test)
    if not any(worker in link.pair for link in links.broken):
        return links
    return replace(links, broken=tuple(link for link in links.broken if worker not in link.pair))


def with_newcomer(links: Links, worker: WorkerId, node: str, nodes: Mapping[WorkerId, str]) -> Links:
    """The links with those of a new worker: between two nodes of which no pair reaches each other, neither does it.

    `nodes`: worker -> node id, of all workers that are alive.
    """
    found = {link.pair: link for link in links.broken}
    there = [other for other, one in nodes.items() if one == node and other != worker]
    for other, far in nodes.items():
        if not node or not there or far == node:
            continue
        known = [found.get(pair_of(one, other)) for one in there]
        if all(known):
            like = known[0]
            assert like is not None
            found[pair_of(worker, other)] = replace(like, pair=pair_of(worker, other))
    return replace(links, broken=_in_order(found)) if len(found) > len(links.broken) else links
