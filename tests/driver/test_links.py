"""Workers that do not reach each other: what is tested, whom the run continues with, and when the others come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from hypothesis import given, strategies as st

from raysharded.driver.generation.link_tests import left_out
from raysharded.driver.membership.reachable import mutual_sets
from raysharded.driver.state.broken_links import (
    ANSWER_S,
    Links,
    Pair,
    all_pairs,
    begun,
    concluded,
    due,
    pair_of,
    reported,
    with_newcomer,
    without,
)
from raysharded.driver.state.commands import CheckLinks, Command, Form, KillWorker, SaveSnapshot, StartWorker, Train
from raysharded.driver.state.events import Ready, WorkerReply
from raysharded.driver.state.state import Phase
from raysharded.errors import ClusterError, CollectiveAborted
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import Held
from raysharded.protocol.link_messages import LinkReport
from raysharded.protocol.messages import FromCheckpoint, FromMemory, StopReason, WorkerInfo
from tests.driver.scripted import Run, committed, of
from tests.driver.test_nodes import ready

PAUSE_S = 30.0
BEFORE = GenerationId(1)


def pairs(*each: tuple[int, int]) -> frozenset[Pair]:
    return frozenset(pair_of(WorkerId(a), WorkerId(b)) for a, b in each)


def workers(*numbers: int) -> frozenset[WorkerId]:
    return frozenset(map(WorkerId, numbers))


# -- the sets of workers that reach each other --


def on_nodes(nodes: str) -> dict[WorkerId, str]:
    return {WorkerId(worker): node for worker, node in enumerate(nodes)}


def sets_of(nodes: str, broken: frozenset[Pair], most: int = 99) -> list[list[int]]:
    there = on_nodes(nodes)
    return [sorted(one) for one in mutual_sets(frozenset(there), there, broken, most)]


def test_of_two_nodes_that_do_not_reach_each_other_the_larger_or_the_lower_comes_first() -> None:
    assert sets_of("aabb", pairs((0, 2), (0, 3), (1, 2), (1, 3))) == [[0, 1], [2, 3]]
    assert sets_of("abb", pairs((0, 1), (0, 2))) == [[1, 2], [0]]
    assert sets_of("abb", pairs((0, 1), (0, 2)), most=1) == [[1, 2], [0]]


def test_a_worker_that_alone_does_not_reach_another_is_left_out_and_not_its_node() -> None:
    assert sets_of("aabb", pairs((1, 2))) == [[0, 1, 3], [0, 2, 3]]


def test_a_node_that_reaches_both_others_is_in_both_sets() -> None:
    assert sets_of("abc", pairs((0, 1))) == [[0, 2], [1, 2]]
    assert sets_of("abcd", pairs((0, 1), (2, 3))) == [[0, 2], [0, 3], [1, 2], [1, 3]]


@st.composite
def links_between(draw: st.DrawFn) -> tuple[dict[WorkerId, str], frozenset[Pair]]:
    nodes = on_nodes(draw(st.text("abcd", min_size=1, max_size=7)))
    whole = draw(st.sets(st.sampled_from(list(combinations("abcd", 2))), max_size=4))
    broken = {pair for pair in all_pairs(nodes) if tuple(sorted((nodes[pair[0]], nodes[pair[1]]))) in whole}
    single = draw(st.sets(st.sampled_from(sorted(all_pairs(range(7)))), max_size=3))  # type: ignore[arg-type]  # numbers
    return nodes, frozenset(broken | {pair for pair in single if nodes.keys() >= set(pair)})


@given(links_between())
def test_the_sets_have_no_broken_pair_nobody_can_be_added_and_the_first_is_the_largest_there_is(
    drawn: tuple[dict[WorkerId, str], frozenset[Pair]],
) -> None:
    nodes, broken = drawn
    found = mutual_sets(frozenset(nodes), nodes, broken, 99)
    assert found
    assert len(set(found)) == len(found)
    for one in found:
        assert not broken & all_pairs(one)
        for other in nodes.keys() - one:
            assert broken & all_pairs(one | {other})
    sizes = [len(one) for one in found]
    assert sizes == sorted(sizes, reverse=True)
    largest = max(
        count
        for count in range(1, len(nodes) + 1)
        for chosen in combinations(nodes, count)
        if not broken & all_pairs(chosen)
    )
    assert sizes[0] == largest


@given(links_between())
def test_the_sets_do_not_depend_on_the_names_of_nodes(drawn: tuple[dict[WorkerId, str], frozenset[Pair]]) -> None:
    nodes, broken = drawn
    renamed = {worker: "dcba"["abcd".index(node)] for worker, node in nodes.items()}
    assert mutual_sets(frozenset(nodes), nodes, broken, 4) == mutual_sets(frozenset(nodes), renamed, broken, 4)


def test_with_very_many_conflicts_sets_are_still_found_in_no_time() -> None:
    there = {WorkerId(worker): f"node {worker}" for worker in range(60)}
    broken = frozenset(pair_of(WorkerId(a), WorkerId(a + 1)) for a in range(0, 60, 2))
    found = mutual_sets(frozenset(there), there, broken, 99)
    assert len(found[0]) == 30
    assert all(not broken & all_pairs(one) for one in found)


# -- what is known about links --


def failing(links: Links, broken: frozenset[Pair], at: float, silent: int | None = None) -> Links:
    """The links after the test under way, reported by all but one."""
    assert links.test is not None
    for worker in sorted(links.test.awaited - {silent}):
        failed = tuple(sorted({one for pair in broken if worker in pair for one in pair} - {worker}))
        links = reported(links, worker, LinkReport(number=links.num_tests, failed=failed))
    return concluded(links, at, PAUSE_S)[0]


def test_a_pair_is_broken_if_one_end_finds_it_and_is_tested_again_ever_more_rarely() -> None:
    links, at, gone = begun(Links(), all_pairs(workers(0, 1, 2)), BEFORE, 0.0), 0.0, pairs((0, 2))
    links = reported(links, WorkerId(2), LinkReport(number=1, failed=(WorkerId(0),)))
    links = reported(links, WorkerId(0), LinkReport(number=1, failed=()))
    links = reported(links, WorkerId(1), LinkReport(number=1, failed=()))
    links, new, mended = concluded(links, at, PAUSE_S)
    assert ([one.pair for one in new], mended, links.pairs) == ([(0, 2)], (), gone)
    waits = []
    for _ in range(8):
        at += 1.0
        while not due(links, at):
            at += 1.0
        waits.append(at)
        assert due(links, at) == gone
        links = failing(begun(links, due(links, at), GenerationId(0), at), gone, at)
    paused = [later - before for before, later in zip([0.0, *waits], waits, strict=False)]
    assert paused == [30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0, 600.0]
    links, new, mended = concluded(begun(links, gone, GenerationId(0), at), at, PAUSE_S)
    assert links.pairs == gone  # nobody has reported: it stays what it was
    links = begun(links, gone, GenerationId(0), at)
    for worker in workers(0, 2):
        links = reported(links, worker, LinkReport(number=links.num_tests, failed=()))
    links, new, mended = concluded(links, at, PAUSE_S)
    assert (links.broken, new, [one.pair for one in mended]) == ((), (), [(0, 2)])


def test_a_worker_that_is_lost_during_a_test_leaves_no_broken_link() -> None:
    links = begun(Links(), all_pairs(workers(0, 1, 2)), BEFORE, 0.0)
    number = links.num_tests
    links = reported(links, WorkerId(0), LinkReport(number=number, failed=(WorkerId(2),)))
    links = without(links, WorkerId(2))
    links = reported(links, WorkerId(1), LinkReport(number=number, failed=(WorkerId(2),)))
    assert links.test is not None
    assert not links.test.awaited
    links, new, mended = concluded(links, 0.0, PAUSE_S)
    assert (links.broken, new, mended) == ((), (), ())


def test_a_report_of_an_older_test_or_about_others_changes_nothing() -> None:
    links = begun(begun(Links(), all_pairs(workers(0, 1)), BEFORE, 0.0), pairs((0, 1)), BEFORE, 1.0)
    assert reported(links, WorkerId(0), LinkReport(number=1, failed=(WorkerId(1),))) is links
    assert reported(links, WorkerId(7), LinkReport(number=2, failed=(WorkerId(1),))) is links


def test_the_links_of_a_worker_go_with_it_and_a_newcomer_has_those_of_its_node() -> None:
    there = on_nodes("aabb")
    links = failing(begun(Links(), all_pairs(there), BEFORE, 0.0), pairs((0, 2), (0, 3), (1, 2), (1, 3)), 0.0)
    links = without(links, WorkerId(3))
    assert links.pairs == pairs((0, 2), (1, 2))
    later = with_newcomer(links, WorkerId(4), "b", on_nodes("aab"))
    assert later.pairs == pairs((0, 2), (1, 2), (0, 4), (1, 4))
    assert with_newcomer(links, WorkerId(4), "c", on_nodes("aab")) is links
    single = failing(begun(Links(), all_pairs(there), BEFORE, 0.0), pairs((0, 2)), 0.0)
    assert with_newcomer(single, WorkerId(4), "a", there).pairs == single.pairs  # its node reaches the other


# -- in the machine --


def on(nodes: str, step: int = 2, **limits: Any) -> Run:
    """A run on these nodes, one worker for each letter, that has done some steps."""
    run = Run(max_workers=len(nodes), **limits)
    for worker, node in enumerate(nodes):
        ready(run, worker, node)
    run.formed()
    run.trained(*range(1, step + 1))
    return run


def cut(run: Run, nodes: str, one: str, other: str) -> None:
    there = on_nodes(nodes)
    run.apart |= {frozenset(pair) for pair in all_pairs(there) if {there[end] for end in pair} == {one, other}}


def break_off(run: Run, step: int = 2, held: Mapping[int, Sequence[Held]] | None = None) -> None:
    """All members are freed from a collective that nobody's end explains. `held`: what they hold, if it is known."""
    error = CollectiveAborted("forming: Connect timeout")
    for worker in run.state.members:
        run.stopped(worker, StopReason.ABORTED, step, error=error, held=None if held is None else held.get(worker, ()))


