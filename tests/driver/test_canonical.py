"""The canonical view: names for everything, one view for equal values, and another for others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from raysharded.driver.state.commands import Command, End, Record
from raysharded.driver.state.events import Deleted, Event, Tick
from raysharded.driver.state.node_health import NodeRecord
from raysharded.driver.state.state import Checkpointed, Phase, State
from raysharded.errors import RunFailed
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import StateSpec
from raysharded.protocol.messages import FromCheckpoint, FromStart
from raysharded.protocol.worker_launcher import LeaveNotice, WorkerLost
from tests.driver import canonical
from tests.driver.canonical import (
    ENUMS,
    GONE,
    NAMES,
    Flat,
    Memo,
    Names,
    StateView,
    by_today,
    command_view,
    event_view,
    state_view,
)
from tests.driver.frozen import read_drawn
from tests.driver.schedules import BASE
from tests.driver.simulated_driver import SimulatedDriver
from tests.driver.test_simulation import Laws

WITHOUT_NAMES = {StateSpec}
"""Shown by their own JSON."""


def fields_of(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def made_of(*roots: Any) -> Iterator[type]:
    """The classes of ours that annotations name, from these on."""
    seen: set[Any] = set()
    waiting = list(roots)
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        waiting += get_args(one)
        if isinstance(one, type) and one.__module__.startswith("raysharded") and one not in WITHOUT_NAMES:
            if dataclasses.is_dataclass(one):
                yield one
                hints = get_type_hints(one)
                waiting += [hints[name] for name in fields_of(one)]
            elif issubclass(one, Enum):
                yield one


@pytest.mark.parametrize("cls", list(made_of(Event, Command, State)))
def test_every_class_and_field_of_events_commands_and_states_has_a_canonical_name(cls: type) -> None:
    where = f"tests/driver/canonical.py: {cls.__module__}.{cls.__name__}"
    if issubclass(cls, Enum):
        assert cls in ENUMS, f"{where} is in no table of names: add it to ENUMS"
        names, today = by_today(ENUMS[cls]), set(cls.__members__)
    else:
        assert cls in NAMES, f"{where} is in no table of names: add it to NAMES"
        names, today = NAMES[cls].by_field(), set(fields_of(cls))
        assert NAMES[cls].later.keys() | NAMES[cls].numbered <= set(names.values()), f"{where}: no such fields"
    assert today - names.keys() == set(), f"{where}: name these fields, with `later` if recorded histories lack them"
    assert names.keys() - today == set(), (
        f"{where} has no such fields any more; a new name is written `today=canonical`"
    )
    assert len(set(names.values())) == len(names), f"{where}: two fields have one name"


def test_no_two_events_and_no_two_commands_have_one_name() -> None:
    for union in (Event, Command):
        classes = get_args(union)
        assert len({NAMES[cls].name for cls in classes}) == len(classes)


def test_a_command_is_its_name_and_the_paths_and_values_of_its_parts() -> None:
    record = Record(kind="step", fields={"seconds": {"b": 2.0, "a": 0.1}, "loss": 0.1 + 0.2}, durable=True)
    assert command_view(record) == (
        *("record", "kind", "step", "fields['loss']", 0.30000000000000004),
        *("fields['seconds']", "{'a': 0.1, 'b': 2.0}", "durable", True, "awaited_by", None),
    )
    assert command_view(End(error=RunFailed("why"))) == ("end", "error", "RunFailed('why')")
    assert event_view(Tick()) == ("tick",)


def test_equal_values_have_one_view_for_every_order_of_sets_and_tables_and_all_types_of_numbers() -> None:
    names = [f"node{number}" for number in range(40)]
    one = State(
        limits=BASE,
        ready=frozenset(map(WorkerId, range(40))),
        terminating_nodes=dict.fromkeys(names, 1.5),
        nodes={name: NodeRecord(host=name) for name in names},
        since=float(np.float64(0.1)),
        step=3,
    )
    other = State(
        limits=replace(BASE),
        ready=frozenset(map(WorkerId, reversed(range(40)))),
        terminating_nodes=dict.fromkeys(reversed(names), 1.5),
        nodes={name: NodeRecord(host=name) for name in reversed(names)},
        since=np.float64(0.1),
        step=np.int64(3),  # type: ignore[arg-type]  # as a careless sum may be
    )
    assert repr(state_view(one)) == repr(state_view(other))
    assert list(state_view(one)) == sorted(state_view(one))
    assert canonical._text(frozenset(names), Memo()) == canonical._text(frozenset(reversed(names)), Memo())


@pytest.mark.parametrize(
    ("changed", "path", "value"),
    [
        ({"since": 0.1 + 0.2}, "since", 0.30000000000000004),
        ({"step": True}, "step", True),
        ({"phase": Phase.PAUSED}, "phase", "PAUSED"),
        ({"source": FromStart()}, "source", "from_start"),
        ({"limits": replace(BASE, spares=2)}, "limits.spares", 2),
        ({"ready": frozenset({WorkerId(2)})}, "ready", "{2}"),
    ],
)
def test_any_other_value_is_a_change_at_its_path(changed: dict[str, Any], path: str, value: object) -> None:
    state = State(limits=BASE, since=0.3, step=1)
    view = StateView(Memo())
    view.changes(state)
    assert view.changes(replace(state)) == {}
    assert view.changes(replace(state, limits=replace(BASE), ready=frozenset())) == {}
    found = view.changes(replace(state, **changed))
    assert repr(found[path]) == repr(value)


def test_the_changes_of_a_history_add_up_to_its_states() -> None:
    checked = 0
    for history in read_drawn(0)[:12]:
        memo = Memo()
        views: dict[str, tuple[StateView, Flat]] = {}

        def look(driver: SimulatedDriver, event: object, commands: object, state: State, memo: Memo = memo) -> None:
            nonlocal checked
            view, flat = views.setdefault(driver.name, (StateView(memo), {}))  # noqa: B023
            for path, value in view.changes(state).items():
                if value == GONE:
                    del flat[path]
                else:
                    flat[path] = value
            assert repr(dict(sorted(flat.items()))) == repr(state_view(state, memo))
            checked += 1

        history.schedule.cluster().run(Laws(), look)
    assert checked > 500


def test_of_a_files_digest_only_whether_it_is_another_one_is_inspected() -> None:
    memo = Memo()

    def view(digest: str) -> object:
        source = FromCheckpoint(step=1, prefix="a", digest=digest)
        checkpoint = Checkpointed(step=1, prefix="a", digest=digest)
        found = state_view(State(limits=BASE, source=source, checkpoint=checkpoint), memo)
        return found["source.digest"], found["checkpoint.digest"]

    assert [view("x"), view("y"), view("x")] == [(1, 1), (2, 2), (1, 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Toy:
    worker_id: int
    newer: int = 7


def test_a_field_gets_another_name_and_a_new_one_comes_without_another_view(monkeypatch: pytest.MonkeyPatch) -> None:
    toy: Any = Toy
    monkeypatch.setitem(canonical.NAMES, Toy, Names("toy", "worker_id=worker newer", later={"newer": 7}))
    monkeypatch.setitem(canonical._PARTS, Toy, canonical._parts_of(Toy))
    assert command_view(toy(worker_id=3)) == ("toy", "worker", 3)
    assert command_view(toy(worker_id=3, newer=8)) == ("toy", "worker", 3, "newer", 8)


def test_what_has_no_name_is_an_error_that_names_the_place_for_it() -> None:
    with pytest.raises(TypeError, match=r"object has no canonical view; name it in tests\.driver\.canonical\.NAMES"):
        event_view(LeaveNotice(workers=(object(),), reason="", within_s=1.0))  # type: ignore[arg-type]


def test_errors_and_lists_of_names_are_shown_whole() -> None:
    lost = WorkerLost(worker=WorkerId(1), reason="killed", error=ValueError("x"))
    assert event_view(lost)[1:7] == ("worker", 1, "reason", "killed", "error", "ValueError('x')")
    assert event_view(Deleted(prefixes=("b", "a")))[2] == "['b', 'a']"
    assert command_view(Record(kind="k", awaited_by=GenerationId(2)))[1:4] == ("kind", "k", "fields")
