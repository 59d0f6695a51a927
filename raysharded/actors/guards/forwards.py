"""Finds a forward that does not use the model's units as others do: the workers' collectives would not belong together.

Each use of a unit is a collective of a shard group. So every microbatch of a kind, in training or in evaluation, must
come to the same units in the same order, as often. Each is compared with the first one of its kind that the worker
computes in a generation. In a run's first generation that one is compared with the other workers', use by use; not in
those that go on from memory, as that would take as many small collectives as there are units while a run recovers. What
differs is found before it gathers anything, so that nobody waits for what does not come.

A buffer that a forward changes is refused, too: what it holds would depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from raysharded.actors.model.sharded_model import clean_name, holds_parameters
from raysharded.actors.numerics.bit_digest import some_of, tensor_digest
from raysharded.actors.numerics.microbatch_schedule import microbatch_name
from raysharded.errors import InexactError

Kind = Literal["train", "evaluate"]


class UnitWatch:
    """Of one generation's model. Training thread only; all workers do as many forwards of each kind."""

    def __init__(
        self, units: Sequence[tuple[str, FSDPModule]], sum_over_workers: Callable[[torch.Tensor], torch.Tensor] | None
    ) -> None:
        """`sum_over_workers`: of an int64 host tensor, in place; None: nothing is compared with other workers'."""
        self._has_root = any(not name and holds_parameters(unit) for name, unit in units)
        watched = [(name, unit) for name, unit in units if holds_parameters(unit)]
        self._names = [f"unit {name or 'the root'}" for name, _ in watched]
        self._end = len(watched)
        """Stands for the forward's end, as the places below it do for units."""
        self._sum = sum_over_workers
        self._expected: dict[Kind, list[int]] = {}
        self._used: list[int] = []
        self._forward: tuple[Kind, str] | None = None
        """What is computed now; in a backward, which may call units again to recompute them, nothing."""
        for place, (_, unit) in enumerate(watched):
            assert isinstance(unit, nn.Module)
            unit.register_forward_pre_hook(partial(self._note, place), prepend=True)  # before FSDP2's, which gathers

    @contextmanager
    def watching(self, kind: Kind, where: str) -> Iterator[None]:
        """Around the forwards of one microbatch, which is named by `where`. Raises InexactError, out of the forward or
        at its end, with the first unit that differs; in training also with one that no microbatch uses."""
        self._forward, self._used = (kind, where), []
        try:
            yield
            self._compare(self._end, kind, where)
            if kind == "train":
                self._require_all(where)
            self._expected.setdefault(kind, self._used)
        finally:
            self._forward = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
    def _note(self, place: int, *_: object) -> None:
        if self._forward is not None:
            self._compare(place, *self._forward)

    def _compare(self, place: int, kind: Kind, where: str) -> None:
        expected = self._expected.get(kind)
        others = self._places_of_all(place) if expected is None else [expected[len(self._used)]]
        different = [other for other in others if other != place]
        if different:
            raise InexactError(
                f"the forward of {where} comes to {self._name(place)} where another microbatch comes to "
                f"{self._name(different[0])}; which units take part, how often and in which order must not depend on "
                "the data, nor on how many samples there are. Compute the same for every microbatch (and multiply by 0 "
                "what is not to count), or let Task.wrap leave this one out (its parent then holds its parameters)."
            )
        self._used.append(place)

    def _places_of_all(self, place: int) -> list[int]:
        """Where the workers' forwards are now."""
        if self._sum is None:
            return [place]
        counts = torch.zeros(self._end + 1, dtype=torch.int64)
        counts[place] = 1
        return self._sum(counts).nonzero().flatten().tolist()

    def _require_all(self, where: str) -> None:
        unused = sorted(set(range(self._end)) - set(self._used))
        if unused and self._has_root and unused[-1] == self._end - 1:  # the root is the last
            raise InexactError(
                f"the model was not called in the forward of {where}. Let the loss call model(...): a submodule of it, "
                "or another method than forward, would use weights of which each worker has a part alone. Give forward "
                "an argument that says what is wanted."
            )
        for place in unused:
            raise InexactError(
                f"{self._names[place]} took no part in the forward of {where}. Use every block in every forward, or "
                "let Task.wrap leave this one out (its parent then holds its parameters)."
            )

    def _name(self, place: int) -> str:
        return "its end" if place == self._end else self._names[place]


def watching(watch: UnitWatch | None, kind: Kind, step: int, microbatch: int | None) -> AbstractContextManager[None]:
    """As `UnitWatch.watching`; `microbatch` is None for a worker that has none. Nothing is watched without a watch."""
    what = microbatch_name(-1 if microbatch is None else microbatch)
    when = f"step {step}" if kind == "train" else f"the evaluation after step {step}"
    return nullcontext() if watch is None else watch.watching(kind, f"{when}, {what}")


class BufferWatch:
    """Finds a buffer that a forward pass changed.

    Torch counts most changes, but not those through `.data`, nor those that batch-norm makes: so some of the elements
    are compared now and then, too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = self._versions()
        self._bits = self._some_bits()
        self._compared: set[str] = set()

    def _versions(self) -> dict[str, object]:
        return {name: (id(buffer), buffer._version) for name, buffer in self._model.named_buffers()}

    def _some_bits(self) -> dict[str, object]:
        return {
            name: int(tensor_digest(some_of(buffer)).item())
            for name, buffer in self._model.named_buffers()
            if buffer.layout is torch.strided and not buffer.is_quantized and type(buffer) is torch.Tensor
        }

    def check(self, after: str, step: int) -> None:
        """Raise `InexactError` naming the first buffer that is not what it was. Elements are compared the first time
        `after` something, and after the steps 1, 2, 4, 8, ..."""
        self._compare(self._before, self._versions())
        is_power_of_two = step & (step - 1) == 0
        if is_power_of_two or after not in self._compared:
            self._compared.add(after)
            self._compare(self._bits, self._some_bits())

    def _compare(self, before: Mapping[str, object], now: Mapping[str, object]) -> None:
        for name, value in now.items():
            if before.get(name) != value:
                raise InexactError(
                    f"buffer {clean_name(name)!r} changed during forward; what it holds would depend on the number of "
                    "workers. Compute it from the inputs instead, or give up identical bits with "
                    'EngineConfig(reduction="fast").'
                )
