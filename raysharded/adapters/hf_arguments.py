"""Arguments of a Hugging Face `Trainer` that a session cannot keep, each with the way out. Loads no framework."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from raysharded.config import BatchConfig
from raysharded.errors import ConfigError

_ORDER = "The order of samples belongs to the run, so that it is the same at every number of workers"
_SHARDED = "The session shards the model over the workers"
_GENERATIONS = "RunConfig and CheckpointConfig"

_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "auto_find_batch_size",
        bool,
        (
            "A step has the same microbatches at every number of workers. Set per_device_train_batch_size and "
            "BatchConfig(microbatch_size=...) to what fits."
        ),
    ),
    ("deepspeed", bool, f"{_SHARDED}: leave it out. Its settings are those of raysharded.EngineConfig."),
    ("fsdp", bool, f"{_SHARDED}: leave it out. Its settings are those of raysharded.EngineConfig."),
    ("parallelism_config", bool, f"{_SHARDED}: leave it out."),
    (
        "fp16",
        bool,
        (
            "Its gradient scaler cannot see the gradients, which belong to the step. Use bf16=True, or "
            'EngineConfig(param_dtype="bfloat16").'
        ),
    ),
    ("fp16_full_eval", bool, "It would convert the weights that are trained. Leave it out, or use bf16=True."),
    ("bf16_full_eval", bool, "It would convert the weights that are trained. Leave it out, or use bf16=True."),
    ("torch_compile", bool, "Blocks are compiled by EngineConfig(compile=True), the same way on every worker."),
    (
        "train_sampling_strategy",
        lambda value: value != "random",
        f"{_ORDER}. Leave it out; for samples in another order give ElasticTrainer(data=...) such data.",
    ),
    (
        "average_tokens_across_devices",
        lambda value: not value,
        "A token's weight would depend on the number of workers. Leave it at True.",
    ),
    (
        "load_best_model_at_end",
        bool,
        (
            'The run keeps its best checkpoint by CheckpointConfig(keep_best=...), as ("eval_loss", "min", 1). Leave '
            "it out, and export that checkpoint."
        ),
    ),
    ("push_to_hub", bool, "Every worker would push. Leave it out, and push the folder of trainer.save_model()."),
    ("eval_on_start", bool, "An evaluation belongs to a step. Leave it out; the first one is behind the first step."),
    (
        "include_num_input_tokens_seen",
        lambda value: value not in ("no", False),
        "Each worker sees a part of the tokens. Leave it out.",
    ),
    ("enable_jit_checkpoint", bool, "The run writes a checkpoint when workers are to leave. Leave it out."),
    (
        "optim",
        lambda value: "lomo" in str(value) or "layerwise" in str(value),
        "It updates weights during the backward, when a worker has a part of the gradient. Use another optimizer.",
    ),
)


def require_supported(args: Any, batch: BatchConfig) -> None:
    """Raise ConfigError for a `TrainingArguments` that the session cannot keep. `batch`: the run's."""
    for name, is_refused, way in _REFUSED:
        value = getattr(args, name, None)
        if value is not None and is_refused(value):
            raise ConfigError(f"TrainingArguments({name}={_shown(value)}): {way}")
    accelerator = args.accelerator_config
    if accelerator.split_batches or accelerator.dispatch_batches:
        raise ConfigError(f"TrainingArguments(accelerator_config=...): {_ORDER}. Leave it out.")
    if args.world_size != 1:
        raise ConfigError(
            f"the environment makes this process one of {args.world_size} of torch.distributed. Start the script with "
            "python, not with torchrun or accelerate launch: raysharded starts the workers."
        )
    _require_batch(args, batch)


def _shown(value: Any) -> str:
    return repr(getattr(value, "value", value))


def _require_batch(args: Any, batch: BatchConfig) -> None:
    size, accumulated = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if size != batch.microbatch_size:
        raise ConfigError(
            f"TrainingArguments(per_device_train_batch_size={size}) and BatchConfig(microbatch_size="
            f"{batch.microbatch_size}) are one thing: set both to one number."
        )
    if batch.num_microbatches % accumulated:
        raise ConfigError(
            f"TrainingArguments(gradient_accumulation_steps={accumulated}): a step of the run has "
            f"{batch.num_microbatches} microbatches, which is no multiple. Set BatchConfig(global_batch_size=...) to "
            "per_device_train_batch_size x gradient_accumulation_steps x the number of processes that the script was "
            "written for."
        )


def require_steps(args: Any, num_samples: int, batch: BatchConfig, max_steps: int) -> None:
    """Raise ConfigError if the arguments make another number of steps than the run has."""
    if args.max_steps > 0:
        wanted, asked = args.max_steps, f"max_steps={args.max_steps}"
    else:
        wanted = math.ceil(args.num_train_epochs * num_samples / batch.global_batch_size)
        asked = f"num_train_epochs={args.num_train_epochs:g}"
    if wanted != max_steps:
        raise ConfigError(
            f"TrainingArguments({asked}) is {wanted} steps of {batch.global_batch_size} of {num_samples} samples, and "
            f"RunConfig(max_steps={max_steps}) has others: give RunConfig(max_steps={wanted})."
        )


def require_data(trainer: Any) -> None:
    """Raise ConfigError for a model or training data that the session cannot keep."""
    data = trainer.train_dataset
    if trainer.model_init is not None:
        raise ConfigError("Trainer(model_init=...): build the model with session.build, and give it as model=.")
    if data is None or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise ConfigError(
            f"Trainer(train_dataset={type(data).__name__}): give the map-style dataset that ElasticTrainer(data=...) "
            "has: its length makes the epochs."
        )