def test_a_generation_that_breaks_without_a_loss_has_its_links_tested_and_goes_on_without_a_node() -> None:
    run = on("aabb", min_workers=1)
    cut(run, "aabb", "a", "b")
    break_off(run)
    (tested,) = run.all(CheckLinks)
    assert frozenset(tested.spec.pairs) == all_pairs(run.state.ready)
    spec = run.newest_form()
    assert (spec.generation, spec.members, spec.source.step) == (2, (0, 1), 2)
    assert isinstance(spec.source, FromMemory)
    (entry,) = run.records("links_broken")
    assert entry == {"step": 2, "pairs": [[0, 2], [0, 3], [1, 2], [1, 3]], "nodes": [["host a", "host b"]]}
    assert run.records("generation")[-1]["excluded"] == [2, 3]
    assert not run.all(KillWorker)
    assert left_out(run.state) == "host a and host b do not reach each other; they are tested again"
    run.formed()
    commands = run.trained(3)
    assert not of(commands, StartWorker)  # those that are left out are still there
    assert run.state.phase is Phase.TRAINING
    assert not run.state.boundary_requested


def test_the_excluded_are_tested_again_and_join_at_a_boundary_when_they_reach_the_others() -> None:
    run = on("aabb", min_workers=1)
    cut(run, "aabb", "a", "b")
    break_off(run)
    run.formed()
    run.trained(3)
    run.at += PAUSE_S - 1.0
    run.trained(4)
    run.wait(0.5)
    assert len(run.all(CheckLinks)) == 1
    run.wait(1.0)
    assert len(run.all(CheckLinks)) == 2
    run.apart.clear()
    run.trained(5)
    run.at += 2 * PAUSE_S
    run.trained(6)
    run.wait(0.5)
    (mended,) = run.records("links_mended")
    assert mended["nodes"] == [["host a", "host b"]]
    assert run.state.boundary_requested
    for worker in (0, 1):
        run.stopped(worker, StopReason.BOUNDARY, 6)
    assert run.newest_form().members == (0, 1, 2, 3)


