"""`raysharded doctor --self-test`: the broken torch that it is for is found, with what differs."""

from __future__ import annotations

import pytest

from raysharded.cli import diagnostics
from raysharded.demo import self_test
from tests.training.older_torch import PadsAgainUnseen

pytestmark = pytest.mark.procs


def test_updates_that_no_forward_sees_are_found_at_two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "ByteGPT", PadsAgainUnseen)
    finding = diagnostics.self_test()
    assert not finding.ok
    assert finding.found == "other numbers at 2 workers than at 1"
    assert finding.advice.startswith("the loss of step 2 is 5.")  # the first step has the weights of the start
    assert "; the weights differ: their fingerprint is " in finding.advice
    assert finding.advice.endswith("tested: torch 2.13 to 2.15, ray 2.54 to 2.60.")
