"""An `Accelerator`'s methods for all workers, in a session: results, files, rank 0, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils import _pytree

from raysharded.actors.session.held_out import built_by, copy_of, gathered, remark, wait_for_all, weights_of
from raysharded.actors.task_calls.task_errors import line_here
from raysharded.adapters.accelerate_parts import StepScheduler, TrainBatches
from raysharded.errors import ConfigError

if TYPE_CHECKING:
    from accelerate import Accelerator as Base

    from raysharded.actors.session.user_session import Session
else:
    Base = object


class Calls(Base):  # type: ignore[misc]  # accelerate has no annotations
    """The methods that workers call together, or that one of them does, or none."""

    session: Session
    sizes: Sequence[int | None] | None = None
    """Samples of the present batch of held-out data on each rank."""
    _train: TrainBatches | None = None
    """None until `prepare`, as ranks are known then."""
    _done = 0
    """The newest step that the loop has made."""

    # -- rank 0 --

    @property
    def is_main_process(self) -> bool:
        return self._train is not None and self.session.rank == 0

    is_local_main_process = is_main_process

    @property
    def is_last_process(self) -> NoReturn:
        raise refused("is_last_process", _RANKS)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """The function, to be called by rank 0 alone; other workers return None."""
        assert function is not None, "an instance decorates a function"

        @wraps(function)
        def on_rank_0(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if self.is_main_process else None

        return on_rank_0

    on_local_main_process = on_main_process

    def on_last_process(self, function: Callable[..., Any]) -> NoReturn:
        raise refused("on_last_process", _RANKS)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> NoReturn:
        raise refused("on_process", _RANKS)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> NoReturn:
        raise refused("on_local_process", _RANKS)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Rank 0 prints, each worker before the ranks are known."""
        if self._train is None or self.is_main_process:
            super().print(*args, **kwargs)

    # -- results --

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        leaves, form = _tensors(input_data, "gather_for_metrics", is_refused=use_gather_object)
        by_rank = self._gathered([leaf.reshape(leaf.shape or (1,)) for leaf in leaves])
        sizes = self.sizes or [None] * len(by_rank)
        whole = [
            torch.cat([mine[place][:size] for mine, size in zip(by_rank, sizes, strict=True)])
            for place in range(len(leaves))
        ]
        return _pytree.tree_unflatten([one.to(self.device) for one in whole], form)

    gather = gather_for_metrics

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum of whole numbers, or the maximum, over the workers, behind a step.

        In an evaluation it is over those whose batch counts.
        """
        if reduction not in ("sum", "max"):
            raise refused(
                f"reduce(reduction={reduction!r})",
                "it depends on the number of workers. Reduce a sum and a count, or take the mean of what "
                "accelerator.gather_for_metrics returns.",
            )
        leaves, form = _tensors(tensor, "reduce")
        if reduction == "sum" and any(leaf.is_floating_point() or leaf.is_complex() for leaf in leaves):
            raise refused(
                "reduce(...)",
                "a sum of fractions is rounded otherwise at another number of workers. Reduce whole numbers "
                "(tensor.long()), or add up what accelerator.gather_for_metrics returns.",
            )
        by_rank = self._gathered(leaves)
        sizes = self.sizes or [None] * len(by_rank)
        counted = [mine for mine, size in zip(by_rank, sizes, strict=True) if size != 0]
        found = []
        for each in zip(*counted, strict=True):
            stacked = torch.stack(each)
            found.append(stacked.amax(0) if reduction == "max" else stacked.sum(0, dtype=stacked.dtype))
        return _pytree.tree_unflatten([one.to(self.device) for one in found], form)

    def _gathered(self, own: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The tensors of all workers, by rank; remarks on those that are of no held-out data."""
        by_rank = gathered(self.session.step, own)
        if self.sizes is None:
            remark(
                self.session,
                "gathered values",
                "the script gathers, or reduces, values that are not of held-out data: each worker has one, such as "
                "the loss of its newest microbatch, so that the result depends on the number of workers. Log it, and "
                "let no rate, weight or decision depend on it. The loss of the whole step is session.step.loss.",
            )
        return by_rank

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """The tensors, padded to the longest of all workers along a dimension; behind a step."""
        leaves, form = _tensors(tensor, "pad_across_processes")
        lengths = [leaf.shape[dim] if -leaf.dim() <= dim < leaf.dim() else 0 for leaf in leaves]
        by_rank = gathered(self.session.step, [torch.tensor([length]) for length in lengths])
        found = []
        for leaf, length, each in zip(leaves, lengths, zip(*by_rank, strict=True), strict=True):
            longest = int(torch.cat(each).max())
            if length == longest:
                found.append(leaf)
                continue
            shape = list(leaf.shape)
            shape[dim] = longest
            padded = leaf.new_full(shape, pad_index)
            padded.narrow(dim, longest - length if pad_first else 0, length).copy_(leaf)
            found.append(padded)
        return _pytree.tree_unflatten(found, form)

    def wait_for_everyone(self) -> None:
        """Wait for all workers behind the optimizer's step; elsewhere nothing, as workers call it differently often."""
        wait_for_all(self.session)

    def set_trigger(self) -> NoReturn:
        raise refused("set_trigger()", _TRIGGERS)

    def check_trigger(self) -> NoReturn:
        raise refused("check_trigger()", _TRIGGERS)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> NoReturn:
        raise refused(
            "split_between_processes",
            "the number of workers changes. Give the data to a DataLoader in accelerator.prepare: its batches are "
            "shared among the workers, and accelerator.gather_for_metrics brings results together.",
        )

    # -- files --

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Rank 0 writes, each worker before the ranks are known."""
        if self._train is None or self.is_main_process:
            super().save(obj, f, safe_serialization=safe_serialization)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """The whole state of the session's model, on every worker: all call it together, behind a step."""
        return self._whole().state_dict() if self._is_shared(model) else model.state_dict()

    def save_model(self, model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Write the whole model by rank 0: all workers call it together, behind a step."""
        whole = self._whole() if self._is_shared(model) else model
        if self._train is None or self.is_main_process:
            super().save_model(whole, save_directory, *args, **kwargs)

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """A whole copy of the model behind the last step, on every worker; the model itself before."""
        return self._whole() if self._is_shared(model) and self._done >= self.session.max_steps else model

    def _is_shared(self, model: Any) -> bool:
        """True if the workers have parts of the model."""
        return self._train is not None and model is built_by(self.session)

    def _whole(self) -> torch.nn.Module:
        weights = weights_of(self.session.step, everywhere=True)
        assert weights is not None
        return copy_of(self.session, weights)

    def save_state(self, output_dir: str | None = None, **kwargs: Any) -> str | None:
        """Request a checkpoint of the run, which has the whole state."""
        self.session.save()
        return output_dir

    def load_state(self, input_dir: str | None = None, **kwargs: Any) -> None:
        """Nothing: the run resumes from its own checkpoints."""

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> NoReturn:
        raise refused("register_save_state_pre_hook", _HOOKS)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> NoReturn:
        raise refused("register_load_state_pre_hook", _HOOKS)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """As ever, ahead of `prepare`; behind it nothing is left to do for its schedulers."""
        if self._train is None:
            super().register_for_checkpointing(*objects)
        elif not all(isinstance(one, StepScheduler) for one in objects):
            raise refused(
                "register_for_checkpointing(...)",
                "move this line ahead of accelerator.prepare, which registers the objects. What prepare was given is "
                "registered by itself.",
            )

    # -- the loop --

    def init_trackers(self, *args: Any, **kwargs: Any) -> None:
        if self.log_with:
            raise refused(
                "init_trackers",
                "each worker would begin a run of the tracker, and log a step again that is done again. Leave out "
                "log_with=...: the journal has each step's loss and metrics once, and trainer.fit(listen=f) gives them "
                "to f.",
            )

    def end_training(self) -> None:
        """Nothing: a worker closes its groups itself."""

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> NoReturn:
        raise refused("clip_grad_value_", "change gradients in a hook of the optimizer's step.")

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> NoReturn:
        raise refused("skip_first_batches", "leave it out: the run resumes by itself, with the step that is due.")

    def prepare_model(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise refused("prepare_model", _PARTS)

    def prepare_optimizer(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise refused("prepare_optimizer", _PARTS)

    def prepare_scheduler(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise refused("prepare_scheduler", _PARTS)

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise refused("prepare_data_loader", _PARTS)


def refused(call: str, way: str) -> ConfigError:
    """The error for a call that a session cannot keep, with the script's line and the way out."""
    return ConfigError(f"{line_here()}: accelerator.{call}: {way}")


_RANKS = "ranks change with the workers. Use accelerator.is_main_process, or on_main_process."
_TRIGGERS = (
    "a worker cannot end the loop, which ends at RunConfig(max_steps=...). accelerator.reduce(flag), behind a step, "
    "adds flags up over the workers."
)
_HOOKS = (
    "it would never be called: a checkpoint of the run has the whole state. Give what else belongs to it to "
    "accelerator.register_for_checkpointing, ahead of prepare."
)
_PARTS = "call accelerator.prepare once, with one model, one optimizer, the data loaders and the schedulers together."


def _tensors(data: Any, call: str, *, is_refused: bool = False) -> tuple[list[torch.Tensor], Any]:
    """The tensors in lists, tuples and dicts, and their form. Raises ConfigError for anything else."""
    leaves, form = _pytree.tree_flatten(data)
    if is_refused or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise ConfigError(f"accelerator.{call}: a session gathers tensors alone.")
    return leaves, form
