"""A tensor beside each parameter in a user's loop, as an average of the weights: sharded, kept and moved as they are.

The tensors lie with the optimizer's state of their parameter. So they go back with the step; snapshots, mirrors and
checkpoints have them; and other workers get the parts that become theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from raysharded.actors.model.sharded_model import local_of
from raysharded.actors.numerics.bit_digest import tensor_digest
from raysharded.actors.optimizer.inner_optimizers import REGISTERED, OptimizerParts
from raysharded.actors.optimizer.registered_state import Stateful
from raysharded.actors.task_calls.object_contents import NotFollowed
from raysharded.actors.task_calls.task_errors import line_here
from raysharded.errors import InexactError, TaskError

if TYPE_CHECKING:
    from raysharded.actors.optimizer.shard_optimizer import ShardOptimizer
    from raysharded.actors.session.user_step import UserStep

Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]
_TRIED = 1 << 12
"""Number of elements of each tensor on which a rule is tried."""


class ParameterTensors(NotFollowed):
    """A tensor for each parameter in the optimizer's groups, of the parameter's shape; at first a copy of it.

    It is registered: `session.shard(model, optimizer, average=average)`.
    """

    def __init__(self, *, dtype: torch.dtype | None = None) -> None:
        """`dtype`: the tensors' type; None: each has its parameter's."""
        self._dtype, self._key, self._is_exchanged = dtype, "", False
        self._optimizer: ShardOptimizer | None = None
        self._step: UserStep | None = None

    def update(self, rule: Rule) -> None:
        """Call `rule(tensor, parameter)` for each pair: one-dimensional parts of this worker, of the tensor's dtype.

        The rule changes `tensor` in place, or returns its new values: `lambda mean, weight: mean.lerp_(weight, 0.001)`.
        Each new value may depend on the two elements of its place alone; that is tried in the steps 1, 2, 4, 8, ... of
        a worker. Call it in the `with`, behind `optimizer.step()`, on every worker.

        Raises InexactError if a value depends on other elements, and TaskError if the rule changes the parameter.
        """
        step = self._open("update()")
        with torch.no_grad():
            step.watch.note_call(f"{self._key.partition(':')[2]}.update", _digest_of(rule))
            for name, tensor, parameter in self._pairs():
                given = parameter if parameter.dtype == tensor.dtype else parameter.to(tensor.dtype)
                if step.watch.is_watched:
                    _try_out(rule, tensor, given, name)
                version = given._version
                _apply(rule, tensor, given)
                if given._version != version:
                    raise TaskError(
                        f"{line_here()}: the rule changed the parameter {name!r}; it may change the tensor alone."
                    )

    @contextmanager
    def as_parameters(self) -> Iterator[None]:
        """A context in which the model's parameters have these values, and the tensors those of the parameters.

        For an evaluation: in the `with`, behind `optimizer.step()`, on every worker. Parameters that are in no group of
        the optimizer, and buffers, keep their own.
        """
        self._open("as_parameters()").watch.note_call(f"{self._key.partition(':')[2]}.as_parameters", "called")
        kept = self._exchange({})
        self._is_exchanged = True
        try:
            yield
        finally:
            self._is_exchanged = False
            self._exchange(kept)

    def _begin(self, key: str, optimizer: ShardOptimizer) -> None:
        """Begin a generation, whose state is loaded. `key`: the name under which it is registered."""
        self._key, self._optimizer, self._step = f"{REGISTERED}:{key}", optimizer, None
        for parameter in optimizer.written.values():
            if self._key not in optimizer.built.parts.kept_of(parameter):
                first = parameter.detach().to(self._dtype or parameter.dtype, copy=True)
                optimizer.built.parts.keep(parameter, self._key, first)

    def _begin_step(self, step: UserStep) -> None:
        self._step = step

    def _end(self) -> None:
        self._optimizer = self._step = None

    def _open(self, call: str) -> UserStep:
        if self._step is None:
            raise TaskError(
                f"{line_here()}: {call} of registered tensors belongs into `with step:`, behind optimizer.step(). "
                "Register them: session.shard(model, optimizer, name=tensors)."
            )
        self._step.require_update(f"{call} of registered tensors")
        if self._is_exchanged:
            raise TaskError(f"{line_here()}: {call} of registered tensors came inside as_parameters(). Call it before.")
        return self._step

    def _pairs(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """(parameter's name, local part of its tensor, local part of the parameter), both one-dimensional."""
        assert self._optimizer is not None
        for name, parameter in self._optimizer.written.items():
            tensor = self._optimizer.built.parts.kept_of(parameter)[self._key]
            own, beside = local_of(parameter).detach(), local_of(tensor)
            if own.numel():
                yield name, beside.view(-1), own.view(-1)

    def _exchange(self, kept: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Exchange tensors and parameters. Returns the parameters that tensors of another dtype cannot keep: `kept` of
        the call that puts all back."""
        others: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, tensor, parameter in self._pairs():
                before = parameter.clone()
                parameter.copy_(kept.get(name, tensor))
                if tensor.dtype == parameter.dtype:
                    tensor.copy_(before)
                else:
                    others[name] = before
        return others


def plain_of(registered: Mapping[str, Stateful | ParameterTensors | None]) -> dict[str, Stateful]:
    """The other registered objects, by name."""
    return {name: one for name, one in registered.items() if not (one is None or isinstance(one, ParameterTensors))}


class RegisteredTensors:
    """All such tensors of a session. Thread of the function only."""

    def __init__(self, registered: Mapping[str, object], parts: OptimizerParts | None = None) -> None:
        """`registered`: everything that is registered, by name; the rest is left. `parts`: the optimizer's; None if
        nothing is registered."""
        self._by_name = {name: one for name, one in registered.items() if isinstance(one, ParameterTensors)}
        if self._by_name and parts is not None:
            parts.hold_registered(self._by_name)

    def begin(self, optimizer: ShardOptimizer) -> None:
        """Begin a generation, whose state is loaded."""
        for name, tensors in self._by_name.items():
            tensors._begin(name, optimizer)

    def end(self) -> None:
        """End a generation: its memory is to be freed."""
        for tensors in self._by_name.values():
            tensors._end()

    def begin_step(self, step: UserStep) -> None:
        """Note the step that is begun."""
        for tensors in self._by_name.values():
            tensors._begin_step(step)


def _digest_of(rule: Rule) -> str:
    """Digest of a rule's values for fixed numbers: the same on every worker, unless it depends on something else."""
    tensor = torch.linspace(-1.0, 2.0, 7, dtype=torch.float64)
    _apply(rule, tensor, torch.linspace(3.0, -0.5, 7, dtype=torch.float64))
    return f"{int(tensor_digest(tensor)):x}"


def _apply(rule: Rule, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
    found = rule(tensor, parameter)
    if isinstance(found, torch.Tensor) and found is not tensor:
        tensor.copy_(found)


def _try_out(rule: Rule, tensor: torch.Tensor, parameter: torch.Tensor, name: str) -> None:
    """Raise InexactError if the rule's values for a part of a tensor depend on where the part is cut."""
    whole, own = tensor[:_TRIED].clone(), parameter[:_TRIED].clone()
    cut = len(own) // 3 or len(own)
    pieces = [(one.clone(), of.clone()) for one, of in zip(_cut(whole, cut), _cut(own, cut), strict=True)]
    _apply(rule, whole, own)
    for piece, of in pieces:
        _apply(rule, piece, of)
    if int(tensor_digest(torch.cat([piece for piece, _ in pieces]))) != int(tensor_digest(whole)):
        raise InexactError(
            f"{line_here()}: the rule for the tensor of {name!r} gives other values when the parameter is cut: a norm, "
            "a mean or a random draw is over a worker's part. Let each element's new value depend on the two elements "
            "of its place alone."
        )


def _cut(tensor: torch.Tensor, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor[:at], tensor[at:]
