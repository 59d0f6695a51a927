"""Places of a step at which all workers of a user's loop are together, and their registered state at its end.

The comparison at a step's end is a sum that is on its way while the next step computes: waiting for it takes as long as
an agreement. `settle` waits for it: ahead of the next agreement, which commits the step, and of a checkpoint. A
generation that is aborted earlier forgets the step, unless the sum has arrived: then all workers are known to be alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from raysharded.actors.optimizer.registered_state import (
    NO_WORDS,
    RegisteredState,
    are_different,
    differing,
    values_of,
    words_of,
)
from raysharded.actors.shards.store import ShardBuffer
from raysharded.actors.step.assembly import Surroundings
from raysharded.errors import InexactError

Place: TypeAlias = Literal["end", "evaluation", "forward", "stop", "weights"]
_PLACES: Mapping[Place, str] = {
    "evaluation": "call session.evaluate",
    "forward": "call the model's forward outside the microbatches",
    "stop": "call session.stop",
    "weights": "call what gathers the whole model, as save_model or save_pretrained, of which rank 0 writes the files",
}


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A comparison of the registered state of a step that has ended."""

    step: int
    texts: Sequence[str]
    """The registered state, and the optimizer's settings around its step: a scheduler may have changed them since."""
    calls: Sequence[str]
    sums: Callable[[], list[int]]
    """Waits for the sums of all workers' words; again at each call."""


class Meetings:
    """The meetings of one generation. Training thread only; all workers make the same calls together."""

    def __init__(self, around: Surroundings, registered: RegisteredState | None) -> None:
        """`registered`: a session's state; None for a task."""
        self._around, self._registered = around, registered
        self._group, self._members = around.groups.state, around.place.spec.members
        self._newest: _Comparison | None = None
        """That of the newest step, until it is settled."""

    def end(self, step: int) -> None:
        """Keep the registered state of a step that ends, and begin to compare it. Raises InexactError, TaskError."""
        if self._registered is not None:
            self._registered.exchange_streams(step, self._group, self._around.say)
            text, calls = self._registered.text(), tuple(self._registered.calls)
            texts = (text, *self._registered.in_update)
            place: Place = "stop" if self._registered.is_last else "end"  # only these wait for the sum at once
            sums = self._begin(step, place, words_of("\n".join([values_of(text), *texts[1:], *calls])))
            self._newest = _Comparison(step, texts, calls, sums)
            self._around.store.register(step, text)

    def settle(self) -> None:
        """Return when all workers are known to have ended the newest step alike. Raises InexactError if they have not.

        Idempotent.
        """
        newest = self._newest
        if newest is not None and are_different(newest.sums(), len(self._members)):
            raise differing(newest.texts, newest.calls, newest.step, self._members, self._group)
        self._newest = None

    def give_up(self) -> list[ShardBuffer]:
        """After an abort: forget the newest step, unless all workers are known to have ended it alike.

        Returns the buffers that were forgotten.
        """
        newest, self._newest = self._newest, None
        if newest is None:
            return []
        try:
            is_settled = not are_different(newest.sums(), len(self._members))
        except Exception:  # noqa: BLE001 - the sum did not arrive, or shows that workers are at different places
            is_settled = False
        return [] if is_settled else self._around.store.forget(newest.step)

    def meet_alike(self, step: int, place: Place, what: str) -> None:
        """As `meet`. Raises InexactError, too, if the workers are to do different things there."""
        if are_different(self.meet(step, place, words_of(what)), len(self._members)):
            raise InexactError(
                f"step {step}: the workers {_PLACES[place]} with data of other lengths, or with other arguments; here "
                f"they are {what}. Give the same on every worker."
            )

    def meet(self, step: int, place: Place, words: Sequence[int] = NO_WORDS) -> list[int]:
        """The sums of the workers' words. Raises InexactError if they are at different places of a step."""
        return self._begin(step, place, words)()

    def _begin(self, step: int, place: Place, words: Sequence[int]) -> Callable[[], list[int]]:
        own = [int(place == one) for one in _PLACES]
        arrive = self._group.begin_sum_int64(torch.tensor([*own, *words], dtype=torch.int64))

        def sums() -> list[int]:
            counts = arrive().tolist()
            for count, what in zip(counts, _PLACES.values(), strict=False):
                if count not in (0, len(self._members)):
                    raise InexactError(
                        f"step {step}: {count} of {len(self._members)} workers {what}, and the others do not: let all "
                        "do it equally often, by what is the same on every worker, as step.number."
                    )
            return counts[len(own) :]

        return sums
