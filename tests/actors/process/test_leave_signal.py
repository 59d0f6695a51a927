"""The messages of a worker that receives leave notices, to its driver: every notice, in order."""

from __future__ import annotations

from raysharded.actors.process.leave_signal import LeaveInbox
from raysharded.ids import WorkerId


def test_every_notice_is_reported_though_a_later_one_came_before_the_first_query() -> None:
    leaving = LeaveInbox(WorkerId(1), grace_s=25.0)
    leaving.tell_node("it is preempted", 30.0)
    leaving.tell_node("it is drained", 300.0)
    first = leaving.next(0, 0.0)
    assert first is not None
    assert (first.number, first.reason) == (1, "it is preempted")
    assert first.left_s <= 30.0
    second = leaving.next(first.number, 0.0)
    assert second is not None
    assert (second.number, second.reason) == (2, "it is drained")
    assert leaving.next(second.number, 0.0) is None
