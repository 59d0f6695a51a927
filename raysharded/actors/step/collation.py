"""Batches of samples: collated by the task or by torch, and on the worker's device; ahead of their use where possible.

A background thread collates by `default_collate`, which runs no code of the user but that of their classes, and
copies to an accelerator. The task's own `collate` runs in the process that reads the samples. All else is
done in the training thread. The bits are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import default_collate

from raysharded.actors.device.accelerator import Event, Stream, accelerator, seed_torch
from raysharded.actors.device.device_waits import on_device
from raysharded.actors.numerics.microbatch_schedule import microbatch_name
from raysharded.actors.task_calls.explanations import without_tables
from raysharded.actors.task_calls.remarks import Say
from raysharded.actors.task_calls.task_errors import task_error
from raysharded.data import Microbatch
from raysharded.data.access import generators
from raysharded.data.access.collation import Batch, Collation, Rows, copies_of, seed_of
from raysharded.data.access.repeat_check import differ
from raysharded.data.access.sample_changes import copies_before, require_passing_changes
from raysharded.errors import InexactError, TaskError, is_ctrl_c, text_of, user_traceback
from raysharded.task import Task

_MOST_NAMED = 8


class Collator:
    """Batches of a worker's microbatches, on its device. Training thread only.

    Random draws of the task's own `collate` depend on (seed, purpose, step, microbatch).
    """

    def __init__(
        self,
        task: Task,
        device: torch.device,
        seed: int,
        ahead: Collation | None,
        say: Say,
        *,
        is_exact: bool = True,
        again: Callable[[int, int], Sequence[Any]] | None = None,
    ) -> None:
        """`ahead`: whether batches are made in the process that reads the samples; None: nothing is. `say`: reports
        remarks. `is_exact`: refuse what makes batches differ. `again`: reads the samples of a (step, microbatch) again,
        if they may be the dataset's own memory."""
        self._name, self._collate = type(task).__name__, task.collate
        self._device, self._seed, self._ahead, self._say = device, seed, ahead, say
        self._is_exact, self._again = is_exact, again
        self._step = self._num_held_out = 0

    def training_batch(self, taken: Microbatch, *, is_padding: bool = False) -> Any:
        """The batch of a microbatch. Raises TaskError if its samples cannot be collated, and InexactError if the task's
        function changes them for the next epoch, too. `is_padding`: of samples that were collated before."""
        if isinstance(taken.batch, Copied):
            return taken.batch.take()
        if isinstance(taken.batch, Batch) and not taken.samples:
            return to_device(taken.batch.value, self._device)
        again = self._again and partial(self._again, taken.step, taken.index)
        is_watched = not is_padding and (taken.batch is not None or self._is_watched(taken.step))
        collated = self._collated(
            taken.samples, taken.ids.tolist(), "train", taken.step, taken.index, again if is_watched else None
        )
        if self._ahead is not None:
            if taken.batch is not None:
                self._judge(self._ahead, collated, taken.batch.value, taken.step)
            if self._ahead.is_refused:
                self._say("collate", f"{self._name}.collate is called in the training thread: {self._ahead.reason}")
        return to_device(collated, self._device)

    def _judge(self, ahead: Collation, here: Any, there: Any, step: int) -> None:
        """Compare a batch with the one that the process which reads the samples has made."""
        if ahead.judge(is_equal=is_equal(here, there)) or not self._is_exact or not differ(here, there):
            return
        raise InexactError(
            f"{self._name}.collate makes another batch in step {step} than the process that reads the samples, which "
            "has the function as it was before the first step: it depends on what has changed since. Do what depends "
            "on the step in the loop's body, by step.number and registered state. Or give "
            "EngineConfig(prefetch=False): then it is called in the training thread, in its step."
        )

    def held_out_batch(
        self,
        samples: Sequence[Any],
        ids: Sequence[int],
        step: int,
        microbatch: int,
        again: Callable[[], Sequence[Any]] | None,
    ) -> Any:
        """The batch of held-out samples, `ids` of the data. Raises TaskError if they cannot be collated.

        `again`: reads the samples again, if they may be the dataset's own memory.
        """
        self._num_held_out += 1
        again = again if self._num_held_out & (self._num_held_out - 1) == 0 else None
        return to_device(self._collated(samples, ids, "evaluate", step, microbatch, again), self._device)

    def _is_watched(self, step: int) -> bool:
        """True for the first microbatch of this generation, and of the steps 1, 2, 4, 8, ..."""
        before, self._step = self._step, step
        return step != before and (not before or step & (step - 1) == 0)

    def _collated(
        self,
        samples: Sequence[Any],
        ids: Sequence[int],
        purpose: str,
        step: int,
        microbatch: int,
        again: Callable[[], Sequence[Any]] | None,
    ) -> Any:
        """The batch. `again`: reads the samples again, to see whether the call changes them for the next read, too."""
        if self._collate is None:
            return self._called(default_collate, list(samples), samples, ids, purpose, step, microbatch)
        before = copies_before(samples) if again is not None and self._is_exact else None
        number = seed_of(self._seed, purpose, step, microbatch)
        seed_torch(number)
        generators.seed(number, with_torch=False)
        found = self._called(self._collate, copies_of(samples), samples, ids, purpose, step, microbatch)
        if before is not None and again is not None:
            require_passing_changes(f"{self._name}.collate", self._collate, before, samples, again, number)
        return found

    def _called(
        self,
        function: Callable[[list[Any]], Any],
        given: list[Any],
        samples: Sequence[Any],
        ids: Sequence[int],
        purpose: str,
        step: int,
        microbatch: int,
    ) -> Any:
        try:
            return function(given)
        except BaseException as error:  # the boundary to the user's classes, which may call sys.exit()
            if is_ctrl_c(error):
                raise
            of = f"step {step}" if purpose == "train" else f"the evaluation after step {step}"
            where = f"{microbatch_name(microbatch)} of {of}"
            if self._collate is not None:
                raise task_error(f"{self._name}.collate of {where}, of {_named(ids)},", error) from error
            raise collation_error(error, samples, where, ids) from error


