"""Measurement of a task for the planner: its units, its optimizer's state, and the memory of one microbatch.

Nothing is allocated and no device is needed. The model is built on no device; forward and backward run on torch's fake
tensors, which have shapes and no values (torch._subclasses.fake_tensor). Only the optimizer is run, on a few numbers.

Floating-point operations are counted by torch's formulas, but without its `FlopCounterMode`. That mode also follows
modules, and so keeps tensors alive for longer than a training step does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate
from torch.utils.flop_counter import flop_registry

from raysharded.actors.model.build import DTYPES, build_on_meta, find_units, strategies_of
from raysharded.actors.model.construction import construct
from raysharded.actors.model.modes import Modes
from raysharded.actors.model.sharded_model import clean_name
from raysharded.actors.model.tensor_parallel import parallelize
from raysharded.actors.shards.device_state import dtype_name
from raysharded.actors.step.forward_backward import as_loss
from raysharded.actors.task_calls.process_state import put_back
from raysharded.config import EngineConfig
from raysharded.errors import RayshardedError, TaskError, user_traceback
from raysharded.planning.models.shapes import BufferShape, ModelShapes, ParameterShape, UnitShape
from raysharded.planning.trace import Phase, Trace
from raysharded.planning.tracing.optimizer_probe import kept_by, transient_of
from raysharded.planning.tracing.phase_cuts import PhaseRecorder
from raysharded.planning.tracing.tensor_axis import CollectiveCount, is_of_dtensors, like_parameter, tensor_mesh
from raysharded.planning.tracing.tensor_lifetimes import MemoryFollower
from raysharded.task import Task, has_tensor_parallelism

_aten = torch.ops.aten
_AS = {  # the attention of CPUs has no separate formula
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}


class FlopCount(TorchDispatchMode):
    """Counts operations in `total` while it is entered, on real and fake tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_of_dtensors(types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        formula = flop_registry.get(_AS.get(packet, packet))
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=result)
        return result


_CPU = torch.device("cpu")


class FakeModel:
    """A task's model with its units, on fake tensors; parameters in forward's compute dtype.

    `mesh`: the tensor parallel group, whose first worker this process is; None for a task without tensor parallelism.
    """

    def __init__(self, task: Task, engine: EngineConfig, mesh: DeviceMesh | None = None) -> None:
        self.task, self.engine = task, engine
        self.degree = 1 if mesh is None else mesh.size()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.model = build_on_meta(task, engine, 0).model
        self._tensor_dims = _tensor_dims(task, self.model, mesh)
        self._modes = Modes(self.model)
        blocks = find_units(task, engine, self.model)
        self._strategies = strategies_of(task, engine, self.model, blocks)
        self.units = _by_forward(self.model, blocks)
        """The blocks that are units, and the model itself, the root, last."""

    def shapes(self) -> ModelShapes:
        """Units in the order of the model's modules, with the optimizer's state of each parameter."""
        with _faked(self.model, self.mode, None), put_back():
            return self._shapes(self.task.build_optimizer(self.model))

    def _shapes(self, optimizer: torch.optim.Optimizer) -> ModelShapes:
        slots = kept_by(optimizer)
        names = {id(param): clean_name(name) for name, param in self.model.named_parameters()}
        held: set[int] = set()
        units = []
        for module in self.units:
            params = []
            inner = {
                id(p) for m in self.units if m is not module and m in set(module.modules()) for p in m.parameters()
            }
            for param in module.parameters():
                if id(param) in held or id(param) in inner:
                    continue
                held.add(id(param))
                params.append(
                    ParameterShape(
                        name=names[id(param)],
                        shape=tuple(param.shape),
                        dtype=dtype_name(param.dtype),
                        trainable=param.requires_grad,
                        slots=slots.get(id(param), ()),
                        tensor_dim=self._tensor_dims.get(names[id(param)]),
                    )
                )
            strategy = self._strategies.get(module)
            units.append(UnitShape(name=self._name_of(module), parameters=tuple(params), strategy=strategy))
        return ModelShapes(units=tuple(units), buffers=tuple(_buffers(self.model)), transient=transient_of(optimizer))

    def _name_of(self, module: nn.Module) -> str:
        return next(clean_name(name) for name, found in self.model.named_modules() if found is module)

    def trace(self, samples: Sequence[Any]) -> Trace:
        """Forward and backward of the task's loss of one microbatch.

        Raises TaskError if the task does, or if its loss reads tensor values, which do not exist.
        """
        where = f"{type(self.task).__name__}.loss"
        batch = tree_map_only(torch.Tensor, self.mode.from_tensor, _collated(self.task, samples))
        compute = DTYPES.get(str(self.engine.param_dtype))
        with (
            torch.random.fork_rng(devices=[]),
            _faked(self.model, self.mode, compute),
            self.mode,
            FlopCount() as counter,
            CollectiveCount(self.degree) as collectives,
            MemoryFollower() as follower,
        ):
            follower.ignore([*self.model.parameters(), *self.model.buffers()])
            follower.follow(batch)
            recorder = PhaseRecorder(self.units, follower, compute_dtype=compute)
            self._modes.train()
            try:
                loss = as_loss(self.task.loss(self.model, batch), len(samples), where)
                recorder.begin_backward()
                torch.autograd.backward(loss.total)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise TaskError(
                    f"{where} reads the values of tensors ({error}), which do not exist before a run: its memory "
                    "cannot be planned. Skip such code while torch.compiler.is_compiling(), or plan without it.",
                    user_traceback(error),
                ) from error
            except RayshardedError:
                raise
            except Exception as error:
                text = user_traceback(error)
                raise TaskError(f"{where} raised {type(error).__name__}: {error}", text) from error
            finally:
                recorder.close()
            phases: tuple[Phase, ...] = recorder.phases
        return Trace(phases=phases, flops=float(counter.total), tensor_bytes=collectives.sent)


