"""Modes of modules while a run trains: all in train mode, except frozen parts that `build_model` left in eval mode.

A part is an outermost module in eval mode, with all its submodules. It keeps its modes if none of its parameters is
trainable: a frozen backbone. Any other part is trained in train mode, as after `model.train()`: `from_pretrained`
returns all models in eval mode, which nobody intends. For a part without parameters, the parameters of the module
around it decide.

A user's own loop sets modes itself, beginning with these: `Modes.take_over`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from raysharded.actors.device.device_waits import numbers_of
from raysharded.actors.model.sharded_model import clean_name, local_of
from raysharded.actors.numerics.bit_digest import tensor_digest
from raysharded.actors.task_calls.remarks import Say
from raysharded.errors import InexactError

KEEPS_PARTS = {1: False, 2: True, 3: True}
"""Number of the rule `modes` -> whether frozen parts that were left in eval mode stay in it."""
HOLDS_AHEAD_OF_EVALUATION = {1: False, 2: False, 3: True}
"""Number of the rule `modes` -> whether modes that a loop sets between its microbatches and an evaluation hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """An outermost module that `build_model` left in eval mode."""

    name: str
    """The module's name; empty for the model."""
    module: nn.Module
    trained: tuple[nn.Module, ...]
    """The modules inside that were left in train mode."""
    has_trainable: bool
    """Whether a parameter of the part is trainable; if it has none, of the module around it."""

    def restore(self) -> None:
        """Set the modes that `build_model` left."""
        self.module.eval()
        for module in self.trained:
            module.training = True


class Modes:
    """The modes of one model's modules. Training thread only."""

    def __init__(self, model: nn.Module, number: int = max(KEEPS_PARTS)) -> None:
        """`model`: as `build_model` left it, wrapped or not; `number`: the rule's number."""
        parts = tuple(parts_of(model)) if KEEPS_PARTS[number] else ()
        self._model, self._holds_ahead = model, HOLDS_AHEAD_OF_EVALUATION[number]
        self._settled: tuple[tuple[dict[str, Any], bool], ...] = ()
        """(attributes, mode in training) of each module; empty while unknown, or if a module has a custom `train`."""
        self._own: tuple[tuple[nn.Module, bool], ...] = ()
        """(module, mode) as a user's loop has set them; empty: the rule decides."""
        self._changes: tuple[str, ...] = ()
        self._kept = tuple(part for part in parts if not part.has_trainable)
        self._trained = tuple(part for part in parts if part.has_trainable)

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of the parts that keep their modes."""
        return tuple(part.name for part in self._kept)

    def train(self) -> None:
        """Set the modes for training. Call before each forward: a loss may have changed them."""
        if self._own:
            for module, mode in self._own:
                if module.training is not mode:
                    module.training = mode
            return
        if self._settled and all(attributes["training"] is mode for attributes, mode in self._settled):
            return  # `nn.Module.train` takes a hundred times as long
        self._model.train()
        for part in self._kept:
            part.restore()
        modules = list(self._model.modules())
        if not self._settled and all(map(_is_plain, modules)):
            self._settled = tuple((vars(module), module.training) for module in modules)

    def take_over(self) -> None:
        """Train in the modes that the modules have now: a user's loop has set them."""
        self._note(tuple((module, module.training) for module in self._model.modules()))

    def _note(self, own: tuple[tuple[nn.Module, bool], ...]) -> None:
        if own != self._own:
            self._own, self._changes = own, tuple(_changes(self._model, "", around=True, modes=dict(own)))

    @property
    def changes(self) -> list[str]:
        """The modules whose mode a user's loop has set unlike that of the module around them; the first is in train
        mode. Empty without such a loop, and if all are in train mode."""
        return list(self._changes)

    @property
    def trains_kept(self) -> bool:
        """True if a user's loop has put all modules in train mode, also parts that the rule keeps in eval mode."""
        return bool(self._own and self._kept) and not self._changes

    def go_to(self, changes: Sequence[str] | None, step: int | None) -> None:
        """Go to the modes of a step of a user's loop: those that `changes` returned then; None: it has none noted.

        `step`: 0 at a run's beginning, with the modes of the rule; None: the present one.
        """
        if changes is None and step == 0:
            self._own, self._changes = (), ()
            self.train()
            return
        is_noted = step is not None and (changes is not None or self._holds_ahead)  # older numbers began without notes
        if is_noted or changes or self._changes:
            self.set(changes or ())

    def set(self, changes: Sequence[str]) -> None:
        """Train in modes that `changes` has returned before, also in another process."""
        self._note(tuple(_with_changes(self._model, "", around=True, changes=frozenset(changes))))
        self.train()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context in which all modules are in eval mode; behind it they have the modes for training again.

        By the rule's number, modes that a user's loop has set since the microbatches began are among these. Raises
        InexactError if eval mode changes a parameter.
        """
        if self._own and self._holds_ahead:
            self.take_over()
        before = self._bits()
        self._model.eval()
        try:
            if before and (changed := [name for name, bits in self._bits().items() if bits != before.get(name)]):
                raise InexactError(_merges(changed))
            yield
        finally:
            self.train()

    def _bits(self) -> dict[str, int]:
        """Digests of this worker's parts of the parameters; empty if all modules have torch's own `train`."""
        if self._settled or all(map(_is_plain, self._model.modules())):
            return {}
        named = {clean_name(name): local_of(param) for name, param in self._model.named_parameters()}
        return dict(zip(named, numbers_of(map(tensor_digest, named.values())), strict=True))

    def remark(self, task: str, say: Say) -> None:
        """Log the parts that were left in eval mode and are trained in train mode.

        A part that an overridden `train` keeps in eval mode is not among them.
        """
        if not self._trained:
            return
        self.train()
        if trained := [part.name for part in self._trained if part.module.training]:
            say("modes", _remark(task, trained))


def _merges(changed: Sequence[str]) -> str:
    return (
        f"eval() of the model changes {len(changed)} parameters, first {changed[0]!r}, as layers do that merge "
        "low-rank weights (loralib's merge_weights=True): each worker has parts of them, and an evaluation in which a "
        "worker is lost would leave them merged. Let train() and eval() change no parameter (merge_weights=False)."
    )


def _is_plain(module: nn.Module) -> bool:
    """True if the module's mode is an attribute that `nn.Module.train` sets."""
    attributes = vars(module)
    return type(module).train is nn.Module.train and "train" not in attributes and "training" in attributes


