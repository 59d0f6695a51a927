"""State of a Hugging Face `Trainer` that goes back with a step, and the epochs of its loop."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


class Loop(TrainerCallback):
    """The trainer's first callback, and its registered state.

    The trainer's own loop counts steps and epochs also when a step is done again. So they follow from
    `TrainerState.global_step`, which goes back with the step.
    """

    def __init__(self, trainer: Any) -> None:
        """`trainer`: the elastic one."""
        self._trainer = trainer
        self._samples: int = len(trainer.train_dataset)  # `require_data` has looked
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
            "best": [state.best_metric, state.best_global_step],
            "loss": float(getattr(trainer, "_tr_loss", 0.0)),
            "losses": getattr(trainer, "_total_loss_scalar", 0.0),
            "logged": getattr(trainer, "_globalstep_last_logged", 0),
            "callbacks": [one.state()["attributes"] for one in self._exportable()],
        }

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        """Bring the trainer to this state."""
        self._newest = kept
        trainer, state = self._trainer, self._trainer.state
        state.global_step, (state.best_metric, state.best_global_step) = kept["step"], kept["best"]
        trainer._tr_loss = torch.tensor(kept["loss"], device=trainer.args.device)
        trainer._total_loss_scalar, trainer._globalstep_last_logged = kept["losses"], kept["logged"]
        for one, attributes in zip(self._exportable(), kept["callbacks"], strict=True):
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
