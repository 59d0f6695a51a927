"""An ordinary script of `accelerate` in a session: the bits of one worker after losses, the plain script's results."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from raysharded.data.loader import MicrobatchLoader
from tests.adapters.accelerate_programs import Script
from tests.adapters.programs import MICROBATCHES, STEPS, classifier, run, sentences
from tests.training.harness import Outcome, make_job

pytestmark = pytest.mark.procs


@cache
def by_one_worker() -> Outcome:
    return run(1, Script(), sentences())


@pytest.mark.parametrize(
    "kills",
    [[(1, 2, "backward"), (2, 3, "snapshot"), (3, 5, "agree")], [(1, 3, "apply"), (2, STEPS, "apply")]],
    ids=str,
)
def test_losses_change_no_bit(kills: list[tuple[int, int, str]]) -> None:
    assert run(4, Script(), sentences(), kills=kills).bits == by_one_worker().bits


def test_the_results_are_those_of_the_plain_script(tmp_path: Path) -> None:
    from accelerate import Accelerator

    loader = MicrobatchLoader(sentences(), make_job("", microbatches=MICROBATCHES).batch)
    keys = [(step, index) for step in range(1, STEPS + 1) for index in range(MICROBATCHES)]
    ordered = [sample for key in keys for sample in loader.load(*key).samples]
    script = Script(str(tmp_path), dropout=0.0)
    plain = Script(dropout=0.0)
    ((_, right, loss, count),) = plain.train(
        Accelerator(gradient_accumulation_steps=MICROBATCHES, cpu=True), classifier(0.0), ordered, shuffle=False
    )
    run(3, script, sentences(), kills=[(1, 4, "forward")])
    lines = (tmp_path / "evaluations").read_text().splitlines()
    assert lines
    for line in lines:
        found = ast.literal_eval(line.partition(" ")[2])[-1]
        assert found[1] == right
        assert found[2] == pytest.approx(loss, abs=1e-5)
        assert found[3] == count == 7
