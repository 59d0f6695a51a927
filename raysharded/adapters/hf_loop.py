"""State of a Hugging Face `Trainer` that goes back with a step, and the epochs of its loop."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from raysharded.data.access.generators import kept
from raysharded.data.streams.source import digest_of
from raysharded.errors import ConfigError

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


_ROWS = 8


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
        self.begun = -1
        """`global_step` at the newest call of `on_step_begin`."""
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

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        self._trainer._initial_global_step = 0
        self.load_state_dict(self._newest)  # the loop has set its losses to 0 since
        self._show_rank(state)
        return control

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        self.begun = state.global_step
        self._show_rank(state)
        return control

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        state.epoch = self.epoch(state.global_step)
        control.should_epoch_stop = self.ends_epoch(state.global_step)
        return control

    def _show_rank(self, state: TrainerState) -> None:
        """Let what writes and prints do so on rank 0, which may be another worker than before."""
        state.is_world_process_zero = state.is_local_process_zero = self._trainer.session.rank == 0