def test_a_generation_that_cannot_be_formed_is_stopped_as_soon_as_the_pair_is_known() -> None:
    run = Run(max_workers=4, min_workers=1, forming_patience_s=10.0)
    cut(run, "aabb", "a", "b")
    run.waiting = frozenset(range(4))
    for worker, node in enumerate("aabb"):
        ready(run, worker, node)
    assert run.state.phase is Phase.FORMING
    run.wait(10.5)
    assert len(run.records("links_broken")) == 1
    assert run.state.phase.name == "STOPPING"
    break_off(run, 0)
    assert run.newest_form().members == (0, 1)
    assert len(run.all(CheckLinks)) == 1


def test_links_that_are_whole_change_nothing_and_are_tested_once_for_each_generation() -> None:
    run = on("aabb", min_workers=1)
    break_off(run)
    assert run.newest_form().members == (0, 1, 2, 3)
    assert run.state.links.broken == ()
    assert not run.records("links_broken")
    break_off(run)
    assert [command.spec.number for command in run.all(CheckLinks)] == [1, 2]


def test_a_worker_that_does_not_report_on_its_links_is_waited_for_no_longer_than_it_can_take() -> None:
    run = on("ab", min_workers=1)
    run.tests_answered = False
    break_off(run)
    assert len(run.all(Form)) == 1
    run.wait(ANSWER_S + 0.5)
    assert len(run.all(Form)) == 2


