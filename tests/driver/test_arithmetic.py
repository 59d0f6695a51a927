"""Workers that would compute other bits than the run: refused one by one, the run refused once, or accepted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from raysharded import numerics
from raysharded.checkpoint import Storage
from raysharded.checkpoint.claims import Claims
from raysharded.checkpoint.retention.policy import Keep
from raysharded.clock import SystemClock
from raysharded.driver.checkpoints.committer import ManifestContext, RunFiles
from raysharded.driver.startup.run_startup import RunStartup
from raysharded.driver.state import arithmetic
from raysharded.driver.state.commands import Command, CommitSave, Form, KillWorker, Record, StartWorker
from raysharded.driver.state.events import Committed
from raysharded.driver.state.state import Checkpointed, State
from raysharded.errors import ClusterError, CorruptCheckpoint, InexactError
from raysharded.ids import GenerationId, WorkerId
from raysharded.journal.log import Journal
from raysharded.ownership.leadership import AcquiredLease
from raysharded.protocol.messages import StopReason
from raysharded.protocol.session import AdoptedWorker, FoundWorkers
from tests.driver.scripted import LIMITS, Run, of
from tests.driver.test_committing import Driver, storage as storage, write_parts
from tests.driver.test_takeover import adopted
from tests.training.harness import make_driver, make_job

BEFORE = {"step": 40, "arithmetic": {"cpu": "x"}, "arithmetic_unmet": True, "num_samples": 100}
"""Fields of a driver of a run that was computed on CPUs x."""
CHECKPOINT = Checkpointed(step=40, prefix="checkpoints/s40", fingerprint="f")
ALL_ONE = "build 1, compile 1, draws 1, modes 1, numbers 1, order 1, reduce 1, unused 1"


@pytest.fixture(autouse=True)
def first_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """This version has the first number of each rule, and no other."""
    for name, rule in numerics.RULES.items():
        monkeypatch.setitem(numerics.RULES, name, replace(rule, listed=(1,)))


def resumed_run(*, resumed: Mapping[str, Any] = BEFORE, **limits: Any) -> Run:
    """A run of 2 to 3 workers that resumes from step 40."""
    return Run(checkpoint=CHECKPOINT, resumed=resumed, **{"max_steps": 100, **limits})


# -- the machine --


def test_a_run_all_of_whose_workers_are_elsewhere_than_before_is_refused_once_and_no_node_is_blamed() -> None:
    run = resumed_run()
    run.ready(0, 1, cpu="y")
    assert not run.records("failed"), "the third may be as the run was"
    run.ready(2, cpu="y")
    assert isinstance(run.error, InexactError)
    text = str(run.error)
    assert "up to step 40 with cpu x, and all 3 workers started with cpu y (on node0, node1 and node2)" in text
    assert "RunConfig(accept_arithmetic=True)" in text
    assert "raysharded run --accept-arithmetic" in text
    assert not run.records("worker_refused")
    assert not any(node.failures for node in run.state.nodes.values())
    assert len(run.all(StartWorker)) == 3, "nobody was started in place of the first"


def test_with_acceptance_it_continues_reports_it_and_is_as_its_new_workers_from_then_on() -> None:
    run = resumed_run(accept_arithmetic=True)
    commands = run.ready(0, 1, 2, cpu="y")
    (entry,) = run.records("arithmetic")
    assert (entry["from_step"], entry["changes"]) == (41, {"cpu": ["x", "y"]})
    assert entry["arithmetic"] == {"cpu": "y", "numerics": ALL_ONE}
    assert run.state.arithmetic == {"cpu": "y"}
    kinds = [type(command) if not isinstance(command, Record) else command.kind for command in commands]
    assert kinds.index("arithmetic") < kinds.index("worker_ready") < kinds.index(Form)
    assert run.newest_form().members == (0, 1, 2)
    run.formed()
    run.trained(41)
    run.lost(2)
    for worker in (0, 1):
        run.stopped(worker, StopReason.ABORTED, 41)
    run.formed()
    run.trained(42)
    run.ready(3, cpu="x")
    assert "cpu: y in this run, x there" in run.records("worker_refused")[0]["reason"]


def test_nothing_is_accepted_where_nothing_differs() -> None:
    run = resumed_run(accept_arithmetic=True)
    run.ready(0, 1, 2)
    assert not run.records("arithmetic")
    assert run.newest_form().members == (0, 1, 2)


@pytest.mark.parametrize("accept", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0)])
def test_in_a_mixed_cluster_the_workers_that_are_as_the_run_was_continue_and_the_other_is_at_fault(
    accept: bool, order: tuple[int, ...]
) -> None:
    run = resumed_run(accept_arithmetic=accept)
    for worker in order:
        run.ready(worker, cpu="y" if worker == 0 else "x")
    run.wait(3.0)
    assert [refused["worker"] for refused in run.records("worker_refused")] == [0]
    assert not run.records("arithmetic")
    assert run.state.nodes["node0"].failures == 1
    assert run.newest_form().members == (1, 2)


def test_who_waits_for_a_decision_is_not_waited_for_longer_than_a_run_waits_for_its_workers() -> None:
    run = resumed_run()
    run.ready(0, 1, cpu="y")  # the third never comes
    run.wait(run.state.limits.join_wait_s - 0.5)
    assert run.error_or_none() is None
    run.wait(0.75)
    assert "2 of 3 workers started with cpu y" in str(run.error)


def test_too_few_that_differ_are_waited_for_and_named_in_the_end() -> None:
    run = resumed_run()
    run.ready(0, cpu="y")
    run.wait(LIMITS.start_timeout_s - 1)
    assert run.error_or_none() is None
    run.wait(2)
    assert isinstance(run.error, ClusterError)
    assert "and 1 would compute other bits than the run has so far; 2 still wait for resources" in str(run.error)


def test_a_worker_that_dies_before_it_is_decided_on_is_started_anew() -> None:
    run = resumed_run(accept_arithmetic=True, max_workers=2)
    run.ready(0, cpu="y")
    run.lost(0)
    run.wait(1.5)
    run.ready(1, 2, cpu="y")
    assert run.newest_form().members == (1, 2)
    assert run.records("arithmetic")[0]["changes"] == {"cpu": ["x", "y"]}


def test_of_two_new_kinds_of_machines_the_more_common_one_is_accepted() -> None:
    run = resumed_run(accept_arithmetic=True)
    run.ready(0, cpu="z")
    run.ready(1, 2, cpu="y")
    assert run.records("arithmetic")[0]["changes"] == {"cpu": ["x", "y"]}
    assert "cpu: y in this run, z there" in run.records("worker_refused")[0]["reason"]
    run.wait(3.0)
    assert run.newest_form().members == (1, 2)


def test_those_that_are_as_accepted_continue_however_many_others_came_before_them() -> None:
    run = resumed_run(accept_arithmetic=True, min_workers=4, max_workers=7)
    run.ready(0, 1, 2, cpu="z")
    run.ready(3, 4, 5, 6, cpu="y")
    assert run.error_or_none() is None
    assert run.records("arithmetic")[0]["changes"] == {"cpu": ["x", "y"]}
    assert {refused["worker"] for refused in run.records("worker_refused")} == {0, 1, 2}
    run.wait(3.0)
    assert run.newest_form().members == (3, 4, 5, 6)


def test_nothing_is_accepted_with_which_the_run_could_not_continue() -> None:
    run = resumed_run(accept_arithmetic=True, min_workers=3, max_workers=4)
    run.ready(0, 1, cpu="y")
    run.ready(2, 3, cpu="z")
    run.wait(3.0)
    assert not run.records("arithmetic")
    assert run.error_or_none() is None, "more may come"


def test_workers_that_waited_for_a_decision_have_not_failed_one_after_the_other() -> None:
    run = resumed_run(min_workers=4, max_workers=8)
    run.ready(0, 1, cpu="y")
    run.ready(2)
    run.ready(3, cpu="y")
    assert run.error_or_none() is None
    assert {refused["worker"] for refused in run.records("worker_refused")} == {0, 1, 3}


@pytest.mark.parametrize("exact", [True, False])
def test_a_worker_that_lacks_a_rule_of_the_run_is_refused_by_its_name_in_fast_mode_too(exact: bool) -> None:
    run = Run(exact=exact, resumed={"numerics": ALL_ONE.replace("order 1", "order 2")})
    run.ready(0, 1, 2, numerics=ALL_ONE)
    assert "order: 2 in this run, 1 there" in run.records("worker_refused")[0]["reason"]
    assert isinstance(run.error, ClusterError)
    assert "one version of raysharded everywhere" in str(run.error)


def test_a_worker_that_lists_the_rules_of_the_run_among_others_joins_and_receives_the_runs() -> None:
    rules = ALL_ONE.replace("order 1", "order 2")
    run = Run(resumed={"numerics": rules})
    run.ready(0, 1, 2, numerics=ALL_ONE.replace("order 1", "order 1 2 3"))
    assert run.newest_form().numerics == rules
    assert run.state.arithmetic == {"cpu": "x"}


@pytest.mark.parametrize(("rule", "exact", "compiles"), [("compile", True, False), ("draws", False, False)])
def test_a_rule_that_the_program_does_not_use_may_be_lacking(rule: str, exact: bool, compiles: bool) -> None:
    run = Run(resumed={"numerics": f"{rule} 2"}, exact=exact, compiles=compiles)
    run.ready(0, 1, 2, numerics=ALL_ONE)
    assert run.newest_form().members == (0, 1, 2)


def test_in_fast_mode_other_machines_continue_as_ever() -> None:
    run = resumed_run(exact=False)
    run.ready(0, 1, 2, cpu="y")
    assert run.newest_form().members == (0, 1, 2)
    assert not run.records("arithmetic")


# -- how a driver begins --


class Held:
    """A hold on the run that is this driver's; records its release."""

    has_let_go = False

    def is_sure(self) -> bool:
        return True

    def may_act(self) -> bool:
        return True

    def acquire(self) -> AcquiredLease:
        return AcquiredLease(first=GenerationId(7), before="the one before", because="it ended")

    def end(self, timeout_s: float) -> None:
        self.has_let_go = True