def kept_in_eval(model: nn.Module) -> set[nn.Module]:
    """The modules that are in eval mode in all forwards, given the model's modules and parameters now."""
    kept = (part for part in parts_of(model) if not part.has_trainable)
    return {module for part in kept for module in part.module.modules() if module not in part.trained}


def parts_of(model: nn.Module) -> Iterator[Part]:
    """The parts of a model, given its modules' modes now."""
    if not all(module.training for module in model.modules()):
        yield from _parts(model, "", around=False, seen=set())


def _parts(module: nn.Module, name: str, *, around: bool, seen: set[nn.Module]) -> Iterator[Part]:
    """`around`: whether the module around it has trainable parameters."""
    if module in seen:
        return
    seen.add(module)
    if isinstance(module, CheckpointWrapper):  # added by the engine, and always in train mode
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


def _changes(module: nn.Module, name: str, *, around: bool, modes: Mapping[nn.Module, bool]) -> Iterator[str]:
    if modes[module] is not around:
        yield name
    for local, child in module.named_children():
        yield from _changes(child, f"{name}.{local}" if name else local, around=modes[module], modes=modes)


def _with_changes(
    module: nn.Module, name: str, *, around: bool, changes: Collection[str]
) -> Iterator[tuple[nn.Module, bool]]:
    mode = around is not (name in changes)
    yield module, mode
    for local, child in module.named_children():
        yield from _with_changes(child, f"{name}.{local}" if name else local, around=mode, changes=changes)


def _remark(task: str, names: Sequence[str]) -> str:
    first = repr(names[0]) if names[0] else "the model"
    others = f" (and {len(names) - 1} others)" if len(names) > 1 else ""
    return (
        f"{task}.build_model left {first}{others} in eval mode. It has trainable parameters, or is inside a module "
        "that has: it is trained in train mode, with dropout, as after model.train(). A frozen part "
        "(requires_grad=False) of a model in train mode stays in eval mode; for other parts override train()."
    )
