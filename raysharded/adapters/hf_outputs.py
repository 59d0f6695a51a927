"""Evaluation, predictions and files of a Hugging Face `Trainer`: computed together, and whole on each worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from transformers.trainer_utils import RemoveColumnsCollator

from raysharded.actors.session.held_out import outputs_of, refuse_numbers, weights_of
from raysharded.errors import ConfigError

if TYPE_CHECKING:
    from transformers import Trainer as Base

    from raysharded.actors.session.user_session import Session
    from raysharded.adapters.hf_loop import Loop
else:
    Base = object


def autocast(args: Any) -> Any:
    """The context in which the arguments want a forward to be computed."""
    return torch.autocast(args.device.type, torch.bfloat16, enabled=args.bf16)


class Outputs(Base):
    """The trainer's own evaluation loop over outputs that the workers have computed together, and its files."""

    session: Session
    _loop: Loop | None = None
    """Registered state; None before `train`."""
    _outputs: Iterator[Any] | None = None
    """Outputs for held-out batches that are computed already."""

    def _collator(self) -> Callable[[list[Any]], Any]:
        """The trainer's collator, for samples of the run: those of `train_dataset`, or their numbers in it."""
        inner = self._get_collator_with_removed_columns(self.data_collator, description="Training")
        data: Any = self.train_dataset
        return lambda samples: inner([data[one] if isinstance(one, int) else one for one in samples])

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        rest = (description, loss_only, ignore_keys, metric_key_prefix)
        if getattr(self.args, "predict_with_generate", False) and not loss_only:
            with self._whole_model():  # tokens decide how often the model is called
                return super().evaluation_loop(dataloader, *rest)
        self._require_held_out(dataloader)
        data, size, preprocess = dataloader.dataset, self.args.eval_batch_size, self.preprocess_logits_for_metrics
        name = getattr(self.model, "main_input_name", "input_ids")

        def compute(batch: Any) -> Any:
            with autocast(self.args):
                loss, logits, labels = self.prediction_step(self.model, batch, loss_only, ignore_keys)
            if logits is not None and preprocess is not None:
                logits = preprocess(logits, labels)
            return loss, logits, labels, batch[name] if "inputs" in self.args.include_for_metrics else None

        outer, self._outputs = self._outputs, None  # that of an evaluation loop that calls for another evaluation
        try:
            outputs = outputs_of(self.session, data, size, compute)
        finally:
            self._outputs = outer

        def collate(ids: list[int]) -> dict[str, torch.Tensor]:
            inputs = outputs[ids[0] // size][3]
            return {name: torch.tensor(ids) if inputs is None else inputs}

        stand_in = self.accelerator.prepare(DataLoader(range(len(data)), size, collate_fn=collate))  # type: ignore[arg-type]
        own = iter([each[:3] for each in outputs])
        self._outputs, self.preprocess_logits_for_metrics = own, None
        try:
            found = super().evaluation_loop(stand_in, *rest)
        finally:
            self._outputs, self.preprocess_logits_for_metrics = outer, preprocess
        if next(own, None) is not None:
            raise ConfigError(
                f"{type(self).__name__}.evaluation_loop: it has not taken the outputs of all batches, and a session "
                "computes held-out batches itself. Call super().evaluation_loop(), or self.prediction_step() for each "
                "batch; change what is computed of a batch in prediction_step or compute_loss."
            )
        self._note(found.metrics)
        return found

    def _require_held_out(self, dataloader: Any) -> None:
        """Raise ConfigError for a loader of held-out data whose batches would be others in a session."""
        name, data, collate = type(self).__name__, dataloader.dataset, dataloader.collate_fn
        refuse_numbers(f"{name}: held-out data", data)
        inner = collate.data_collator if isinstance(collate, RemoveColumnsCollator) else collate
        if inner is not self.data_collator and inner != self.data_collator:
            raise ConfigError(
                f"{name}.get_eval_dataloader: its collate_fn is another than data_collator=, and a session collates "
                "held-out samples as those of training. Give data_collator= one for both."
            )
        sampler = getattr(dataloader.batch_sampler, "sampler", None)
        if sampler is not None and (len(sampler) != len(data) or getattr(sampler, "replacement", False)):
            raise ConfigError(
                f"{name}.get_eval_dataloader: its {type(sampler).__name__} leaves samples out, or repeats them, and a "
                "session evaluates each sample once. Give a dataset of the samples that are to count."
            )

    @contextmanager
    def _whole_model(self) -> Iterator[None]:
        """A context in which every worker has a model with all weights, and computes every batch."""
        model: Any = self.model
        if not isinstance(model, PreTrainedModel):
            raise ConfigError(
                f"Seq2SeqTrainingArguments(predict_with_generate=True) needs a PreTrainedModel, not a "
                f"{type(model).__name__}. Leave it out, and generate with the exported model."
            )
        weights = weights_of(self.session.step, everywhere=True)
        assert weights is not None
        whole: Any = type(model)(model.config)
        whole.load_state_dict(self._with_tied(weights))
        whole.generation_config = model.generation_config
        self.model = whole.to(self.args.device)
        try:
            yield
        finally:
            self.model = model

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().prediction_step(model, inputs, *args, **kwargs) if self._outputs is None else next(self._outputs)

    def _note(self, metrics: dict[str, float] | None) -> None:
        """Let the journal have the numbers of an evaluation."""
        step = self.session.step
        if step is not None and not self.session.is_interrupted:
            new = {name: value for name, value in (metrics or {}).items() if name not in step.metrics}
            self.session.log(**{name: value for name, value in new.items() if isinstance(value, (int, float))})

    # -- files --

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model into a folder, by rank 0; all workers call it."""
        if _internal_call:  # a checkpoint of the loop: the run has the weights
            os.makedirs(str(output_dir), exist_ok=True)
            return
        weights = weights_of(self.session.step)
        if weights is not None:
            self._save(output_dir, state_dict=self._with_tied(weights))

    def _with_tied(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights with those that have several names under each of them."""
        model: Any = self.model
        first = {id(param): name for name, param in model.named_parameters()}
        named = model.named_parameters(remove_duplicate=False)
        return weights | {name: weights[first[id(param)]] for name, param in named}

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        assert self._loop is not None
        if not self._loop.saves(self.state.global_step):  # a callback's wish comes too late for this step
            self.session.save()
        if self.is_world_process_zero():
            super()._save_checkpoint(model, trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """The run's checkpoints have them."""

    def _save_rng_state(self, output_dir: str) -> None:
        """All draws follow from the run's seed and the step."""