def written(storage: Storage, arithmetic: Mapping[str, str], *entries: tuple[str, dict[str, Any]]) -> Begun:
    """A run with a checkpoint of step 3 that was computed with this arithmetic, and with these entries in its
    journal."""
    before = Driver(storage, "before")
    before.own()
    parts = write_parts(storage, 3, 1, "before")
    command = CommitSave(generation=GenerationId(1), step=3, parts=parts, measured={})
    before.committer.commit(command, ManifestContext(arithmetic=arithmetic, num_samples=100))
    assert isinstance(before.told.get(timeout=20.0), Committed)
    before.committer.close(20.0)
    journal = Journal(storage, SystemClock(), "before")
    for kind, fields in entries:
        journal.append(kind, fields, durable=True)
    return Begun(before.files)


class Begun:
    """A driver that comes to a run."""

    def __init__(self, files: RunFiles) -> None:
        self.files, self.hold = files, Held()

    def take(self, *workers: AdoptedWorker, **limits: Any) -> tuple[State, list[Command], Mapping[str, Any]]:
        """The state that it begins with, the arithmetic in its journal, and its own."""
        clock = SystemClock()
        startup = RunStartup(
            self.files,
            self.hold,
            lambda _terms, _hold: FoundWorkers(adopted=workers),
            Claims(self.files.storage, "newer"),
            Journal(self.files.storage, clock, "newer"),
            clock,
            lease_s=1.0,
            orphan_wait_s=1.0,
        )
        began = State(limits=replace(LIMITS, **limits), rendezvous=("host", 1, "run"), numerics=numerics.newest())
        state, _ = startup.resume(startup.own(began))
        state, commands, taken = startup.take_over(state)
        assert set(taken) == state.ready
        return state, commands, startup.about(state)


