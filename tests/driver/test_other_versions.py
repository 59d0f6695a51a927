"""A driver that finds workers of another version touches nothing until they have written what they hold."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from raysharded.driver.startup.other_versions import WAIT_S, wait_for_their_checkpoint
from raysharded.errors import ClusterError, RunFailed, RunOwnedElsewhere
from raysharded.journal.entry_text import incident_text
from raysharded.protocol.version import FIRST, OtherVersion
from raysharded.protocol.worker_launcher import WorkersOfAnotherVersion

OLDER = OtherVersion(protocol=FIRST, raysharded="")


def found(workers: int = 2, *, have_driver: bool = False, wait_s: float | None = None) -> WorkersOfAnotherVersion:
    return WorkersOfAnotherVersion(version=OLDER, workers=workers, have_driver=have_driver, wait_s=wait_s)


class Waiting:
    """A driver's wait, in simulated time."""

    def __init__(self, *looks: WorkersOfAnotherVersion | None) -> None:
        self.looks, self.now, self.said, self.asked = list(looks), 0.0, list[Mapping[str, object]](), 0
        self.held = self.given_up = False

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1000.0 + self.now

    def require_free(self) -> None:
        self.asked += 1
        if self.held:
            raise RunOwnedElsewhere("held")

    def pause(self, seconds: float) -> None:
        if self.given_up:
            raise RunFailed("stopped")
        self.now += seconds

    def wait(self, *, take_over: bool = False) -> None:
        wait_for_their_checkpoint(
            "run", lambda: self.looks.pop(0), self.require_free, self.pause, self, self.said.append, take_over=take_over
        )


def test_without_such_workers_nothing_is_queried_or_reported() -> None:
    waiting = Waiting(None)
    waiting.wait()
    assert (waiting.asked, waiting.said, waiting.now) == (0, [], 0.0)


def test_it_waits_until_they_have_exited_and_reports_once_since_they_have_no_driver() -> None:
    waiting = Waiting(found(have_driver=True), found(), found(1), None)
    waiting.wait()
    assert waiting.looks == []
    (said,) = waiting.said
    assert said["workers"] == 2
    assert said["until"] == 1000.0 + 1.0 + WAIT_S  # they could not be queried for the time that they wait
    text = incident_text("waiting_for_workers", said)
    assert text is not None
    assert text.startswith("2 workers of raysharded 0.1 (protocol 1; this is")
    assert "unless their driver gave them another time" in text


def test_workers_that_can_be_queried_report_how_long_they_wait() -> None:
    waiting = Waiting(found(wait_s=12.5), None)
    waiting.wait()
    assert waiting.said[0]["wait_s"] == 12.5
    text = incident_text("waiting_for_workers", waiting.said[0])
    assert text is not None
    assert "unless" not in text


def test_a_driver_of_theirs_that_lives_is_not_disturbed() -> None:
    waiting = Waiting(found(have_driver=True))
    waiting.held = True
    with pytest.raises(RunOwnedElsewhere, match="held"):
        waiting.wait()
    assert waiting.said == []


def test_they_cannot_be_taken_over_by_force() -> None:
    with pytest.raises(RunOwnedElsewhere, match=r"2 workers of raysharded 0\.1 .* without take_over"):
        Waiting(found()).wait(take_over=True)


def test_workers_that_never_end_are_named_with_the_way_out_and_reported_again_every_minute() -> None:
    waiting = Waiting(*[found(wait_s=10.0)] * 2000)
    with pytest.raises(ClusterError, match=r"2 workers .* ray::Tenant"):
        waiting.wait()
    assert 900.0 <= waiting.now < 1000.0
    assert len(waiting.said) == int(waiting.now // 60) + 1


def test_those_that_cannot_be_queried_are_waited_for_as_long_as_it_takes_and_their_time_does_not_move() -> None:
    waiting = Waiting(*[found()] * 3000, None)
    waiting.wait()
    assert waiting.now == 3000.0
    assert [said["wait_s"] for said in waiting.said[:6]] == [300.0, 240.0, 180.0, 120.0, 60.0, 0.0]
    assert {said["until"] for said in waiting.said[:6]} == {1000.0 + WAIT_S}


def test_the_wait_can_be_abandoned() -> None:
    waiting = Waiting(found(), found())
    waiting.given_up = True
    with pytest.raises(RunFailed, match="stopped"):
        waiting.wait()