class AheadOfUse:
    """Collation by torch, and copies to an accelerator, in background threads."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task, self._device = task, device
        self._of_thread = threading.local()

    def __call__(self, microbatch: Microbatch) -> Microbatch:
        """The microbatch with its batch, as far as it can be made ahead. Raises nothing."""
        try:
            return self._made(microbatch)
        except BaseException:  # noqa: BLE001 - the training thread does the same, and raises what it raises
            return microbatch

    def _made(self, microbatch: Microbatch) -> Microbatch:
        is_torchs = microbatch.batch is None and self._task.collate is None
        if not is_torchs and (microbatch.batch is None or microbatch.samples):  # it is compared with that of the task
            return microbatch
        if not accelerator().has(self._device):
            batch = Batch(joined(microbatch.samples)) if is_torchs else microbatch.batch
            return replace(microbatch, samples=[], batch=batch)
        stream = self._stream()
        with accelerator().on(stream):  # samples may lie on the accelerator
            value = joined(microbatch.samples) if is_torchs else microbatch.batch.value
            return replace(microbatch, samples=[], batch=Copied(value, self._device, stream))

    def _stream(self) -> Stream:
        own = self._of_thread
        if not hasattr(own, "stream"):
            accelerator().enter_thread()
            own.stream = accelerator().new_stream(self._device)
        found: Stream = own.stream
        return found


def joined(samples: Sequence[Any]) -> Any:
    """The batch by `default_collate`. It may lie in the samples' memory: they are not used after it."""
    return torch.from_numpy(samples.array) if isinstance(samples, Rows) else default_collate(list(samples))


