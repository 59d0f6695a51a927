"""Scripts with the plain `Trainer`, in one process without raysharded: the samples of a run, in its order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from raysharded.data.loader import MicrobatchLoader
from tests.adapters.programs import MICROBATCHES, SIZE, STEPS, arguments, padded
from tests.training.harness import make_job


def plain_trainer(
    folder: str, make: Callable[[], nn.Module], data: list[dict[str, Any]], given: dict[str, Any], **changed: Any
) -> Any:
    """A `Trainer` that has trained on the samples of the run's steps, in their order, each step as one batch.

    With accumulation it would add up means of losses that ignore `num_items_in_batch`.
    """
    from transformers import Trainer

    loader = MicrobatchLoader(data, make_job("", microbatches=MICROBATCHES).batch)
    keys = [(step, index) for step in range(1, STEPS + 1) for index in range(MICROBATCHES)]
    ordered = [sample for key in keys for sample in loader.load(*key).samples]
    batches = {"per_device_train_batch_size": SIZE * MICROBATCHES, "gradient_accumulation_steps": 1}
    wanted = {"train_sampling_strategy": "sequential"} | batches | changed
    trainer = Trainer(
        model=make(),
        args=arguments(folder, **wanted),
        train_dataset=ordered,
        data_collator=padded,
        **given,
    )
    trainer.train()
    return trainer


def losses_of(trainer: Any) -> list[float]:
    """The losses that it has logged, one for each step."""
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]
