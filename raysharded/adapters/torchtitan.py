"""torchtitan's `Trainer` in a session: its own loop, schedules and loaders, elastic, with the bits of one worker.

`elastic(Trainer, session)` overrides the methods in which the trainer meets processes, weights and gradients. Tested
with torchtitan 0.3.0.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.tools.utils import set_default_dtype

from raysharded.adapters.chunked_head import in_chunks
from raysharded.adapters.replaced_methods import TORCHTITAN, require_own_methods
from raysharded.errors import CollectiveAborted, ConfigError
from raysharded.task import Loss

if TYPE_CHECKING:
    from torch import nn
    from torchtitan.trainer import Trainer as Base

    from raysharded.actors.session.user_session import Session
    from raysharded.actors.session.user_step import UserStep
else:
    Base = object

_SHARDED = "the session shards the model over the workers: leave it out"


def elastic(trainer: type[Any], session: Session) -> type[Any]:
    """torchtitan's `Trainer`, or a subclass, that trains in this session; use it as that class, with its config.

    The trainer of the run has no `data`: each microbatch of a step has a loader of torchtitan's, made as for a rank.
    Raises ConfigError for a subclass with a method of which the session's takes the place.
    """
    require_own_methods(trainer, TORCHTITAN)
    return type(trainer.__name__, (Elastic, trainer), {"session": session})


class LoaderOf:
    """A function from a rank and a number of ranks to torchtitan's loader for it, by a `Trainer.Config`."""

    def __init__(self, config: Any) -> None:
        self._loader, self._tokenizer = config.dataloader, config.tokenizer
        self._assets, self._training = config.hf_assets_path, config.training

    def __call__(self, index: int, num: int) -> Any:
        return self._loader.build(
            dp_world_size=num,
            dp_rank=index,
            tokenizer=self._tokenizer.build(tokenizer_path=self._assets),
            seq_len=self._training.seq_len,
            local_batch_size=self._training.local_batch_size,
            snapshot_every_n_steps=1,
        )


def require_supported(config: Any, session: Session) -> None:
    """Raise ConfigError for a `Trainer.Config` that the session cannot keep, by the setting's name."""
    for kind in ("tensor", "pipeline", "context", "expert", "data_parallel_replicate", "data_parallel_shard"):
        name = f"{kind}_degree" if kind.startswith("data") else f"{kind}_parallel_degree"
        _refuse(config, f"parallelism.{name}", (1, -1), _SHARDED)
    batch, dtype = session.batch, session._job.engine.param_dtype or "float32"
    size = batch.global_batch_size
    _refuse(config, "parallelism.spmd_backend", ("partial_dtensor",), "set 'partial_dtensor'")
    _refuse(config, "checkpoint.enable", (False,), "RunConfig(checkpoint=...) writes checkpoints")
    _refuse(config, "compile.enable", (False,), "EngineConfig(compile=True) compiles blocks")
    _refuse(config, "training.enable_cpu_offload", (False,), _SHARDED)
    _refuse(config, "training.disable_cuda_graphs", (True,), "workers change: set True")
    _refuse(config, "training.mixed_precision_param", (dtype,), f"EngineConfig(param_dtype=...) computes in {dtype}")
    _refuse(config, "training.local_batch_size", (batch.microbatch_size,), "one number for both")
    _refuse(config, "training.global_batch_size", (size,), "BatchConfig(global_batch_size=...) is the same number")
    _refuse(config, "training.steps", (session.max_steps,), f"RunConfig(max_steps={session.max_steps})")
    _refuse(config, "optimizer.implementation", ("foreach", "for-loop"), "'fused' rounds otherwise for other shards")
    _refuse(config, "model_spec.post_optimizer_build_fn", (None,), "its hooks hold a device mesh of one generation")


def _refuse(config: Any, name: str, kept: tuple[Any, ...], way: str) -> None:
    value = attrgetter(name)(config)
    if value not in kept:
        raise ConfigError(f"Trainer.Config: {name}={value!r} cannot be kept in a session: {way}.")


