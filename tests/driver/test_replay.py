"""Recorded runs, replayed: the same commands for any history, and every change of the journal is found."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings, strategies as st

from raysharded import errors
from raysharded.driver.replay import event_text
from raysharded.driver.replay.encoding import Decoder, Encoder, RecordedError
from raysharded.driver.replay.names import FORMAT
from raysharded.driver.replay.rerun import Replay, load
from raysharded.driver.startup.adopted_workers import taken_over
from raysharded.driver.state.commands import End, Record
from raysharded.driver.state.events import Annotation, Event, Ready, Tick, WorkerReply
from raysharded.driver.state.state import State
from raysharded.errors import NonFiniteLoss, RayshardedError, StorageError, TaskError
from raysharded.ids import GenerationId, WorkerId
from raysharded.journal.log import plain
from raysharded.layout import Held, StateSpec, TensorSpec
from raysharded.overrides import Decisions
from raysharded.protocol.messages import ProbeReply, Progress, Saved, Stopped, StopReason, WorkerInfo
from raysharded.protocol.session import AdoptedWorker
from raysharded.protocol.worker_launcher import WorkerLost
from tests.driver.recorded import record, recorded
from tests.driver.schedules import Schedule, controlled, schedules
from tests.driver.scripted import LIMITS, training
from tests.driver.simulated import Cluster
from tests.driver.simulated_driver import SimulatedDriver
from tests.driver.simulated_workers import SPEC
from tests.driver.strikes import Fault, Strike
from tests.driver.test_simulation import NUM_SCHEDULES, Laws

TENSORS = st.builds(
    TensorSpec,
    name=st.text(max_size=5),
    dtype=st.just("uint8"),
    shape=st.tuples(st.integers(0, 9)),
    replicated=st.booleans(),
)
SPECS = st.lists(TENSORS, max_size=3, unique_by=lambda tensor: tensor.name).map(
    lambda them: StateSpec(tensors=tuple(them))
)
HELD = st.builds(
    Held,
    worker=st.integers(0, 9).map(WorkerId),
    step=st.integers(0, 9),
    medium=st.sampled_from(["snapshot", "mirror"]),
    world_size=st.just(4),
    tensor=st.sampled_from([1, 2]),
    rank=st.integers(0, 3),
    layout_id=st.integers(0, 9),
)
st.register_type_strategy(Mapping, lambda kind: st.dictionaries(*map(st.from_type, get_args(kind)), max_size=3))
st.register_type_strategy(StateSpec, SPECS)
st.register_type_strategy(Held, HELD)
st.register_type_strategy(BaseException, st.builds(errors.CollectiveAborted, st.text()))
st.register_type_strategy(
    Saved, st.builds(Saved, files=st.just(()), fingerprint=st.none(), spec=st.none() | SPECS, seconds=st.floats())
)
st.register_type_strategy(
    Annotation,
    st.builds(Annotation, fields=st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.booleans())),
)


def through_json(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields as the journal keeps and returns them."""
    loaded: dict[str, Any] = json.loads(json.dumps(plain(fields), allow_nan=False))
    return loaded


RECORDINGS: list[tuple[Encoder, Decoder]] = []
"""One recording that continues, unless a test has it: to make an encoder and a decoder takes longer than a hundred
events."""


def again(*events: Event) -> list[Event]:
    """Events that were written one after the other, and read."""
    encoder, decoder = RECORDINGS.pop() if RECORDINGS else (Encoder(), Decoder())
    read = [decoder.event(through_json(encoder.event(event))) for event in events]
    RECORDINGS.append((encoder, decoder))  # not after an error: they may have different values by then
    return read


def text(value: object) -> str:
    """All of the value. A zero that is left out because it is the default anyway may have had a sign."""
    return repr(value).replace("-0.0", "0.0")


# -- values that come back --


