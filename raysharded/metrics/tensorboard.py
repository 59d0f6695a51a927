"""A run's curves and events for TensorBoard."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from raysharded.errors import ConfigError
from raysharded.metrics_writer import Beginning, RunEvent, StepMetrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FLUSH_S = 10
"""Seconds until written data becomes visible."""


class TensorBoard:
    """Writes below `folder`: the numbers of the steps to `<run>`, events as text to `<run>/events`.

    Steps computed again replace those that were undone, also in a resumed run. A mark in the file invalidates all
    earlier data from a step on, as the `purge_step` of torch's SummaryWriter does. Events stay.

    Raises ConfigError if TensorBoard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """`folder`: the argument of `tensorboard --logdir`; a local folder, or a URL that TensorBoard supports."""
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError("TensorBoard: not installed. Run `pip install 'raysharded[tensorboard]'`.")
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
    """Invalidate the data of this step and later ones in this and older files. The mark is written into the file,
    because the order of two files of the same second is undefined."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    assert writer.file_writer is not None, "it was closed"
    writer.file_writer.add_event(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)), first_step)
