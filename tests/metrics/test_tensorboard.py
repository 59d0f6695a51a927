"""TensorBoard reads the curves back: one value per step, also after a rewind and in a resumed run."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from raysharded.errors import ConfigError
from raysharded.metrics import Beginning, RunEvent, StepMetrics, TensorBoard

RUN = "gpt"


def needs_tensorboard() -> None:
    pytest.importorskip("tensorboard", reason="needs `pip install 'raysharded[tensorboard]'`")


def beginning(after_step: int) -> Beginning:
    return Beginning(run=RUN, url="runs/gpt", after_step=after_step, settings={})


def steps(writer: TensorBoard, *numbers: int, lifted: float = 0.0) -> None:
    for number in numbers:
        writer.step(
            StepMetrics(step=number, values={"loss": number + lifted, "metrics/accuracy": 0.5}, at=100.0 + number)
        )


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def losses(folder: Path) -> dict[int, float]:
    found = [(scalar.step, scalar.value) for scalar in read(folder / RUN).Scalars("loss")]
    assert [number for number, _ in found] == sorted({number for number, _ in found}), "a curve, step by step"
    return dict(found)


def test_the_events_that_were_written_are_read_back(tmp_path: Path) -> None:
    needs_tensorboard()
    writer = TensorBoard(tmp_path)
    writer.begin(beginning(0))
    steps(writer, 1, 2)
    writer.event(RunEvent(kind="checkpoint", step=2, text="step 2: checkpoint committed", fields={}, at=103.0))
    writer.close()
    curves = read(tmp_path / RUN)
    assert curves.Tags()["scalars"] == ["loss", "metrics/accuracy"]
    assert [(one.step, one.value, one.wall_time) for one in curves.Scalars("loss")] == [(1, 1, 101), (2, 2, 102)]
    (text,) = read(tmp_path / RUN / "events").Tensors("checkpoint/text_summary")
    assert (text.step, text.tensor_proto.string_val[0]) == (2, b"step 2: checkpoint committed")


def test_a_resumed_run_continues_with_its_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_tensorboard()
    now = time.time
    for after_step, numbers, lifted in ((0, range(1, 7), 0.0), (4, range(5, 9), 0.25)):
        monkeypatch.setattr(time, "time", lambda later=after_step: now() + later)  # files are ordered by the second
        writer = TensorBoard(tmp_path)
        writer.begin(beginning(after_step))
        steps(writer, *numbers, lifted=lifted)
        writer.close()
    assert losses(tmp_path) == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5.25, 6: 6.25, 7: 7.25, 8: 8.25}


def test_steps_that_are_done_again_replace_those_that_were_undone(tmp_path: Path) -> None:
    needs_tensorboard()
    writer = TensorBoard(tmp_path)
    writer.begin(beginning(0))
    steps(writer, 1, 2, 3, 4, 5)
    writer.event(RunEvent(kind="rewind", step=5, text="step 6: not finite", fields={}, at=106.0))
    steps(writer, 3, 4, lifted=0.5)
    writer.close()
    assert losses(tmp_path) == {1: 1, 2: 2, 3: 3.5, 4: 4.5}, "5 was undone, and not done again yet"
    assert len(read(tmp_path / RUN / "events").Tensors("rewind/text_summary")) == 1


def test_without_the_package_the_error_shows_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'raysharded\[tensorboard\]'"):
        TensorBoard(tmp_path)