class Copied:
    """A batch on its way to an accelerator."""

    def __init__(self, value: Any, device: torch.device, stream: Stream) -> None:
        """Begin to copy the tensors, from page-locked memory, on `stream`, the current one."""
        self._device = device
        self._on_device: list[torch.Tensor] = []
        self._page_locked: list[torch.Tensor] = []
        with torch.no_grad():
            self._value = _mapped(value, self._copy)
        self._done: Event = accelerator().record(stream)

    def take(self) -> Any:
        """The batch, for work on the current stream."""
        accelerator().current_stream(self._device).wait_event(self._done)
        for tensor in self._on_device:
            accelerator().keep_for_current_stream(tensor)
        return to_device(self._value, self._device)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        copied = self._copied(tensor) if tensor.device.type == "cpu" else tensor
        if accelerator().has(copied.device):
            self._on_device.append(copied)
        return copied

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.requires_grad
        if not is_plain or not tensor.numel() or tensor.is_neg() or tensor.is_conj() or tensor.is_quantized:
            return tensor
        copied = torch.empty_like(tensor, device=self._device, memory_format=torch.preserve_format)
        flat = accelerator().pinned(tensor.numel() * tensor.element_size()).view(tensor.dtype)
        page_locked = flat.as_strided(copied.shape, copied.stride())
        page_locked.copy_(tensor)
        copied.copy_(page_locked, non_blocking=True)
        self._page_locked.append(flat)
        return copied


def is_equal(one: Any, other: Any) -> bool:
    """True if two batches have the same bits, and tensors the same strides."""
    strides: list[list[tuple[int, ...]]] = []
    for value in (one, other):
        found: list[tuple[int, ...]] = []
        _mapped(value, lambda tensor, found=found: found.append(tensor.stride()))  # type: ignore[misc]
        strides.append(found)
    return strides[0] == strides[1] and not differ(one, other)


def to_device(value: Any, device: torch.device) -> Any:
    """The batch with its tensors on a device."""
    return _mapped(value, lambda tensor: on_device(tensor, device))


def _mapped(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _mapped(item, function) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, function) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, function) for item in value)
    return value


def collation_error(error: BaseException, samples: Sequence[Any], where: str, ids: Sequence[int]) -> TaskError:
    """Error for samples with which `default_collate` raised `error`.

    `where`: description of the samples. `ids`: their indices.
    """
    start, text = f"collating {where}, of {_named(ids)},", f"{type(error).__name__}: {without_tables(text_of(error))}"
    return TaskError(f"{start} raised {text}{_cause(samples, ids)}", user_traceback(error))


def _cause(samples: Sequence[Any], ids: Sequence[int]) -> str:
    for sample, index in zip(samples, ids, strict=False):
        for path, value in leaves("", sample):
            if value is None:
                what = f"has None at {path}" if path else "is None"
                return f". Sample {index} {what}: leave it out of the dataset, or give a placeholder value."
    shapes: dict[str, tuple[int, torch.Size]] = {}
    for sample, index in zip(samples, ids, strict=False):
        for path, value in leaves("", sample):
            if isinstance(value, torch.Tensor):
                first, shape = shapes.setdefault(path, (index, value.shape))
                if value.shape != shape:
                    where = f" at {path}" if path else ""
                    return (
                        f". Sample {index} has the shape {tuple(value.shape)}{where} and sample {first} "
                        f"{tuple(shape)}: pad them to one shape in the dataset, or set microbatch_size=1."
                    )
    return ". Samples are tensors, arrays, numbers or text, or dicts, lists and tuples of them, all alike."


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Values in a sample, each with its path."""
    match value:
        case Mapping():
            for key, item in value.items():
                yield from leaves(f"{path}[{key!r}]", item)
        case list() | tuple():
            for place, item in enumerate(value):
                yield from leaves(f"{path}[{place}]", item)
        case _ if hasattr(value, "__array__") and not isinstance(value, torch.Tensor):
            yield path, torch.empty(getattr(value, "shape", ()), device="meta")
        case _:
            yield path, value


def _named(ids: Sequence[int]) -> str:
    named = ", ".join(map(str, ids[:_MOST_NAMED])) + (", ..." if len(ids) > _MOST_NAMED else "")
    return f"sample {named}" if len(ids) == 1 else f"samples {named}"