class Elastic(Base):  # type: ignore[misc]  # torchtitan is not installed where types are checked
    """The methods of a `Trainer` that are overridden. `train` may be called once."""

    session: Session

    def __init__(self, config: Any) -> None:
        require_supported(config, self.session)
        self._num_chunks = getattr(config.loss, "num_chunks", 1)
        if isinstance(config.loss, ChunkedLossWrapper.Config):  # its own backwards would be several of one unit
            config = dataclasses.replace(config, loss=config.loss.loss_fn)
        spec = dataclasses.replace(config.model_spec, parallelize_fn=self._built, pipelining_fn=None)
        config = dataclasses.replace(config, model_spec=spec)
        os.environ.setdefault("LOCAL_RANK", str(self.session.device.index or 0))
        is_alone = not dist.is_initialized()
        if is_alone:  # until the session forms a generation, in which there is another group
            dist.init_process_group("gloo", store=vars(dist)["HashStore"](), rank=0, world_size=1)
        try:
            super().__init__(config)
        finally:
            if is_alone:
                dist.destroy_process_group()
        (model,) = self.model_parts
        del model.to_empty, model.init_weights  # of this object: those of its class are there again
        self.step = -1  # behind the step after it, torchtitan would set time-outs of groups, which are a generation's
        self.optimizers.param_groups = [g for inner in self.optimizers.optimizers for g in inner.param_groups]
        self.session.streams(LoaderOf(config))
        blocks = [*model.get_submodule("layers").children()]
        self.session.shard(model, self.optimizers, wrap=lambda _: blocks, scheduler=self.lr_schedulers)
        if config.validator.enable:
            self.validator: Any = _Validation(self.validator, self.session)

    def init_distributed(self) -> Any:
        return ParallelDims.from_config(self.config.parallelism, 1)

    def _built(self, model: nn.Module, **_: Any) -> nn.Module:
        """The session's model, in place of torchtitan's parallel one; weights are drawn as torchtitan draws them."""
        built: nn.Module = self.session.build(_Model(self.config))
        for name in ("to_empty", "init_weights"):
            object.__setattr__(built, name, lambda **_: None)  # its parameters have no memory before `shard`
        return built

    def batch_generator(self, data_iterable: Any) -> Any:
        return iter(())  # the session reads

    def train_step(self, data_iterator: Any) -> None:
        rates, training = self.lr_schedulers.get_metrics(), self.config.training
        step = self.session.gradient(self._loss_of)
        self.step = step.number
        self.ntokens_seen = step.number * training.global_batch_size * training.seq_len
        norm = step.clip_grad_norm_(training.max_norm)
        self.optimizers.step()
        self.lr_schedulers.step()
        self._log(step, norm, rates)

    def _loss_of(self, batch: Any) -> Loss:
        inputs, labels, further = self.post_dataloading_process(*batch)
        (model,), one = self.model_parts, torch.ones((), device=labels.device)
        given = {key: further[key] for key in ("positions",) if key in further}

        def loss_of(head: Callable[..., Any], hidden: Any, labels: Any, *given_: Any) -> Any:
            return self.loss_fn(head(hidden), labels, one, **dict(zip(given, given_, strict=True)))[0]

        with self.train_context(), in_chunks(model.lm_head, self._num_chunks, loss_of, labels, *given.values()):
            total = model(inputs, **further)
        return Loss(total, (labels != IGNORE_INDEX).sum())

    def _log(self, step: UserStep, norm: float, rates: dict[str, Any]) -> None:
        """Log on rank 0. No rank has a loss: the mean takes the place of the largest."""
        processor = self.metrics_processor
        if self.session.rank == 0 and processor.should_log(self.step):
            processor.ntokens_since_last_log += self.config.training.global_batch_size * self.config.training.seq_len
            processor.data_loading_times.append(0.0)
            seen = {"n_tokens_seen": self.ntokens_seen, **rates}
            processor.log(self.step, step.loss, step.loss, norm, extra_metrics=seen)


class _Validation:
    """torchtitan's validator, behind a step: each worker computes all of its batches, and rank 0 logs their loss."""

    def __init__(self, validator: Any, session: Session) -> None:
        self._validator, self._session, self.should_validate = validator, session, validator.should_validate
        log = validator.metrics_processor.log_validation
        validator.metrics_processor.log_validation = lambda *a, **kw: None if session.rank else log(*a, **kw)

    def validate(self, model_parts: Any, step: int) -> None:
        """As `Validator.validate`."""
        try:
            self._validator.validate(model_parts, step)
        except CollectiveAborted:  # a worker was lost: the step is done again, and this with it
            if not self._session.is_interrupted:
                raise


class _Model:
    """A function that builds torchtitan's model with its first weights."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __call__(self) -> nn.Module:
        config = self._config
        if config.debug.seed is not None:
            torch.manual_seed(config.debug.seed)  # the weights that torchtitan begins with
        with set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
            model: Any = config.model_spec.model.build()
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        if config.activation_checkpoint is not None:
            config.activation_checkpoint.build(dump_folder=config.dump_folder).apply(model)
        built: nn.Module = model
        return built
