"""Which modules are in train mode while a run trains: all, but for frozen parts that `build_model` left in eval.

A part is a module in eval with all that is inside it, where the modules around it are in train mode. It keeps its modes
if none of its parameters is trainable: a frozen backbone. Any other is trained in train mode, as after `model.train()`:
`from_pretrained` returns all models in eval, and nobody means that. A part without parameters has those of the module
around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from raysharded.actors.task_calls.remarks import Say

KEEPS_PARTS = {1: False, 2: True}
"""By the number of the rule `modes`: whether frozen parts that were left in eval keep that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A module that `build_model` left in eval, and no module around it."""

    name: str
    """Empty: the model."""
    module: nn.Module
    trained: tuple[nn.Module, ...]
    """Those inside it that were left in train mode."""
    has_trainable: bool
    """Whether a parameter of its is trainable; of one without parameters: of the module around it."""

    def restore(self) -> None:
        """Give it the modes that it was left in."""
        self.module.eval()
        for module in self.trained:
            module.training = True


class Modes:
    """The modes of one model's modules. Training thread only."""

    def __init__(self, model: nn.Module, number: int = max(KEEPS_PARTS)) -> None:
        """`model`: as `build_model` left it, wrapped or not; `number`: of the rule."""
        parts = tuple(parts_of(model)) if KEEPS_PARTS[number] else ()
        self._model = model
        self._settled: tuple[tuple[dict[str, Any], bool], ...] = ()
        """The attributes of each module and its mode in training; empty as long as it is not known, or if a module has
        a `train` of its own."""
        self._kept = tuple(part for part in parts if not part.has_trainable)
        self._trained = tuple(part for part in parts if part.has_trainable)

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of the parts that keep their modes."""
        return tuple(part.name for part in self._kept)

    def train(self) -> None:
        """Set the modes for training. Call before each forward: a loss may have set others."""
        if self._settled and all(attributes["training"] is mode for attributes, mode in self._settled):
            return  # `nn.Module.train` takes a hundred times as long
        self._model.train()
        for part in self._kept:
            part.restore()
        modules = list(self._model.modules())
        if not self._settled and all(map(_is_plain, modules)):
            self._settled = tuple((vars(module), module.training) for module in modules)

    def evaluate(self) -> None:
        """Put all modules in eval."""
        self._model.eval()

    def remark(self, task: str, say: Say) -> None:
        """Say which parts were left in eval and are trained in train mode all the same: an overridden `train` may keep
        them in eval."""
        if not self._trained:
            return
        self.train()
        if trained := [part.name for part in self._trained if part.module.training]:
            say("modes", _remark(task, trained))


def _is_plain(module: nn.Module) -> bool:
    """True if its mode is an attribute that `nn.Module.train` sets."""
    attributes = vars(module)
    return type(module).train is nn.Module.train and "train" not in attributes and "training" in attributes


def kept_in_eval(model: nn.Module) -> set[nn.Module]:
    """The modules of a model that are in eval in all its forwards, as its modules and parameters are now."""
    kept = (part for part in parts_of(model) if not part.has_trainable)
    return {module for part in kept for module in part.module.modules() if module not in part.trained}


def parts_of(model: nn.Module) -> Iterator[Part]:
    """The parts of a model, as its modules are now."""
    if not all(module.training for module in model.modules()):
        yield from _parts(model, "", around=False, seen=set())


def _parts(module: nn.Module, name: str, *, around: bool, seen: set[nn.Module]) -> Iterator[Part]:
    """`around`: whether the module around it has trainable parameters."""
    if module in seen:
        return
    seen.add(module)
    if isinstance(module, CheckpointWrapper):  # of the engine, in train mode whatever it wraps
        inner = module._checkpoint_wrapped_module
        assert isinstance(inner, nn.Module)
        yield from _parts(inner, name, around=around, seen=seen)
        return
    trainable = [param.requires_grad for param in module.parameters()]
    has_trainable = any(trainable) if trainable else around
    if not module.training:
        trained = tuple(one for one in module.modules() if one.training and not isinstance(one, CheckpointWrapper))
        yield Part(name=name, module=module, trained=trained, has_trainable=has_trainable)
        return
    for local, child in module.named_children():
        yield from _parts(child, f"{name}.{local}" if name else local, around=has_trainable, seen=seen)


def _remark(task: str, names: Sequence[str]) -> str:
    first = repr(names[0]) if names[0] else "the model"
    others = f" (and {len(names) - 1} others)" if len(names) > 1 else ""
    return (
        f"{task}.build_model left {first}{others} in eval mode. It has trainable parameters, or is inside of what has "
        "them: it is trained in train mode, with dropout, as after model.train(). A frozen part (requires_grad=False) "
        "of a model in train mode keeps the eval mode that it was left in; for anything else override train()."
    )
