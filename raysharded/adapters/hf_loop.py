"""State of a Hugging Face `Trainer` that goes back with a step, and the epochs of its loop."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from raysharded.actors.session.held_out import number_of
from raysharded.actors.session.user_step import ENTRY, LEFT
from raysharded.data.access.generators import kept
from raysharded.data.streams.source import digest_of
from raysharded.errors import ConfigError

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


_ROWS = 8
_LIBRARIES = ("transformers", "trl")
_TRACKERS = "transformers.integrations."
_SEEDS_EVENTS = 3
"""The first number of the rule `draws` by which the session calls and seeds the events of a beginning."""
_BEGINNINGS = ("on_epoch_begin", "on_step_begin")
"""Events that the session calls, as often as it begins a step: see `Loop.begin`."""


def rows_of(data: Any) -> str:
    """Digest of a few rows of a map-style dataset, over its whole length; draws of a row's transform are seeded."""
    count, found = len(data), []
    with kept():
        for row in sorted({place * (count - 1) // (_ROWS - 1) for place in range(_ROWS)} if count else ()):
            random.seed(0)
            np.random.seed(0)
            torch.default_generator.manual_seed(0)
            try:
                found.append(digest_of(data[row]))
            except Exception as error:  # noqa: BLE001 - the user's code; the run raises it when it needs the row
                found.append(type(error).__name__)
    return digest_of(found)[:16]


class Loop(TrainerCallback):
    """The trainer's first callback, and its registered state.

    The trainer's own loop counts steps and epochs also when a step is done again. So they follow from
    `TrainerState.global_step`, which goes back with the step.
    """

    def __init__(self, trainer: Any) -> None:
        """`trainer`: the elastic one."""
        self._trainer = trainer
        self._samples: int = len(trainer.train_dataset)  # `require_data` has looked
        self._rows = rows_of(trainer.train_dataset)
        self._handler = trainer.callback_handler
        for event in _BEGINNINGS:
            setattr(self._handler, event, partial(self._from_loop, event))
        self._begun = -1
        """`global_step` at the loop's newest call of `on_step_begin`."""
        self._epoch = -1
        """The epoch that was begun last."""
        self._has_shown = False
        """True if the trackers of this process were set up as those of rank 0."""
        self._newest = self.state_dict()

    def epoch(self, step: int) -> float:
        """Epochs that are done after a step."""
        size: int = self._trainer.session.batch.global_batch_size
        return step * size / self._samples

    def ends_epoch(self, step: int) -> bool:
        """True if an epoch ends within this step."""
        return math.floor(self.epoch(step)) > math.floor(self.epoch(step - 1))

    def saves(self, step: int) -> bool:
        """True if the arguments want a checkpoint behind this step."""
        trainer = self._trainer
        by = SaveStrategy(trainer.args.save_strategy).value
        every = trainer.state.save_steps
        return (by == "steps" and every > 0 and step % every == 0) or (by == "epoch" and self.ends_epoch(step))

    # -- registered state --

    def state_dict(self) -> dict[str, Any]:
        """Plain data, the same on every worker."""
        trainer, state = self._trainer, self._trainer.state
        return {
            "step": state.global_step,
            "rows": self._rows,
            "best": [state.best_metric, state.best_global_step],
            "loss": float(getattr(trainer, "_tr_loss", 0.0)),
            "losses": getattr(trainer, "_total_loss_scalar", 0.0),
            "logged": getattr(trainer, "_globalstep_last_logged", 0),
            "callbacks": [one.state()["attributes"] for one in self._exportable()],
        }

    def load_state_dict(self, was: dict[str, Any]) -> None:
        """Bring the trainer to this state. Raises ConfigError if it is that of another `train_dataset`."""
        if was.get("rows", self._rows) != self._rows:  # a version before had none
            raise ConfigError(
                f"{type(self._trainer).__name__}'s train_dataset has other rows than the run began with, or the same "
                "in another order. Give a seed to what shuffles or splits it, as .shuffle(seed=...); or give the run "
                "another name."
            )
        self._newest = was
        trainer, state = self._trainer, self._trainer.state
        state.global_step, (state.best_metric, state.best_global_step) = was["step"], was["best"]
        trainer._tr_loss = torch.tensor(was["loss"], device=trainer.args.device)
        trainer._total_loss_scalar, trainer._globalstep_last_logged = was["losses"], was["logged"]
        for one, attributes in zip(self._exportable(), was["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(one, name, value)
        state.log_history = [line for line in state.log_history if line.get("step", 0) <= state.global_step]
        state.epoch = self.epoch(state.global_step)
        trainer.control.should_training_stop = trainer.control.should_epoch_stop = False

    def _exportable(self) -> list[Any]:
        return [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState)]

    # -- events --

    def begin(self) -> None:
        """Call the events with which a step begins, and its epoch if that is another than the newest one.

        Once for each attempt at a step, ahead of its microbatches. Draws of a step's event follow from the step, and
        those of an epoch's from the step before its first: so they are the same in a worker that joins within it.
        """
        trainer, draws = self._trainer, self._trainer.session.draws
        step, size = trainer.state.global_step + 1, trainer.session.batch.global_batch_size
        self._show_rank(trainer.state)
        if not self._seeds_events():
            if self._begun != trainer.state.global_step:  # the step before was undone
                self._call("on_step_begin")
            return
        epoch = (step - 1) * size // self._samples
        if epoch != self._epoch:
            draws.seed(-(-epoch * self._samples // size), LEFT)
            self._call("on_epoch_begin")
            self._epoch = epoch
            draws.seed(step, ENTRY)
        self._call("on_step_begin")

    def _seeds_events(self) -> bool:
        """Whether the run's rule `draws` seeds the events; else the loop calls them, and they draw what it left."""
        return number_of(self._trainer.session, "draws") >= _SEEDS_EVENTS

    def _from_loop(
        self, event: str, _args: TrainingArguments, state: TrainerState, control: TrainerControl
    ) -> TrainerControl:
        """An event where the loop calls it: ahead of the substeps, which a set should_epoch_stop would end."""
        if not self._seeds_events():
            self._show_rank(state)
            self._begun = state.global_step if event == "on_step_begin" else self._begun
            self._call(event)
            called: TrainerControl = self._trainer.control
            return called
        control.should_epoch_stop = False
        return control

    def _call(self, event: str) -> None:
        trainer = self._trainer
        method = getattr(type(self._handler), event)
        trainer.control = method(self._handler, trainer.args, trainer.state, trainer.control)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        self._trainer._initial_global_step = 0
        self.load_state_dict(self._newest)  # the loop has set its losses to 0 since
        state.is_world_process_zero = state.is_local_process_zero = self._has_shown = self._trainer.session.rank == 0
        if self._has_shown:  # the constructor has called it, as the rank was not known
            for kind, one in self._showing():
                self._call_of(kind, one, "on_init_end")
        return control

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        state.epoch = self.epoch(state.global_step)
        control.should_epoch_stop = self.ends_epoch(state.global_step)
        return control

    def _show_rank(self, state: TrainerState) -> None:
        """Let what writes and prints do so on rank 0, which may be another worker than before.

        There, progress bars begin anew, and trackers are set up: at the training's beginning they do so on rank 0 only.
        """
        is_first = self._trainer.session.rank == 0
        if is_first == state.is_world_process_zero:
            return
        showing = list(self._showing())
        bars = [(kind, one) for kind, one in showing if hasattr(one, "training_bar")]
        if not is_first:
            for kind, one in bars:
                self._call_of(kind, one, "on_predict")  # closes the bar of an evaluation
                self._call_of(kind, one, "on_train_end")
        state.is_world_process_zero = state.is_local_process_zero = is_first
        if is_first:
            for kind, one in bars if self._has_shown else showing:
                if hasattr(one, "_initialized"):
                    one._initialized = False
                self._call_of(kind, one, "on_init_end")
                self._call_of(kind, one, "on_train_begin")
            self._has_shown = True

    def _showing(self) -> Iterator[tuple[type, Any]]:
        """Progress bars and trackers of transformers and TRL, also of a user's subclass: (the library's class, it)."""
        for one in self._handler.callbacks:
            kind = next(
                kind for kind in type(one).__mro__ if kind.__module__.split(".")[0] in (*_LIBRARIES, "builtins")
            )
            shows = hasattr(one, "training_bar") or hasattr(one, "_initialized")
            is_ready_made = issubclass(kind, TrainerCallback) and kind is not TrainerCallback
            if is_ready_made and (kind.__module__.startswith(_TRACKERS) or shows):
                yield kind, one

    def _call_of(self, kind: type, one: Any, event: str) -> None:
        """Call the library's own method for an event: that of a user's subclass is called once."""
        trainer, handler = self._trainer, self._handler
        names = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
        given = {name: getattr(handler, name) for name in names}
        getattr(kind, event)(one, trainer.args, trainer.state, trainer.control, **given)
