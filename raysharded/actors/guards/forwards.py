"""Detection of a forward that uses the model's units unlike others: the workers' collectives would not match.

Each use of a unit is a collective of a shard group. So every microbatch of a kind, in training or in evaluation, must
use the same units, in the same order and equally often. Each is compared with the first of its kind that the worker
computes in a generation. In a run's first generation that one is compared with the other workers', use by use.
Generations that resume from memory skip this: it costs one small collective for each unit while a run recovers. A
difference is detected before it gathers anything, so no worker waits for a collective that never comes.

A buffer that a forward changes is refused, too: its contents would depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from raysharded.actors.device.device_waits import numbers_of
from raysharded.actors.in_place.unit_hooks import UnitHooks
from raysharded.actors.model.sharded_model import clean_name, holds_parameters
from raysharded.actors.numerics.bit_digest import some_of, tensor_digest
from raysharded.actors.numerics.microbatch_schedule import microbatch_name
from raysharded.errors import InexactError

Kind = Literal["train", "evaluate"]


class UnitWatch:
    """Watch of the units of one generation's model.

    Training thread only; all workers do equally many forwards of each kind.
    """

    def __init__(
        self,
        units: Sequence[tuple[str, FSDPModule]],
        hooks: Sequence[tuple[str, UnitHooks]],
        sum_over_workers: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        """`hooks`: the units', in their order. `sum_over_workers`: adds an int64 host tensor over the workers, in
        place; None: compare within the worker."""
        self._has_root = any(not name and holds_parameters(unit) for name, unit in units)
        watched = [each for each, (_, unit) in zip(hooks, units, strict=True) if holds_parameters(unit)]
        self._names = [f"unit {name or 'the root'}" for name, _ in watched]
        self._end = len(watched)
        """The place of the forward's end; lower places are units."""
        self._sum = sum_over_workers
        self._expected: dict[tuple[Kind, str], list[int]] = {}
        self._used: list[int] = []
        self._forward: tuple[tuple[Kind, str], str] | None = None
        """The forward that runs now; None in a backward, which may call units again to recompute them."""
        for place, (_, each) in enumerate(watched):
            each.before_gather(partial(self._note, place))

    @contextmanager
    def watching(self, kind: Kind, where: str, name: str = "") -> Iterator[None]:
        """Watch the forwards of one microbatch, which `where` names. `name`: of one of several evaluations.

        Raises InexactError, out of the forward or at its end, for the first unit that differs. In training, also raises
        it for a unit that no microbatch uses.
        """
        key = kind, name
        self._forward, self._used = (key, where), []
        try:
            yield
            self._compare(self._end, key, where)
            if kind == "train":
                self._require_all(where)
            self._expected.setdefault(key, self._used)
        finally:
            self._forward = None

    def _note(self, place: int, *_: object) -> None:
        if self._forward is not None:
            self._compare(place, *self._forward)

    def _compare(self, place: int, key: tuple[Kind, str], where: str) -> None:
        expected = self._expected.get(key)
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
        """The distinct places that the workers' forwards have reached."""
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
                "an argument that selects the computation."
            )
        for place in unused:
            raise InexactError(
                f"{self._names[place]} took no part in the forward of {where}. Use every block in every forward, or "
                "let Task.wrap leave this one out (its parent then holds its parameters)."
            )

    def _name(self, place: int) -> str:
        return "its end" if place == self._end else self._names[place]


def watching(
    watch: UnitWatch | None, kind: Kind, step: int, microbatch: int | None, name: str = ""
) -> AbstractContextManager[None]:
    """A context as `UnitWatch.watching`, empty without a watch. `microbatch`: None for a worker that has none."""
    what = microbatch_name(-1 if microbatch is None else microbatch)
    when = f"step {step}" if kind == "train" else f"the evaluation after step {step}"
    return nullcontext() if watch is None else watch.watching(kind, f"{when}, {what}", name)


class BufferWatch:
    """Detection of a buffer that a forward pass changed.

    torch counts most changes, but not changes through `.data` or by batch-norm. So some of the elements are compared
    at intervals, too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = self._versions()
        self._bits = self._some_bits()
        self._compared: set[str] = set()

    def _versions(self) -> dict[str, object]:
        return {name: (id(buffer), buffer._version) for name, buffer in self._model.named_buffers()}

    def _some_bits(self) -> dict[str, object]:
        watched = {
            name: tensor_digest(some_of(buffer))
            for name, buffer in self._model.named_buffers()
            if buffer.layout is torch.strided and not buffer.is_quantized and type(buffer) is torch.Tensor
        }
        return dict(zip(watched, numbers_of(watched.values()), strict=True))

    def check(self, after: str, step: int) -> None:
        """Raise `InexactError` naming the first buffer that changed.

        Elements are compared at the first check with each value of `after`, and after the steps 1, 2, 4, 8, ...
        """
        self._compare(self._before, self._versions())
        is_power_of_two = step & (step - 1) == 0
        if is_power_of_two or after not in self._compared:
            self._compared.add(after)
            self._compare(self._bits, self._some_bits())

    def _compare(self, before: Mapping[str, object], now: Mapping[str, object]) -> None:
        for name, value in now.items():
            if before.get(name) != value:
                raise InexactError(
                    f"buffer {clean_name(name)!r} changed during forward; its contents would depend on the number of "
                    "workers. Compute it from the inputs instead, or accept results without identical bits with "
                    'EngineConfig(reduction="fast").'
                )
