"""Replay of draws from NumPy and Python's `random` when activations are recomputed.

`torch.utils.checkpoint` restores torch's generators alone. A block that draws a mask from NumPy would get another one
in backward, and the gradient would be that of neither. Both kinds of checkpoint are covered, for all callers:
raysharded's for `EngineConfig.activation_checkpointing`, and the model's own. torch offers no hook that all callers
pass, so two of its functions are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import checkpoint

from raysharded.data.access import generators


class Replayed:
    """A function that forward calls once; later calls run with the generators as they were then."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._before: generators.States | None = generators.states(with_torch=False)
        self._is_over = False

    def end_forward(self) -> None:
        """Mark the end of the forward: if it drew nothing, nothing needs to be restored."""
        if self._before is not None and generators.stand_at(self._before):
            self._before = None
        self._is_over = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_over or self._before is None:
            return self._function(*args, **kwargs)
        with generators.kept(with_torch=False):
            generators.restore(self._before)
            return self._function(*args, **kwargs)


def install() -> None:
    """Let all later checkpoints of this process replay draws. Further calls change nothing."""
    if getattr(checkpoint, "_replays", False):
        return
    generator: Callable[..., Iterator[None]] = checkpoint._checkpoint_without_reentrant_generator
    forward: Callable[..., Any] = checkpoint.CheckpointFunction.forward

    def replaying_generator(
        fn: Callable[..., Any], preserve_rng_state: bool = True, *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        if not preserve_rng_state:
            yield from generator(fn, preserve_rng_state, *args, **kwargs)
            return
        replayed = Replayed(fn)
        yield from generator(replayed, preserve_rng_state, *args, **kwargs)
        replayed.end_forward()

    def replaying_forward(ctx: Any, run_function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if not preserve_rng_state:
            return forward(ctx, run_function, preserve_rng_state, *args)
        replayed = Replayed(run_function)
        outputs = forward(ctx, replayed, preserve_rng_state, *args)
        replayed.end_forward()
        return outputs

    checkpoint._checkpoint_without_reentrant_generator = replaying_generator
    checkpoint.CheckpointFunction.forward = staticmethod(replaying_forward)  # type: ignore[method-assign]
    vars(checkpoint)["_replays"] = True
