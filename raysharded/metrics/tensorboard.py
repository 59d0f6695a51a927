"""A run's curves and events as TensorBoard reads them."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from raysharded.errors import ConfigError
from raysharded.metrics_writer import Beginning, RunEvent, StepMetrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FLUSH_S = 10
"""What is written is seen after so long."""


class TensorBoard:
    """Writes below `folder`: the numbers of the steps to `<run>`, what happened, as text, to `<run>/events`.

    Steps that are done once more replace those that were undone, in a resumed run too: a mark says from which step on
    what was written before does not count, as torch's SummaryWriter makes it of its `purge_step`. Events stay.

    Raises ConfigError if TensorBoard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """`folder`: what `tensorboard --logdir` is given; a local folder, or a URL that TensorBoard knows."""
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError("TensorBoard: not installed. Say `pip install 'raysharded[tensorboard]'`.")
        self._folder = os.fspath(folder)
        self._run = ""
        self._newest = 0
        self._curves: SummaryWriter | None = None
        self._events: SummaryWriter | None = None

    def begin(self, beginning: Beginning) -> None:
        self.close()
        self._run = f"{self._folder.rstrip('/')}/{beginning.run}"
        self._events = _writer(f"{self._run}/events")
        self._curves = _writer(self._run, purge_step=beginning.after_step + 1)
        self._newest = beginning.after_step

    def step(self, step: StepMetrics) -> None:
        assert self._curves is not None, "begin comes first"
        if step.step <= self._newest:
            _purge(self._curves, step.step)
        self._newest = step.step
        for name, value in step.values.items():
            self._curves.add_scalar(name, value, step.step, walltime=step.at)

    def event(self, event: RunEvent) -> None:
        assert self._events is not None, "begin comes first"
        self._events.add_text(event.kind, event.text, event.step, walltime=event.at)

    def close(self) -> None:
        for writer in (self._curves, self._events):
            if writer is not None:
                writer.close()
        self._curves = self._events = None


def _writer(folder: str, purge_step: int | None = None) -> SummaryWriter:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder, purge_step=purge_step, flush_secs=FLUSH_S)


def _purge(writer: SummaryWriter, first_step: int) -> None:
    """What this and older files say so far of this step and those after it does not count. The mark is put into the
    file, as the order of two files of the same second is not sure."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    assert writer.file_writer is not None, "it was closed"
    writer.file_writer.add_event(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)), first_step)