def test_below_the_minimum_the_run_waits_and_the_pair_is_named() -> None:
    run = on("ab", min_workers=2, start_timeout_s=60.0)
    cut(run, "ab", "a", "b")
    break_off(run)
    run.formed()
    run.stopped(0, StopReason.BOUNDARY, 2)  # one alone has only written what it holds
    assert run.state.phase is Phase.GATHERING
    assert len(run.all(Form)) == 2
    run.wait(61.0)
    assert isinstance(run.error, ClusterError)
    assert "host a and host b do not reach each other" in str(run.error)


def test_below_the_minimum_those_that_hold_the_state_write_it_as_a_checkpoint_and_then_all_wait() -> None:
    run = on("aab", min_workers=3, start_timeout_s=200.0)
    cut(run, "aab", "a", "b")
    run.hear(committed(1))
    break_off(run)
    spec = run.newest_form()
    assert (spec.members, spec.source.step) == ((0, 1), 2)
    assert run.records("generation")[-1]["only_saves"] is True
    assert of(run.formed(), Train)[0].rest
    commands: list[Command] = []
    for worker in spec.members:
        commands += run.stopped(worker, StopReason.BOUNDARY, 2)
    assert of(commands, SaveSnapshot) == [SaveSnapshot(generation=spec.generation, members=spec.members)]
    assert run.state.phase is Phase.GATHERING
    run.all_saved(2)
    run.committed(2)
    assert run.state.saved_step == 2
    forms = len(run.all(Form))
    run.wait(31.0)  # the links are tested again, and are as they were
    assert len(run.all(CheckLinks)) == 2
    assert len(run.all(Form)) == forms
    run.apart.clear()
    run.wait(61.0)
    assert run.newest_form().members == (0, 1, 2)
    assert isinstance(run.newest_form().source, FromMemory)


def test_below_the_minimum_they_write_it_also_where_a_lost_worker_is_waited_for() -> None:
    run = on("aaab", min_workers=3, replacement_wait_s=20.0, start_timeout_s=200.0)
    cut(run, "aaab", "a", "b")
    break_off(run)
    run.formed()
    assert set(run.state.members) == {0, 1, 2}
    run.trained(3)
    run.lost(2)
    for worker in (0, 1):
        run.stopped(worker, StopReason.ABORTED, 3)
    run.wait(25.0)
    assert (run.newest_form().members, run.newest_form().source.step) == ((0, 1), 3)
    assert run.records("generation")[-1]["only_saves"] is True


def test_below_the_minimum_nothing_is_written_if_no_side_holds_the_whole_state_or_storage_has_it() -> None:
    run = on("ab", min_workers=2, mirrors=False)
    cut(run, "ab", "a", "b")
    break_off(run, held={worker: run.holding(worker, 2)[:1] for worker in (0, 1)})
    assert run.state.phase is Phase.GATHERING
    saved = on("ab", min_workers=2)
    saved.hear(committed(2))
    cut(saved, "ab", "a", "b")
    break_off(saved)
    assert saved.state.phase is Phase.GATHERING


