"""Hugging Face's `Trainer` in a session: its own loop, elastic, with the bits of one worker.

`elastic(Trainer, session)` overrides the methods in which the loop meets data, gradients, held-out data and files.
Tested with transformers 5.24, accelerate 1.15 and PEFT 0.21.
"""

from __future__ import annotations

import logging
import math
import sys
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate import PartialState
from transformers.training_args import OptimizerNames

from raysharded.actors.session.held_out import gradient, num_samples_of, reads_places, refuse_numbers
from raysharded.adapters.hf_arguments import require_data, require_steps, require_supported
from raysharded.adapters.hf_loop import Loop
from raysharded.adapters.hf_model import Built, write_whole
from raysharded.adapters.hf_outputs import Outputs, autocast
from raysharded.adapters.replaced_methods import HUGGING_FACE, require_own_methods
from raysharded.errors import CollectiveAborted, ConfigError
from raysharded.task import Loss

if TYPE_CHECKING:
    from raysharded.actors.session.user_session import Session

TESTED = "5.24"
"""The version of transformers that the adapter was tested with."""
_NEW = ("_collator", "_loss_of", "_norm", "_note", "_print", "_require_held_out", "_whole_model", "_with_tied")
_log = logging.getLogger("raysharded.adapters")


def elastic(trainer: type[Any], session: Session) -> type[Any]:
    """A `Trainer`, or a subclass such as `Seq2SeqTrainer`, that trains in this session; use it as that class.

    Its arguments, callbacks, collator and own methods stay. Give it the model that `session.build` returned, and in
    `train_dataset` the data that `ElasticTrainer` has. Raises ConfigError for a subclass with a method of which the
    session's takes the place.
    """
    own = [name for kind in (Elastic, Outputs, Built) for name, value in vars(kind).items() if callable(value)]
    lost = sorted(name for name in own if name not in _NEW and not hasattr(trainer, name))
    if lost:
        raise ConfigError(
            f"the {trainer.__name__} of transformers {transformers.__version__} has no {lost[0]}: the adapter was "
            f"tested with {TESTED}. Install that version."
        )
    require_own_methods(trainer, HUGGING_FACE)
    PartialState(cpu=session.device.type == "cpu")  # arguments that were made elsewhere have not set it here
    return type(trainer.__name__, (Elastic, trainer), {"session": session})


class Elastic(Outputs, Built):
    """The methods of a `Trainer` that are overridden. `train` may be called once."""

    # -- before the loop --

    def create_accelerator_and_postprocess(self) -> None:
        require_supported(self.args, self.session.batch)
        if self.args.optim == OptimizerNames.ADAMW_TORCH_FUSED:
            _log.info("optim='adamw_torch_fused' rounds otherwise for other shards: 'adamw_torch' takes its place.")
            self.args.optim = OptimizerNames.ADAMW_TORCH
        super().create_accelerator_and_postprocess()

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Its parameters have memory, and a device, once the session has shared them."""

    def is_world_process_zero(self) -> bool:
        return self._loop is not None and self.session.rank == 0

    is_local_process_zero = is_world_process_zero

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: list[str] | None = None
    ) -> Any:
        """As `Trainer.train`. The run resumes from its own checkpoints: `resume_from_checkpoint` has no effect."""
        output = super().train(ignore_keys_for_eval=ignore_keys_for_eval)
        if self.state.global_step < self.session.max_steps:
            self.session.stop()
        return output

    def get_train_dataloader(self) -> Any:
        require_data(self, num_samples_of(self.session), self.session.batch)
        if not reads_places(self.session):
            refuse_numbers(f"{type(self).__name__}(train_dataset=...)", self.train_dataset)
        return []  # the session reads the data

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        samples, size, last = len(self.train_dataset), self.session.batch.global_batch_size, self.session.max_steps  # type: ignore[arg-type]
        require_steps(args, samples, self.session.batch, last)
        return sys.maxsize, sys.maxsize, samples, size * last, size, sys.maxsize, last  # `Loop` ends epochs

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps)
        loop, model, optimizer = Loop(self), self.model, self.optimizer
        assert model is not None
        assert optimizer is not None
        self.session.shard(model, optimizer, collate=self._collator(), scheduler=self.lr_scheduler, trainer=loop)
        write_whole(self, model)
        self._loop, self.state.num_train_epochs = loop, math.ceil(loop.epoch(max_steps))
        self.callback_handler.callbacks.insert(0, loop)
        self.accelerator._models.append(model)  # otherwise an evaluation would prepare it in accelerate's way
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        return model, train_dataloader

    # -- in the loop --

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        return [*[{}] * (num_batches - 1), {"is_last": True}], None  # a whole step is computed in place of the last

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        assert self._loop is not None
        loss = 0.0
        model.train()  # an evaluation has left it in eval mode
        if "is_last" in inputs:
            if self._loop.saves(self.state.global_step + 1):
                self.session.save()
            loss = gradient(self.session, self._loss_of, self._loop.begin).loss
        return torch.tensor(loss, device=self.args.device)

    def _loss_of(self, batch: Any) -> Loss | torch.Tensor:
        inputs = self._prepare_inputs(batch)
        count: Any = self._get_num_items_in_batch([inputs], self.args.device)
        least = None if count is None else torch.as_tensor(count).clamp(min=1)
        model: Any = self.model
        with self.compute_loss_context_manager(), autocast(self.args):
            loss: Any = self.compute_loss(model, inputs, num_items_in_batch=least)
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:
            is_scaled = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        return loss if least is None or not is_scaled else Loss(loss * least, count)

    def _clip_grad_norm(self, model: Any) -> float:
        return self._norm(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self._norm(math.inf) if grad_norm is None else grad_norm

    def _norm(self, limit: float) -> float:
        assert self.session.step is not None
        return self.session.step.clip_grad_norm_(limit)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        except CollectiveAborted:  # a worker was lost: the step is done again, and this with it
            if not self.session.is_interrupted:
                raise
