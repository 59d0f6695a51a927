"""Compiled code whose bits do not depend on the shapes that a worker saw, nor on when it saw them.

torch makes kernels for dynamic shapes when it sees a second shape, and runs code eagerly after eight. Both round
differently from a kernel for one shape. So each shape is compiled by itself, in blocks that
`EngineConfig(compile=True)` compiles and in code that the program itself compiles; so is each value of a Python number
that compiled code takes. More than a limit end the run, with a checkpoint, instead of running eagerly. An error of the
compiler ends the task's call, also where the program has torch suppress it. torch keeps these settings per thread, and
a backward may be compiled in another thread than its forward. So they are repeated wherever a compilation begins.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from raysharded import numerics
from raysharded.actors.compilation.ahead_of_join import Call, compile_ahead, tensors_in, told
from raysharded.actors.device.accelerator import accelerator
from raysharded.actors.model.sharded_model import ShardedModel, holds_parameters
from raysharded.actors.task_calls.task_errors import line_here
from raysharded.checkpoint import Storage
from raysharded.checkpoint.retention.catalog import list_checkpoints
from raysharded.config import EngineConfig
from raysharded.errors import CollectiveAborted, InexactError, text_of
from raysharded.task import Task

if TYPE_CHECKING:
    from torch._dynamo.callback import CallbackArgs

_log = logging.getLogger("raysharded.worker")
_COMPILED_PER_SHAPE = 16
"""Most variants of a function's code for each shape: with and without gradients, in training and evaluation, for each
kind of block, and of earlier numbers of workers."""
_NO_LIMIT = 1 << 30
Shapes: TypeAlias = tuple[tuple[int, ...], ...]
"""Shapes of the tensors that a block is called with, in order."""


class Compilation:
    """The compilations of one worker's process, in exact mode."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self._most, self._device = config.max_compiled_shapes, device
        self._has_blocks, self._listens = config.compile, False
        self._seen: dict[str, dict[Shapes, None]] = {}
        """Unit -> the shapes of its calls, in the order in which they first occurred."""
        self._untold: list[Call] = []
        """Calls with new shapes that are not yet written to the run's folder."""
        self._newest: tuple[str, Shapes] = ("", ())
        """The unit and the newest of its shapes: a compilation that runs now is for them."""
        self._began_at = 0.0
        self._in_phase: Callable[[str], AbstractContextManager[None]] | None = None
        self._phase: AbstractContextManager[None] | None = None
        self._refusal: InexactError | None = None
        """The error that must end the run: a unit was called with too many shapes, or code has too many variants."""
        self._refused_at: int | None = None
        """The step of this generation after which a checkpoint was requested."""

    def watch(self, sharded: ShardedModel, in_phase: Callable[[str], AbstractContextManager[None]]) -> None:
        """Count the shapes of the calls of all units but the root; compilation time counts to a phase."""
        self._in_phase, self._refused_at = in_phase, None  # a checkpoint requested by an older generation may be lost
        if not self._has_blocks:
            return
        for (name, unit), (_, each) in zip(sharded.units, sharded.hooks, strict=True):
            if name and holds_parameters(unit):
                each.before_gather(partial(self._note, name))

    def end_step(self, step: int, storage: Storage, ask_for_checkpoint: Callable[[], None]) -> None:
        """Write new calls, and end the run if necessary. Call after each step.

        After too many shapes of a unit, requests a checkpoint, and raises InexactError once one since then is complete.
        """
        self._tell(storage)
        if self._refusal is None:
            return
        if self._refused_at is None:
            self._refused_at = step
            ask_for_checkpoint()
        elif any(ref.complete and ref.step >= self._refused_at for ref in list_checkpoints(storage)):
            raise self._refusal

    def _tell(self, storage: Storage) -> None:
        """Write the new calls to the run's folder. A failure only costs later joiners time."""
        untold, self._untold = self._untold, []
        try:
            for call in untold:
                call.tell(storage)
        except Exception as error:  # noqa: BLE001 - any storage may fail in its own way
            _log.warning("could not write the compiled calls for workers that join later: %s", text_of(error))

    def catch_up(self, task: Task, config: EngineConfig, storage: Storage, seed: int = 0) -> None:
        """Compile the blocks for the calls that the run's workers have written. In the thread that computes."""
        if not self._has_blocks:
            return
        try:
            calls = told(storage)
        except Exception as error:  # noqa: BLE001 - as above
            _log.warning("could not read the calls that the run has compiled: %s", text_of(error))
            return
        if calls:
            compile_ahead(task, config, calls, self._device, seed)

    def settle(self, number: int = 1) -> None:
        """Set up this process, and the calling thread, to compile each shape by itself.

        `number`: the rule's number. Under 1, which holds until the number is known, and 2, only if there are compiled
        blocks.
        """
        if not self._has_blocks and number < numerics.COMPILES_ALL_CODE:
            return
        from torch._dynamo.callback import callback_handler  # takes a second to import

        if not self._listens:
            self._listens = True
            callback_handler.register_start_callback(self._begin)
            callback_handler.register_end_callback(self._end)
        self._settle()

    def _settle(self) -> None:
        from torch._dynamo import config as dynamo

        dynamo.automatic_dynamic_shapes = False
        dynamo.assume_static_by_default = True
        dynamo.recompile_limit = dynamo.accumulated_recompile_limit = _NO_LIMIT  # `_count` has one
        dynamo.suppress_errors = False  # else what one worker cannot compile runs eagerly there
        if accelerator().has(self._device):
            accelerator().make_compilation_exact()

    def _begin(self, begun: CallbackArgs) -> None:
        self._settle()
        self._count(begun)
        self._began_at = time.perf_counter()
        if self._in_phase is not None:
            phase = self._in_phase("compile")
            with suppress(CollectiveAborted):  # that is for the code that is compiled to find
                phase.__enter__()
                self._phase = phase

    def _count(self, begun: CallbackArgs) -> None:
        """Note the error for too many variants of one code. torch numbers them: `4/17` is the 18th of the code 4."""
        number = re.fullmatch(r"\d+/(\d+)(_\d+)?", begun.compile_id)
        most = _COMPILED_PER_SHAPE * (self._most + 1)
        if number is not None and int(number[1]) >= most and self._refusal is None:
            self._refusal = InexactError(
                f"{line_here()}: compiled code came to more than {most} variants on one worker, {_COMPILED_PER_SHAPE} "
                f"for each shape of EngineConfig.max_compiled_shapes={self._most} and one. Each shape is compiled by "
                "itself, as kernels for any shape round differently; so is each value of a Python number. Pad samples "
                "to a few lengths, and give numbers that change as tensors; or raise the limit and resume: that "
                "changes no bit."
            )

    def _end(self, _: object) -> None:
        if self._phase is not None:
            phase, self._phase = self._phase, None
            phase.__exit__(None, None, None)
        name, shapes = self._newest
        seconds = time.perf_counter() - self._began_at
        about = f" for unit {name} and the shapes {_shown(shapes)}" if name else ""
        _log.info("compiled for %.1f s%s", seconds, about)

    def _note(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        shapes = tuple(tuple(tensor.shape) for tensor in tensors_in((args, kwargs)))
        seen = self._seen.setdefault(name, {})
        if shapes in seen:
            return
        seen[shapes] = None
        self._newest = name, shapes
        call = Call.of(name, args, kwargs)
        if call is not None and torch.is_grad_enabled():
            self._untold.append(call)
        if len(seen) > self._most and self._refusal is None:
            first, newest = next(iter(seen)), shapes
            self._refusal = InexactError(
                f"unit {name} came to {len(seen)} shapes of its inputs on one worker, more than "
                f"EngineConfig.max_compiled_shapes={self._most}: the first was {_shown(first)}, the newest "
                f"{_shown(newest)}. Each is compiled by itself, as kernels for any length round differently. Pad "
                "samples to a few lengths (buckets), or raise the limit and resume: that changes no bit."
            )


def _shown(shapes: Shapes) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)