@pytest.mark.parametrize("kind", get_args(Event), ids=lambda kind: str(kind.__name__))
@given(data=st.data())
@settings(max_examples=max(8, NUM_SCHEDULES // 120), deadline=None)
def test_every_event_comes_back_as_it_was(kind: type[Event], data: st.DataObject) -> None:
    events: list[Event] = data.draw(st.lists(st.from_type(kind), min_size=1, max_size=2))
    assert text(again(*events)) == text(events)
    assert all("\n" not in event_text.of_event(event) for event in events)


class OutOfMemory(TaskError):
    """A custom error."""


RAISED = [
    TaskError("it is broken", "line 7"),
    NonFiniteLoss("step 3: the loss is nan", "line 8"),
    OutOfMemory("no room", "line 9"),
    errors.CorruptCheckpoint("a byte is wrong"),
    errors.RefusedCheckpoint("not signed"),
    errors.ConfigError("no such data"),
    errors.CollectiveAborted("freed"),
    KeyError("a name"),
    OSError(28, "no space left"),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_an_error_comes_back_with_its_text_its_name_and_all_that_the_machine_reads(error: Exception) -> None:
    (lost,) = again(WorkerLost(worker=WorkerId(1), reason="it raised", error=error))
    assert isinstance(lost, WorkerLost)
    came = lost.error
    assert (type(came).__name__, str(came)) == (type(error).__name__, str(error))
    assert getattr(came, "user_traceback", None) == getattr(error, "user_traceback", None)
    ours = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, RayshardedError)]
    assert [isinstance(came, cls) for cls in ours] == [isinstance(error, cls) for cls in ours]
    assert isinstance(error, RayshardedError) or isinstance(came, RecordedError)


def test_a_long_value_is_written_once() -> None:
    seen = [
        ProbeReply(generation=GenerationId(1), step=s, phase="data", phase_s=1, waits=False, stack="long")
        for s in (1, 2)
    ]
    saved = Saved(generation=GenerationId(1), step=1, spec=SPEC)
    messages: list[ProbeReply | Saved] = [*seen, saved, saved]
    events = [WorkerReply(worker=WorkerId(0), message=message) for message in messages]
    encoder = Encoder()
    written = [json.dumps(encoder.event(event)) for event in events]
    assert ["long" in each for each in written] == [True, False, False, False]
    assert ["columns" in each for each in written] == [False, False, True, False]
    assert again(*events) == events


def test_of_a_checkpoints_files_their_sizes_are_kept() -> None:
    (said,) = again(
        WorkerReply(worker=WorkerId(1), message=Saved(generation=GenerationId(1), step=2, files=(File(7), File(5))))
    )
    assert isinstance(said, WorkerReply)
    assert isinstance(said.message, Saved)
    assert [file.size_bytes for file in said.message.files] == [7, 5]


class File:
    """A worker's message about a file has more than its size."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes, self.boxes = size_bytes, object()


# -- any history --


@settings(max_examples=NUM_SCHEDULES // 10, deadline=None)
@given(st.one_of(schedules(), controlled()))
def test_any_history_that_was_recorded_gives_the_same_commands(schedule: Schedule) -> None:
    cluster = schedule.cluster()
    cluster.run(Laws())
    for driver in cluster.drivers:
        if driver.commands:
            check_recording(driver)


def check_recording(driver: SimulatedDriver) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (found,) = load(str(recorded(Path(folder), driver)))
    assert not found.differences
    decided = [list(moment.commands) for moment in found.moments if moment.commands]
    assert without_fingerprints(decided) == without_fingerprints([each for each in driver.commands if each])
    last = found.moments[-1].state
    assert last is not None
    assert without_fingerprints(without_reports(last)) == without_fingerprints(without_reports(driver.state))
    assert len(list(found.lines())) == len(found.moments) + 2
    json.dumps(found.as_dict(), allow_nan=False)


def without_fingerprints(value: object) -> str:
    """The state without values that the machine only passes on: they are not recorded."""
    return re.sub(r"fingerprint=array\(.*?dtype=uint64\)", "fingerprint=None", repr(value))


def without_reports(state: State) -> State:
    """The state without the steps that workers reported once more: they are not recorded."""
    holdings = {worker: replace(stopped, reports=()) for worker, stopped in state.holdings.items()}
    stops = {worker: replace(stopped, reports=()) for worker, stopped in state.stops.items()}
    return replace(state, holdings=holdings, stops=stops)


def test_of_steps_that_are_reported_again_nothing_is_written(tmp_path: Path) -> None:
    run = training(size=2, step=8)
    run.lost(1)
    run.stopped(0, StopReason.ABORTED, 9, reports=range(1, 10))
    found = replayed(recorded(tmp_path, run))
    (stopped,) = [
        moment.event.message
        for moment in found.moments
        if isinstance(moment.event, WorkerReply) and isinstance(moment.event.message, Stopped)
    ]
    assert [report.step for report in stopped.reports] == [9]
    assert not found.differences


@cache
def history() -> SimulatedDriver:
    """Two losses, an error of the task, checkpoints: to its end. Tests only read it."""
    faults = [Fault(strike=strike, whom=1, nth=nth) for strike, nth in ((Strike.KILL, 25), (Strike.RAISE, 60))]
    cluster = Cluster(LIMITS, save_every=2, seed=4, tick_s=0.25, faults=tuple(faults))
    cluster.run(Laws())
    assert {Strike.KILL, Strike.RAISE} <= set(cluster.struck)
    return cluster.driver


def replayed(folder: Path) -> Replay:
    (found,) = load(str(folder))
    return found


def test_what_changed_nothing_is_left_out(tmp_path: Path) -> None:
    driver = history()
    found = replayed(recorded(tmp_path, driver))
    assert 0 < len(found.moments) - 1 < len(driver.log)
    assert sum(isinstance(moment.event, Tick) for moment in found.moments) < 50


def test_a_driver_that_took_workers_over_is_replayed_from_what_they_held(tmp_path: Path) -> None:
    def adopted(worker: int) -> AdoptedWorker:
        held = [
            Held(worker=WorkerId(worker), step=4, medium="snapshot", world_size=2, rank=worker, layout_id=3),
            Held(worker=WorkerId(worker), step=4, medium="mirror", world_size=2, rank=1 - worker, layout_id=3),
        ]
        stopped = Stopped(
            generation=GenerationId(3),
            reason=StopReason.ABORTED,
            step=4,
            phase="",
            stopped_at=math.inf,
            held=tuple(held),
            specs={4: SPEC},
        )
        facts = WorkerInfo(pid=worker, node="a", node_id="a", arithmetic={"cpu": "x"}, num_samples=100)
        return AdoptedWorker(
            worker=WorkerId(worker),
            facts=facts,
            stopped=stopped,
            reports=(),
            fence=GenerationId(3),
            decisions=Decisions(),
            job="",
            epoch=1,
        )

    state = taken_over(State(limits=LIMITS, rendezvous=("host", 1, "run")), [adopted(0), adopted(1)])
    found = replayed(record(tmp_path, state, [(WorkerLost(worker=WorkerId(1), reason="gone"), 7.5)], at=5.0))
    assert not found.differences
    assert "form generation 4 of workers 0, 1 from memory, step 4" in found.moments[0].decided()
    assert (found.moments[1].after_s, found.moments[1].event) == (2.5, WorkerLost(worker=WorkerId(1), reason="gone"))


def test_every_driver_of_a_run_is_replayed_by_itself(tmp_path: Path) -> None:
    driver = history()
    for writer in ("d1", "d2"):
        record(tmp_path, driver.initial, driver.log, writer)
    assert [found.driver for found in load(str(tmp_path))] == ["d1", "d2"]
    assert not any(found.differences for found in load(str(tmp_path)))


def test_what_workers_write_for_a_driver_that_is_dead_is_not_its_machines(tmp_path: Path) -> None:
    driver = history()
    record(tmp_path, driver.initial, driver.log[:-20])
    orphans: list[dict[str, Any]] = [
        {"kind": "step", "step": 99},
        {"kind": "orphaned", "step": 99, "workers": [0]},
        {"kind": "checkpoint"},
    ]
    add_segment(tmp_path, "d1", orphans)
    assert not replayed(tmp_path).differences


def test_what_the_machine_raised_is_raised_again(tmp_path: Path) -> None:
    facts = WorkerInfo(pid=1, node="a", arithmetic={}, num_samples=1)
    nowhere_to_meet = State(limits=LIMITS)
    log: list[tuple[Event, float]] = [(Ready(worker=WorkerId(worker), facts=facts), 1.0) for worker in range(3)]
    with pytest.raises(TypeError):
        record(tmp_path, nowhere_to_meet, log)
    found = replayed(tmp_path)
    assert not found.differences
    assert found.moments[-1].raised.startswith("TypeError: ")
    assert "TypeError" in found.moments[-1].line()


class Mute(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("not even this")


def test_what_cannot_be_recorded_disturbs_no_run_and_is_named(tmp_path: Path) -> None:
    run = training(size=3, step=2)
    run.lost(1, Mute())
    run.lost(2)
    found = replayed(recorded(tmp_path, run))
    (difference,) = found.differences
    assert "it could not be recorded: WorkerLost: RuntimeError: not even this" in difference
    assert found.moments[-1].number == len(found.moments) - 1


# -- foreign entries --


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "journal").iterdir())


def add_segment(folder: Path, writer: str, entries: list[dict[str, Any]]) -> None:
    head = {"kind": "segment", "writer": writer}
    lines = [json.dumps(entry) for entry in (head, *({"at": 1.0, **entry} for entry in entries))]
    (folder / "journal" / f"{len(segments(folder)) + 1:08d}.jsonl").write_text("\n".join([*lines, ""]))


def change(folder: Path, kind: str, how: Callable[[dict[str, Any]], list[dict[str, Any]]], nth: int = 3) -> str:
    """Replace the nth entry of a kind; returns its place, or former place."""
    for path in segments(folder):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            entry = json.loads(line)
            if entry["kind"] != kind:
                continue
            nth -= 1
            if nth == 0:
                lines[number : number + 1] = [json.dumps(other) for other in how(entry)]
                path.write_text("\n".join([*lines, ""]))
                return f"journal/{path.name}:{number + 1}"
    raise AssertionError(f"not so many entries {kind}")


def gone(_: dict[str, Any]) -> list[dict[str, Any]]:
    return []


def other_loss(entry: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**entry, "loss": 9.75}]


def test_another_number_in_an_entry_is_found_with_its_place(tmp_path: Path) -> None:
    place = change(recorded(tmp_path, history()), "step", other_loss)
    (found,) = replayed(tmp_path).differences
    assert found.startswith(f"{place}: step: loss is 9.75; the machine writes 0.3")


def test_an_entry_that_is_missing_is_found(tmp_path: Path) -> None:
    change(recorded(tmp_path, history()), "step", gone)
    (found,) = replayed(tmp_path).differences
    assert found.endswith("the machine writes step, which does not follow")


def test_an_entry_that_was_put_in_is_found_with_its_place(tmp_path: Path) -> None:
    place = change(recorded(tmp_path, history()), "step", lambda entry: [{"kind": "audit", "at": 1.0}, entry])
    (found,) = replayed(tmp_path).differences
    assert found == f"{place}: audit, which the machine does not write"


def test_an_event_that_is_missing_is_found(tmp_path: Path) -> None:
    change(recorded(tmp_path, history()), "event", gone, nth=12)
    assert any("it is event 13, and 12 was to follow" in found for found in replayed(tmp_path).differences)


def test_an_event_that_differs_is_found(tmp_path: Path) -> None:
    def another_loss(entry: dict[str, Any]) -> list[dict[str, Any]]:
        reports = entry["event"].get("message", {}).get("reports")
        for report in reports or ():
            report["loss"] = 0.125
        return [entry]

    driver = history()
    nth = 1 + next(
        number
        for number, moment in enumerate(replayed(recorded(tmp_path, driver)).moments[1:])
        if isinstance(moment.event, WorkerReply)
        and isinstance(moment.event.message, Progress)
        and moment.event.message.reports
    )
    change(tmp_path, "event", another_loss, nth)
    assert any("loss is 1.0; the machine writes 0.125" in found for found in replayed(tmp_path).differences)


@pytest.mark.parametrize("broken", [{"event": {"is": "Nothing"}}, {"event": None}, {"time": "?"}, {"unwritten": "x"}])
def test_an_event_that_cannot_be_read_is_the_end_of_the_replay(tmp_path: Path, broken: dict[str, Any]) -> None:
    place = change(recorded(tmp_path, history()), "event", lambda entry: [{**entry, **broken}], nth=12)
    found = replayed(tmp_path)
    assert found.differences[-1].startswith(f"{place}: cannot be read")
    assert len(found.moments) == 13
    assert "cannot be read" in found.moments[-1].line()


def test_what_a_dying_driver_could_not_write_any_more_is_no_difference(tmp_path: Path) -> None:
    path = segments(recorded(tmp_path, history()))[-1]
    lines = path.read_text().splitlines()
    (finished,) = [number for number, line in enumerate(lines) if json.loads(line)["kind"] == "finished"]
    path.write_text("\n".join([*lines[:finished], lines[finished][:20]]))  # torn off
    found = replayed(tmp_path)
    assert not found.differences
    assert any(isinstance(command, End) for command in found.moments[-1].commands)


def test_a_recording_of_another_format_is_refused_with_the_version_that_wrote_it(tmp_path: Path) -> None:
    change(
        recorded(tmp_path, history()),
        "recording",
        lambda entry: [{**entry, "format": FORMAT + 1, "version": "7.0"}],
        nth=1,
    )
    with pytest.raises(StorageError, match=rf"format {FORMAT + 1}.*Use the one that wrote it: 7\.0"):
        load(str(tmp_path))


def test_a_run_that_was_not_recorded_and_a_damaged_journal_are_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="there is no run"):
        load(str(tmp_path / "nothing"))
    (tmp_path / "plain" / "journal").mkdir(parents=True)
    add_segment(tmp_path / "plain", "d1", [{"kind": "started"}])
    with pytest.raises(StorageError, match=r"was not recorded.*record_events=True"):
        load(str(tmp_path / "plain"))
    change(recorded(tmp_path / "damaged", history()), "event", gone)
    path = segments(tmp_path / "damaged")[0]
    path.write_text(path.read_text().replace('"kind"', "", 1))
    with pytest.raises(StorageError, match="is damaged"):
        load(str(tmp_path / "damaged"))


def test_a_remark_of_numbers_that_are_not_finite_is_no_difference(tmp_path: Path) -> None:
    driver = history()
    log: list[tuple[Event, float]] = [(Annotation(kind="note", fields={"loss": math.nan, "pair": (1, 2)}), 0.5)]
    found = replayed(record(tmp_path, driver.initial, [*log, (Tick(), 0.75)]))
    assert not found.differences
    assert [command.kind for command in found.moments[1].commands if isinstance(command, Record)] == ["note"]
