"""Arguments of a Hugging Face `Trainer` that a session cannot keep, each with the way out. Loads no framework."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from raysharded.config import BatchConfig
from raysharded.errors import ConfigError

_ORDER = "The order of samples belongs to the run, so that it is the same at every number of workers"
_SHARDED = "The session shards the model over the workers"
_OF_TIME = ("runtime", "_per_second", "compilation_time")
_OF_PROCESSES = ("aux_loss", "entropy", "mean_token_accuracy", "num_tokens")
"""Numbers of an evaluation that TRL's trainers compute of what one process has computed."""
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


def _steps_of(args: Any, num_samples: int, global_batch_size: int) -> tuple[int, str]:
    """The number of steps that the arguments make, and the argument that decides."""
    if args.max_steps > 0:
        return args.max_steps, f"max_steps={args.max_steps}"
    steps = math.ceil(args.num_train_epochs * num_samples / global_batch_size)
    return steps, f"num_train_epochs={args.num_train_epochs:g}"


def require_steps(args: Any, num_samples: int, batch: BatchConfig, max_steps: int) -> None:
    """Raise ConfigError if the arguments make another number of steps than the run has."""
    wanted, asked = _steps_of(args, num_samples, batch.global_batch_size)
    if wanted != max_steps:
        raise ConfigError(
            f"TrainingArguments({asked}) is {wanted} steps of {batch.global_batch_size} of {num_samples} samples, and "
            f"RunConfig(max_steps={max_steps}) has others: give RunConfig(max_steps={wanted})."
        )


def require_data(trainer: Any, given: int | None, batch: BatchConfig) -> None:
    """Raise ConfigError for a model, training data or a metric that the session cannot keep.

    `given`: number of samples of the run's data; None if it has none.
    """
    data = trainer.train_dataset
    if trainer.model_init is not None:
        raise ConfigError("Trainer(model_init=...): build the model with session.build, and give it as model=.")
    if data is None or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise ConfigError(
            f"Trainer(train_dataset={type(data).__name__}): give the map-style dataset that ElasticTrainer(data=...) "
            "has: its length makes the epochs."
        )
    _require_length(type(trainer).__name__, len(data), given, trainer.args, batch)
    _require_metric(trainer)


def _require_length(name: str, num_samples: int, given: int | None, args: Any, batch: BatchConfig) -> None:
    if given == num_samples:
        return
    has = "data= is left out" if given is None else f"data= has {given} samples"
    steps, asked = _steps_of(args, num_samples, batch.global_batch_size)
    raise ConfigError(
        f"{has}, and {name}'s train_dataset {num_samples}, as it is prepared: give data=range({num_samples}). "
        f"{asked} is RunConfig(max_steps={steps}) then."
    )


def _require_metric(trainer: Any) -> None:
    metric, own = trainer.args.metric_for_best_model, getattr(trainer, "_metrics", None)
    name = (metric or "").removeprefix("eval_")
    of_processes = isinstance(own, dict) and (name in _OF_PROCESSES or trainer.compute_metrics is None)
    is_loss = name == "loss" or (name.endswith("_loss") and name not in _OF_PROCESSES)
    if metric and (name.endswith(_OF_TIME) or (of_processes and not is_loss)):
        raise ConfigError(
            f"TrainingArguments(metric_for_best_model={metric!r}): each worker has another number, of its part alone. "
            'Use "eval_loss", or a number of compute_metrics.'
        )


def require_to_build(name: str, model: Any, peft_config: Any, built: Any) -> None:
    """Raise ConfigError for arguments of which a trainer would make a model itself.

    `name`: of the trainer's class. `built`: the model of `session.build`; None before.
    """
    if isinstance(model, str):
        raise ConfigError(
            f"{name}(model={model!r}): the session builds the model. Give model=session.build(lambda: "
            f"AutoModelForCausalLM.from_pretrained({model!r}, ...)), in place of ... what args.model_init_kwargs has."
        )
    if peft_config is not None:
        raise ConfigError(
            f"{name}(peft_config={type(peft_config).__name__}(...)) would make another model. Leave it out, and build "
            "the adapter, too, in the session: session.build(lambda: get_peft_model(make(), peft_config))."
        )
    if model is not None:
        require_built(name, model, built)


def require_built(name: str, model: Any, built: Any) -> None:
    """Raise ConfigError unless this model is that of `session.build`."""
    if built is None:
        raise ConfigError(
            f"{name}(model={type(model).__name__}): the session has built no model. Build it there with all its parts: "
            f"model=session.build(lambda: {type(model).__name__}...)."
        )
    if model is not built and any(one is built for one in model.modules()):
        raise ConfigError(
            f"{name}(model={type(model).__name__}): the {type(built).__name__} of session.build was wrapped behind it. "
            "Wrap it in the function that session.build calls: session.build(lambda: get_peft_model(make(), config))."
        )
    if model is not built:
        raise ConfigError(
            f"{name}(model={type(model).__name__}) is another model than session.build has returned: give that one."
        )
