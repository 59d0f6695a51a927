"""A recording names events, messages and fields by a table, not by the code."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import get_args, get_type_hints

import pytest

from raysharded.driver.replay.encoding import Decoder, Encoder
from raysharded.driver.replay.names import FORMAT, FORMATS, NAMES, OLDER
from raysharded.driver.state.events import Event, LeadershipLost, WorkerReply
from raysharded.driver.state.state import State
from raysharded.ids import GenerationId, WorkerId
from raysharded.protocol.messages import Prepared
from raysharded.protocol.worker_launcher import WorkerLost
from tests.driver.scripted import LIMITS

MEMBERS = {*get_args(Event), *get_args(get_type_hints(WorkerReply)["message"])}


def test_every_event_and_message_has_a_unique_name_in_each_format() -> None:
    assert NAMES.keys() == MEMBERS
    for names in FORMATS.values():
        assert max(Counter(names.classes.values()).values()) == 1


def test_fields_with_other_names_are_fields_and_the_names_are_free() -> None:
    for names in FORMATS.values():
        for cls, renamed in names.fields.items():
            there = {one.name for one in fields(cls)}
            assert renamed.keys() <= there
            assert there.isdisjoint(renamed.values())


@pytest.mark.parametrize(
    ("event", "written"),
    [
        (
            WorkerReply(worker=WorkerId(1), message=Prepared(prefix="p")),
            {"is": "worker_reply", "worker": 1, "message": {"is": "generation_prepared", "prefix": "p"}},
        ),
        (LeadershipLost(reason="b has it"), {"is": "leadership_lost", "reason": "b has it"}),
        (WorkerLost(worker=WorkerId(0), reason="gone"), {"is": "worker_lost", "worker": 0, "reason": "gone"}),
    ],
)
def test_an_event_is_written_under_its_name_and_read_under_the_older_one_too(
    event: Event, written: dict[str, object]
) -> None:
    assert Encoder().event(event) == {"event": written}
    assert Decoder(FORMAT).event({"event": written}) == event
    to_older = {new: older for older, new in NAMES.values()}

    def older(value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {key: to_older[one] if key == "is" else older(one) for key, one in value.items()}

    assert Decoder(OLDER).event({"event": older(written)}) == event


def test_the_state_of_an_older_recording_has_its_fields_under_the_names_that_they_had() -> None:
    state = State(
        limits=LIMITS,
        terminating_nodes={"n": 1.0},
        rolled_back=("checkpoints/x",),
        invalidated_up_to=GenerationId(3),
    )
    written = Encoder().state(state)["state"]
    assert {"terminating_nodes", "rolled_back", "invalidated_up_to"} <= written.keys()
    renamed = FORMATS[OLDER].fields[State]
    older = {renamed.get(name, name): value for name, value in written.items()}
    assert {"doomed", "undone", "distrusted"} <= older.keys()
    assert Decoder(OLDER).state({"state": older}) == state == Decoder(FORMAT).state({"state": written})