def measure(task: Task, engine: EngineConfig, samples: Sequence[Any], *, degree: int = 1) -> tuple[ModelShapes, Trace]:
    """(shapes, trace of one microbatch of these samples by the first worker of a tensor parallel group of `degree`). No
    device is needed and nothing is computed.

    Raises ConfigError for a degree that the task does not allow, and for a task with `parallelize` in a process that
    has torch.distributed groups.
    """
    is_cut = degree > 1 or has_tensor_parallelism(task)
    with tensor_mesh(degree) if is_cut else nullcontext() as mesh:
        fake = FakeModel(task, engine, mesh)
        if degree > 1:  # DTensor first runs each operation on tensors of the whole shape, which is not part of a step
            fake.trace(samples)
        return fake.shapes(), fake.trace(samples)


def _tensor_dims(task: Task, model: nn.Module, mesh: DeviceMesh | None) -> dict[str, int]:
    """Apply the task's parallel styles: parameter -> the dimension that is sharded, at this or a higher degree."""
    if mesh is None:
        return {}
    if mesh.size() > 1:
        return parallelize(task, model, mesh)
    return parallelize(task, construct(task, 0).model, mesh)


def _collated(task: Task, samples: Sequence[Any]) -> Any:
    try:
        return (task.collate or default_collate)(list(samples))
    except Exception as error:
        raise TaskError(f"collating a batch raised {type(error).__name__}: {error}", user_traceback(error)) from error


def _by_forward(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    chosen = set(blocks)
    return [module for module in model.modules() if module in chosen] + [model]


def _buffers(model: nn.Module) -> Iterator[BufferShape]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            yield BufferShape(
                name=clean_name(f"{prefix}.{name}" if prefix else name),
                shape=tuple(buffer.shape),
                dtype=dtype_name(buffer.dtype),
                persistent=name not in module._non_persistent_buffers_set,
                item_bytes=buffer.itemsize,
            )


@contextmanager
def _faked(model: nn.Module, mode: FakeTensorMode, compute: torch.dtype | None) -> Iterator[None]:
    """A context in which the model's parameters and buffers are fake tensors on the CPU; shared ones stay shared.

    `compute`: the parameters' dtype; None: unchanged.
    """
    kept: list[tuple[dict[str, Any], str, Any]] = []
    made: dict[int, nn.Parameter] = {}

    def fake(param: nn.Parameter) -> nn.Parameter:
        dtype = compute if compute is not None and param.is_floating_point() else param.dtype
        return like_parameter(param, dtype)

    with mode:
        for module in model.modules():
            for name, param in module._parameters.items():
                if param is not None:
                    kept.append((module._parameters, name, param))
                    if id(param) not in made:
                        made[id(param)] = fake(param)
                    module._parameters[name] = made[id(param)]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    kept.append((module._buffers, name, buffer))
                    module._buffers[name] = torch.empty_like(buffer, device=_CPU)
    try:
        yield
    finally:
        for where, name, value in kept:
            where[name] = value