def test_a_worker_that_reaches_all_and_has_nothing_is_chosen_only_with_one_that_has() -> None:
    """Workers on a and b hold the state, c has just come. Of the sets a, c and b, c the first holds it all."""
    run = on("ab", min_workers=2)
    run.state = replace(run.state, limits=replace(run.state.limits, max_workers=3))
    facts = WorkerInfo(pid=2, node="host c", arithmetic={"cpu": "x"}, num_samples=100, node_id="c")
    run.state = replace(run.state, starting={WorkerId(2): 0.0})
    run.hear(Ready(worker=WorkerId(2), facts=facts))
    cut(run, "abc", "a", "b")
    break_off(run)
    assert run.newest_form().members == (0, 2)
    assert run.newest_form().source.step == 2


def newcomers(run: Run, nodes: str) -> None:
    """Workers come that hold nothing, and take part once the next generation is formed."""
    first = len(run.state.ready)
    run.state = replace(run.state, starting={WorkerId(first + at): run.at for at in range(len(nodes))})
    for at, node in enumerate(nodes):
        ready(run, first + at, node)


def test_workers_that_are_left_out_hand_over_what_they_hold_to_one_that_both_sides_reach() -> None:
    """Only b holds the state; two on a and one on c are new. Three are needed, and b reaches c alone."""
    run = Run(max_workers=4, min_workers=3)
    run.state = replace(run.state, limits=replace(run.state.limits, min_workers=1, max_workers=1))
    ready(run, 0, "b")
    run.formed()
    run.trained(1, 2)
    run.state = replace(run.state, limits=replace(run.state.limits, min_workers=3, max_workers=4))
    newcomers(run, "aac")
    cut(run, "baac", "b", "a")
    held = {0: run.holding(0, 2)}
    run.stopped(0, StopReason.BOUNDARY, 2)
    assert set(run.newest_form().members) == {0, 1, 2, 3}
    break_off(run, held=held)
    spec = run.newest_form()  # b and c form first, and do no step
    assert (set(spec.members), spec.source.step) == ({0, 3}, 2)
    assert run.records("generation")[-1]["hands_over"] is True
    assert of(run.formed(), Train)[0].rest
    for worker in spec.members:
        run.stopped(worker, StopReason.BOUNDARY, 2)
    spec = run.newest_form()
    assert (set(spec.members), spec.source.step) == ({1, 2, 3}, 2)
    assert isinstance(spec.source, FromMemory)
    assert not of(run.formed(), Train)[0].rest


def test_if_no_set_has_the_newest_step_the_newest_checkpoint_is_used_and_that_is_said() -> None:
    run = on("ab", min_workers=1, mirrors=False)
    run.hear(committed(1))
    cut(run, "ab", "a", "b")
    break_off(run, held={worker: run.holding(worker, 2)[:1] for worker in (0, 1)})
    spec = run.newest_form()
    assert spec.members == (0,)
    assert isinstance(spec.source, FromCheckpoint)
    assert run.records("generation")[-1]["why"] == "no workers that reach each other hold step 2"


def test_a_new_worker_on_a_node_that_is_left_out_does_not_join() -> None:
    run = on("aab", min_workers=1)
    cut(run, "aab", "a", "b")
    break_off(run)
    run.formed()
    run.state = replace(run.state, limits=replace(run.state.limits, max_workers=4))
    newcomers(run, "b")
    run.trained(3)
    run.wait(5.0)
    assert not run.state.boundary_requested
    assert WorkerId(3) in {one for pair in run.state.links.pairs for one in pair}


def test_the_loss_of_a_worker_that_was_left_out_ends_the_knowledge_about_it() -> None:
    run = on("ab", min_workers=1)
    cut(run, "ab", "a", "b")
    break_off(run)
    run.formed()
    run.lost(1)
    assert run.state.links.broken == ()
    run.hear(WorkerReply(worker=WorkerId(1), message=LinkReport(number=1, failed=())))  # late, and from the dead
    assert run.state.phase is Phase.TRAINING
