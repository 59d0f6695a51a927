"""Models as a task's `build_model` makes them: their parameters without memory, what is drawn a function of a seed.

Parameters go to the meta device as modules register them, so that a model larger than one worker's memory can be built;
buffers and whatever else a constructor computes are real. A constructor that needs values of its parameters (it calls
`item`, sets `data`, resizes embeddings by their mean) is called again with memory for all of them, which is let go of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from raysharded.actors.model.meta_watch import MemoryWatch
from raysharded.actors.model.parameter_marks import share
from raysharded.actors.task_calls.process_state import Left, put_back
from raysharded.actors.task_calls.task_errors import causes
from raysharded.data.access import generators
from raysharded.errors import RayshardedError, TaskError, text_of
from raysharded.ids import derive_seed
from raysharded.task import Task

_MEBI = 1 << 20
_WORDS = (
    *("meta tensor", "Meta tensor", "meta device", "device meta", "'meta'", "'Meta'", "Meta kernel", "register_meta"),
    *("set_data", "no data!"),
)
"""In what torch says of a tensor on the meta device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Construction:
    """A model, its parameters on the meta device, and what is to be said of how it came to be."""

    model: nn.Module
    drew: bool = False
    """True if the constructor moved one of the process's generators."""
    whole_because: str = ""
    """Why it was built with memory for its parameters first, in torch's words; empty: it was not."""
    left: Left = field(default_factory=Left)
    """What the constructor left changed in the process, and was put back."""

    def remarks(self, task: Task) -> dict[str, str]:
        """Subject -> the sentence that a user should read once."""
        if not self.whole_because:
            return {}
        size = sum(param.numel() * param.element_size() for param in self.model.parameters()) / _MEBI
        name = f"{type(task).__name__}.build_model"
        return {
            name: f"{name} needs values of its parameters while it runs ({self.whole_because}): each worker builds the "
            f"whole model, {size:.0f} MiB of parameters, in its memory whenever workers come or go, and lets go of it "
            "again. Give parameters their values in Task.init_weights where that is too much."
        }


def construct(task: Task, seed: int, purpose: str = "build") -> Construction:
    """The task's model with parameters on the meta device; the process's generators and settings are left as they were.

    What is drawn is a function of `seed` and `purpose`. Raises what `build_model` raises with real parameters.
    """
    with generators.kept():
        _seed(seed, purpose)
        before = generators.marks()
        try:
            with parameters_on_meta(), MemoryWatch(_of_no_values), put_back() as left:
                model = without_memory(task.build_model())
            why = ""
        except RayshardedError:
            raise
        except Exception as error:
            if not _is_about_memory(error):  # to build it whole would cost a large model's machine all of its memory
                raise
            why = f"{type(error).__name__}: {text_of(error).partition(chr(10))[0][:200]}"
            _seed(seed, purpose)
            with put_back() as left:
                model = without_memory(task.build_model())
        drew = bool(generators.moved(before, generators.marks()))
        return Construction(model=model, drew=drew, whole_because=why, left=left)


def _of_no_values(tensor: torch.Tensor) -> Exception:
    return RuntimeError(f"a meta tensor of shape {list(tensor.shape)} was computed with")


def _is_about_memory(error: BaseException) -> bool:
    """True for what torch says of tensors without memory, also where something else was raised because of it."""
    return any(word in text_of(cause) for cause in causes(error) for word in _WORDS)


def construct_whole(task: Task, seed: int, purpose: str) -> nn.Module:
    """The task's model with memory for its parameters, as its constructor draws them; otherwise as `construct`."""
    with generators.kept(), put_back():
        _seed(seed, purpose)
        return task.build_model()


def _seed(seed: int, purpose: str) -> None:
    number = derive_seed(seed, purpose)
    generators.seed(number, with_torch=False)
    torch.manual_seed(number)  # those of GPUs, too


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within it, every parameter that a module registers goes to the meta device; buffers stay real.

    Modules register through `register_parameter` (a subclass may override it); patched for the duration, one
    thread at a time: generations are built one after another. A parameter that is registered twice stays one.
    """
    original, stand_in = nn.Module.register_parameter, _stand_ins()

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(module, name, param if param is None else stand_in(param))

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]  # restored below
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def without_memory(model: nn.Module) -> nn.Module:
    """The model, its parameters replaced by some on the meta device; those that are tied stay so. Raises TaskError for
    one that has no shape."""
    stand_in = _stand_ins()
    for path, module in model.named_modules():
        for name, param in module._parameters.items():
            if is_lazy(param):
                raise TaskError(
                    f"parameter {name!r} of {path!r} has no shape: it is a lazy module's, which gets one in its first "
                    "forward. Give the module its sizes, or call the model once in build_model."
                )
            if param is not None:
                module._parameters[name] = stand_in(param)
    return model


def _stand_ins() -> Callable[[nn.Parameter], nn.Parameter]:
    """Parameter -> the one on the meta device in its place, each time the same, with its attributes and hooks."""
    on_meta = WeakTensorKeyDictionary()

    def stand_in(param: nn.Parameter) -> nn.Parameter:
        if is_lazy(param) or param.is_meta:  # a lazy one is refused, unless it gets its shape before the model is done
            return param
        if param not in on_meta:
            on_meta[param] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            share(param, on_meta[param])
        found: nn.Parameter = on_meta[param]
        return found

    return stand_in
