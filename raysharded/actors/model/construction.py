"""Models as a task's `build_model` makes them: parameters without memory, random draws a function of a seed.

Parameters go to the meta device as modules register them, so that a model larger than one worker's memory can be built.
Buffers and all other values that a constructor computes are real. Some constructors need values of their parameters:
they call `item`, set `data`, or resize embeddings by their mean. These are called a second time with memory for all
parameters, which is freed afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from raysharded.actors.device.accelerator import seed_without_a_driver
from raysharded.actors.model.meta_watch import MemoryWatch
from raysharded.actors.model.parameter_marks import share
from raysharded.actors.task_calls.process_state import Left, put_back
from raysharded.data.access import generators
from raysharded.display.plain_text import brief
from raysharded.errors import RayshardedError, TaskError, causes, text_of
from raysharded.ids import derive_seed
from raysharded.task import Task

_MEBI = 1 << 20
_WORDS = (
    *("meta tensor", "Meta tensor", "meta device", "device meta", "'meta'", "'Meta'", "Meta kernel", "register_meta"),
    *("set_data", "no data!"),
)
"""Parts of torch's error messages about tensors on the meta device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Construction:
    """A model with its parameters on the meta device, and facts about its construction."""

    model: nn.Module
    drew: bool = False
    """True if the constructor moved one of the process's generators."""
    whole_because: str = ""
    """Torch's reason why the model was first built with memory for its parameters; empty if it was not."""
    left: Left = field(default_factory=Left)
    """The process's settings that the constructor left changed, and that were put back."""

    def remarks(self, task: Task) -> dict[str, str]:
        """Subject -> the sentence that a user should read once."""
        if not self.whole_because:
            return {}
        size = sum(param.numel() * param.element_size() for param in self.model.parameters()) / _MEBI
        name = f"{type(task).__name__}.build_model"
        return {
            name: f"{name} needs values of its parameters while it runs ({self.whole_because}): whenever workers join "
            f"or leave, each worker temporarily builds the whole model in its memory, {size:.0f} MiB of parameters. "
            "Give parameters their values in Task.init_weights where that is too much."
        }


def construct(task: Task, seed: int, purpose: str = "build") -> Construction:
    """The task's model with parameters on the meta device; the process's generators and settings are put back.

    Draws are a function of `seed` and `purpose`. Raises the error that `build_model` raises with real parameters.
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
            if not _is_about_memory(error):  # building a large model whole could use up the machine's memory
                raise
            why = f"{type(error).__name__}: {brief(text_of(error).partition(chr(10))[0], 200)}"
            _seed(seed, purpose)
            with put_back() as left:
                model = without_memory(task.build_model())
        drew = bool(generators.moved(before, generators.marks()))
        return Construction(model=model, drew=drew, whole_because=why, left=left)


def _of_no_values(tensor: torch.Tensor) -> Exception:
    return RuntimeError(f"a meta tensor of shape {list(tensor.shape)} was computed with")


def _is_about_memory(error: BaseException) -> bool:
    """True for torch's errors about tensors without memory, also as the cause of another error."""
    return any(word in text_of(cause) for cause in causes(error) for word in _WORDS)


def construct_whole(task: Task, seed: int, purpose: str) -> nn.Module:
    """The task's model with parameters in memory, as the constructor draws them; otherwise as `construct`."""
    with generators.kept(), put_back():
        _seed(seed, purpose)
        return task.build_model()


def _seed(seed: int, purpose: str) -> None:
    number = derive_seed(seed, purpose)
    generators.seed(number, with_torch=False)
    seed_without_a_driver(number)


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """A context in which every parameter that a module registers goes to the meta device; buffers stay real.

    Patches `register_parameter`, which modules use and a subclass may override. One thread at a time: generations are
    built one after another. A parameter that is registered twice stays one.
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
    """The model with its parameters moved to the meta device; tied ones stay tied.

    Raises TaskError for a parameter without a shape.
    """
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
    """Function from a parameter to its single stand-in on the meta device, with its attributes and hooks."""
    on_meta = WeakTensorKeyDictionary()

    def stand_in(param: nn.Parameter) -> nn.Parameter:
        if is_lazy(param) or param.is_meta:  # a lazy one is refused unless it gets a shape before the model is done
            return param
        if param not in on_meta:
            on_meta[param] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            share(param, on_meta[param])
        found: nn.Parameter = on_meta[param]
        return found

    return stand_in
