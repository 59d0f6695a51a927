"""Simulated workers, and the computations about large runs, at a small scale."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scale import growth, manifest_of, plans
from benchmarks.simulated import Simulated
from raysharded.checkpoint.format.encoding import decode, encode
from raysharded.driver.state.state import Phase
from raysharded.testing.llama import LLAMA_1B


def test_simulated_workers_are_lost_and_come_back_and_no_step_is_lost(tmp_path: Path) -> None:
    crew = Simulated(folder=str(tmp_path), workers=32, spec=LLAMA_1B.state)
    crew.begin()
    crew.run_to(5)
    with crew.measured() as loss:
        crew.lose(2)
    assert len(crew.state.members) == 30
    assert crew.state.step == 6
    with crew.measured() as rejoined:
        crew.rejoin()
    assert len(crew.state.members) == 32
    assert crew.state.phase is Phase.TRAINING
    assert crew.state.step > 6
    crew.close()
    entries = "".join(path.read_text() for path in sorted((tmp_path / "journal").iterdir()))
    assert entries.count('"kind":"recovery"') == 1
    assert entries.count('"kind":"generation"') == 3
    for work in (*loss, *rejoined):
        assert work.events >= 60
        assert 0 < work.slowest_s <= work.machine_s
        assert work.journal_bytes > 0


def test_a_manifest_of_many_workers_is_one_that_can_be_read() -> None:
    manifest = manifest_of(LLAMA_1B.state, 8)  # its boxes tile every tensor: decode checks that
    encoded = encode(manifest)
    assert len(encoded.index) == 0 or decode(encoded.manifest, "here", read_index=lambda *_: encoded.index) == manifest


def test_a_plan_is_measured_for_every_model() -> None:
    lines = [line.what for line in plans(1, (64,))]
    assert [model for model in ("1B", "7B", "70B", "405B") if f"planning, {model} from 64 to 56 workers" in lines] == [
        "1B",
        "7B",
        "70B",
        "405B",
    ]


def test_growth_is_an_exponent() -> None:
    assert growth((2.0, 200.0), (10, 100)) == pytest.approx(2.0)