@pytest.fixture
def second_order_alone(first_rules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """This version has dropped the first order."""
    monkeypatch.setitem(numerics.RULES, "order", replace(numerics.RULES["order"], listed=(2,)))


def test_a_run_that_is_older_than_the_rules_continues_under_the_first_of_each(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(numerics.RULES, "order", replace(numerics.RULES["order"], listed=(1, 2)))
    state, commands, about = written(storage, {"cpu": "x"}).take()
    assert (state.arithmetic, state.arithmetic_unmet) == ({"cpu": "x"}, True)
    assert state.numerics == about["numerics"] == ALL_ONE
    assert not commands


def test_a_run_without_a_checkpoint_begins_anew_under_the_rules_that_it_had(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(numerics.RULES, "order", replace(numerics.RULES["order"], listed=(1, 2)))
    Journal(storage, SystemClock(), "before").append("started", STARTED, durable=True)
    files = RunFiles(name="run", storage=storage, keep=Keep(), metadata={}, global_batch_size=4)
    state, _, _ = Begun(files).take()
    assert (state.numerics, state.arithmetic) == (ALL_ONE, None)
    monkeypatch.setitem(numerics.RULES, "order", replace(numerics.RULES["order"], listed=(2,)))
    state, commands, _ = Begun(files).take()  # nothing of the run is kept: nothing is lost by the newest rules
    assert (state.numerics, commands) == (ALL_ONE.replace("order 1", "order 2"), [])


STARTED = {"resumed_after_step": 0, "numerics": ALL_ONE}


@pytest.mark.usefixtures("second_order_alone")
@pytest.mark.parametrize("exact", [True, False])
def test_a_run_under_a_rule_that_this_version_dropped_is_refused_before_a_worker_starts(
    storage: Storage, exact: bool
) -> None:
    run = written(storage, {"cpu": "x", "numerics": ALL_ONE})
    with pytest.raises(InexactError) as refused:
        run.take(exact=exact)
    text = str(refused.value)
    assert "up to step 3 under order 1, and this version of raysharded computes under order 2" in text
    assert "Use the version of raysharded that it ran with" in text
    assert "RunConfig(accept_arithmetic=True)" in text
    assert run.hold.has_let_go


@pytest.mark.usefixtures("second_order_alone")
def test_a_dropped_rule_that_is_accepted_gives_way_and_the_next_driver_continues_with_what_was_accepted(
    storage: Storage,
) -> None:
    run = written(storage, {"cpu": "x", "numerics": ALL_ONE})
    state, commands, about = run.take(accept_arithmetic=True)
    assert state.numerics == about["numerics"] == ALL_ONE.replace("order 1", "order 2")
    (entry,) = of(commands, Record)
    assert (entry.kind, entry.durable) == ("arithmetic", True)
    assert (entry.fields["from_step"], entry.fields["changes"]) == (4, {"order": ["1", "2"]})
    assert entry.fields["arithmetic"] == {"cpu": "x", "numerics": state.numerics}
    Journal(storage, SystemClock(), "newer").append(entry.kind, dict(entry.fields), durable=True)
    again, commands, _ = run.take()  # nobody has to accept it twice, though the newest checkpoint is of before
    assert (again.numerics, commands) == (state.numerics, [])


def test_a_dropped_rule_that_the_program_does_not_use_gives_way_silently(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(numerics.RULES, "compile", replace(numerics.RULES["compile"], listed=(2,)))
    run = written(storage, {"cpu": "x", "numerics": ALL_ONE})
    state, commands, _ = run.take()
    assert (state.numerics, commands) == (ALL_ONE.replace("compile 1", "compile 2"), [])
    with pytest.raises(InexactError, match="under compile 1"):
        run.take(compiles=True)


def test_machines_that_were_accepted_are_the_runs_despite_its_checkpoint(storage: Storage) -> None:
    accepted = arithmetic.entry(4, {"cpu": ("x", "y")}, {"cpu": "y"}, ALL_ONE)
    state, _, _ = written(storage, {"cpu": "x", "numerics": ALL_ONE}, (accepted.kind, dict(accepted.fields))).take()
    assert (state.arithmetic, state.arithmetic_unmet) == ({"cpu": "y"}, True)


def test_what_was_accepted_does_not_hold_for_a_run_that_began_anew_since(storage: Storage) -> None:
    accepted = arithmetic.entry(4, {"cpu": ("x", "y")}, {"cpu": "y"}, ALL_ONE)
    entries = [("started", STARTED), (accepted.kind, dict(accepted.fields)), ("started", STARTED)]
    state, _, _ = written(storage, {"cpu": "w", "numerics": ALL_ONE}, *entries).take()
    assert state.arithmetic == {"cpu": "w"}


@pytest.mark.usefixtures("second_order_alone")
def test_a_machine_that_no_checkpoint_records_is_not_known_after_an_acceptance_either(storage: Storage) -> None:
    run = written(storage, {"numerics": ALL_ONE})
    state, commands, _ = run.take(accept_arithmetic=True)
    (entry,) = of(commands, Record)
    Journal(storage, SystemClock(), "newer").append(entry.kind, dict(entry.fields), durable=True)
    again, _, _ = run.take()
    assert (state.arithmetic, again.arithmetic, again.arithmetic_unmet) == (None, None, False)


@pytest.mark.usefixtures("second_order_alone")
def test_without_a_checkpoint_nobody_is_taken_over_who_computed_under_a_dropped_rule(storage: Storage) -> None:
    Journal(storage, SystemClock(), "before").append("started", STARTED, durable=True)
    files = RunFiles(name="run", storage=storage, keep=Keep(), metadata={}, global_batch_size=4)
    state, commands, _ = Begun(files).take(adopted(5, 0, 1, 3, mirrors=False))
    assert state.ready == frozenset()
    assert of(commands, KillWorker) == [KillWorker(worker=WorkerId(5))]
    (refused,) = [record for record in of(commands, Record) if record.kind == "worker_refused"]
    assert "order" in refused.fields["reason"]


def test_a_manifest_whose_rules_cannot_be_read_is_damaged(storage: Storage) -> None:
    with pytest.raises(CorruptCheckpoint, match="does not say by which rules it was computed: 'order one'"):
        written(storage, {"cpu": "x", "numerics": "order one"}).take()


def test_workers_that_the_driver_before_had_wait_for_a_decision_are_not_taken_over(storage: Storage) -> None:
    waiting = adopted(8, 0, 2, 3)
    waiting = replace(waiting, facts=replace(waiting.facts, arithmetic={"cpu": "y"}))
    run = written(storage, {"cpu": "x"})
    state, commands, _ = run.take(adopted(5, 0, 2, 3), adopted(6, 1, 2, 3), waiting)
    assert state.ready == frozenset({WorkerId(5), WorkerId(6)})
    assert not state.arithmetic_unmet
    assert state.next_worker == 9, "a number is given once"
    assert of(commands, KillWorker) == [KillWorker(worker=WorkerId(8))]
    refused = [record for record in of(commands, Record) if record.kind == "worker_refused"]
    assert [record.fields["reason"] for record in refused] == ["cpu: x in this run, y there"]


@pytest.mark.usefixtures("second_order_alone")
def test_workers_of_a_version_that_had_the_dropped_rule_are_not_taken_over(storage: Storage) -> None:
    run = written(storage, {"cpu": "x", "numerics": ALL_ONE})
    state, commands, _ = run.take(adopted(5, 0, 1, 7, mirrors=False), accept_arithmetic=True)
    assert (state.ready, state.step) == (frozenset(), 3)
    assert [record.fields.get("from_step") for record in of(commands, Record) if record.kind == "arithmetic"] == [4]
    assert of(commands, KillWorker) == [KillWorker(worker=WorkerId(5))]


def test_what_a_driver_knows_goes_into_the_checkpoints_that_it_commits(storage: Storage) -> None:
    driver = make_driver(make_job(storage.url), LIMITS, lambda _kind, _fields: None)
    driver.state = replace(driver.state, arithmetic={"cpu": "y"}, numerics=ALL_ONE.replace("order 1", "order 2"))
    assert driver._known().arithmetic == {"cpu": "y", "numerics": ALL_ONE.replace("order 1", "order 2")}
