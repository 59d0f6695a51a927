"""A check's requirements, found without any computation, and whether they are available."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raysharded.config import BatchConfig, EngineConfig
from raysharded.display.quantities import count, duration, size
from raysharded.errors import ConfigError, TaskError, text_of
from raysharded.layout import Mesh
from raysharded.preflight.host_memory import host_memory

if TYPE_CHECKING:
    from raysharded.task import Task

WORKERS = 2
RUNS = 3
_HEADROOM = 0.1
_PROCESS_BYTES = 350 << 20
"""Bytes of a worker, of its data reader, or of a building process, before a model exists: most of it torch."""
_STEPS_COMPUTED = 4
"""Computations of each step by the three runs in total: one of them computes each step twice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The report of a process that builds the model without memory."""

    parameters: int
    units: int
    worker_bytes: int
    """Peak host memory of one of two workers, besides the overhead of each process."""
    alone_bytes: int
    """Peak host memory of a single worker."""
    build_bytes: int
    """Memory of a process that builds the model."""
    flops: float
    """Floating-point operations of one microbatch."""
    device_bytes: int = 0
    """Peak memory of each GPU."""
    free_device_bytes: tuple[int, ...] = ()
    """Free memory of each GPU of this machine."""
    unknown: str = ""
    """The reason why activations are not counted; empty if they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """A check's requirements."""

    parameters: int | None
    """None if the model could not be planned; likewise for the other fields."""
    units: int | None
    steps: int
    """Steps of each of the three runs."""
    microbatches: int
    """Microbatches of a step."""
    microbatch_size: int
    samples: int
    """Samples that each run reads for training."""
    data_bytes: int
    """Size of the pickled task and data, which each process receives."""
    host_bytes: int
    """Peak memory of all processes together."""
    available_bytes: int | None
    device_bytes: int = 0
    """Memory of each of two GPUs; 0 on CPUs."""
    estimate_s: float = 0.0
    """Estimated time of the computation, by the planner's assumptions."""
    unknown: str = ""
    """The parts that are not counted, and why."""

    def lines(self) -> list[str]:
        """The requirements as lines for people."""
        model = ""
        if self.parameters is not None and self.units is not None:
            model = f"{self.parameters:,} parameters in {count(self.units, 'unit')}"
        steps = f"{count(self.steps, 'step')} of {count(self.microbatches, 'microbatch', 'microbatches')}"
        memory = f"up to {size(self.host_bytes)} of memory in all processes"
        if self.available_bytes is not None:
            memory += f", {size(self.available_bytes)} available"
        if self.device_bytes:
            memory += f"; {size(self.device_bytes)} of each of {WORKERS} GPUs"
        found = [
            *([model] if model else []),
            f"{RUNS} runs of {steps} of {count(self.microbatch_size, 'sample')}: {count(self.samples, 'sample')} each",
            memory,
        ]
        return [*found, *([self.unknown] if self.unknown else [])]


def shape_of(task: Task, data: Any, batch: BatchConfig, engine: EngineConfig, use_gpu: bool) -> Shape:
    """Plan the task for one worker and for two. Run it in a separate process: it runs the task's code, on no device.

    Raises RayshardedError if the planner fails.
    """
    from raysharded.planning.memory.footprint import first_weights_bytes, worker_memory

    setting, unknown = _setting(task, data, batch, engine, use_gpu)
    meshes = [Mesh(shards=workers) for workers in (1, WORKERS)]
    memories = [worker_memory(setting, mesh) for mesh in meshes]
    hosts = [memory.host for memory in memories]
    whole = setting.shapes.size_bytes + setting.shapes.buffer_bytes
    if task.init_weights is None:
        first = [first_weights_bytes(setting, mesh) for mesh in meshes]
        hosts = [sum(pair) for pair in zip(hosts, first, strict=True)]  # freed memory is kept for later allocations
    return Shape(
        parameters=setting.shapes.num_parameters,
        units=len(setting.shapes.units),
        worker_bytes=hosts[1],
        alone_bytes=hosts[0],
        build_bytes=whole if _is_built_whole(task) else setting.shapes.buffer_bytes,
        flops=setting.trace.flops if setting.trace else 0.0,
        device_bytes=max(memory.device for memory in memories) if use_gpu else 0,
        free_device_bytes=_free_device_bytes() if use_gpu else (),
        unknown=unknown,
    )


def _setting(task: Task, data: Any, batch: BatchConfig, engine: EngineConfig, use_gpu: bool) -> tuple[Any, str]:
    from raysharded.planning.memory.footprint import Setting
    from raysharded.planning.plans import setting_of_task
    from raysharded.planning.tracing.measurement import FakeModel

    try:
        return setting_of_task(task, data, batch, engine, on_gpu=use_gpu, checkpoints=False), ""
    except TaskError as error:
        reason = " ".join(text_of(error).split())
    shapes = FakeModel(task, engine).shapes()
    setting = Setting(shapes=shapes, num_microbatches=batch.num_microbatches, engine=engine, on_gpu=use_gpu)
    return setting, f"activations are not counted: {reason}"


def require_gpus() -> None:
    """Raise ConfigError, with the way out, if this process can use no GPU."""
    from raysharded.actors.device.accelerator import accelerator

    if why := accelerator().why_unusable():
        raise ConfigError(
            f"the trainer has ScalingConfig(use_gpu=True), and the check can use no GPU here: {why}. To check it on "
            "CPUs: --device cpu, or check(device='cpu')."
        )


def _is_built_whole(task: Task) -> bool:
    from raysharded.actors.model.construction import construct

    return bool(construct(task, 0).whole_because)


def _free_device_bytes() -> tuple[int, ...]:
    from raysharded.actors.device.accelerator import accelerator

    return accelerator().free_bytes()


def needs_of(
    shape: Shape | None, batch: BatchConfig, *, steps: int, data_bytes: int, threads: int, unknown: str = ""
) -> Needs:
    """The requirements of the three runs. `shape`: None if the model could not be planned."""
    per_process = _PROCESS_BYTES + data_bytes
    alone = together = build = flops = 0
    if shape is not None:
        alone, together, build, flops = shape.alone_bytes, shape.worker_bytes, shape.build_bytes, int(shape.flops)
    runs = max(alone + 2 * per_process, WORKERS * (together + 2 * per_process))  # with the processes of their data
    host = per_process + max(runs, WORKERS * (build + per_process))
    return Needs(
        parameters=None if shape is None else shape.parameters,
        units=None if shape is None else shape.units,
        steps=steps,
        microbatches=batch.num_microbatches,
        microbatch_size=batch.microbatch_size,
        samples=steps * batch.global_batch_size,
        data_bytes=data_bytes,
        host_bytes=host,
        available_bytes=host_memory().available,
        device_bytes=0 if shape is None else shape.device_bytes,
        estimate_s=_estimate_s(
            flops, batch.num_microbatches * steps, threads, on_gpu=bool(shape and shape.device_bytes)
        ),
        unknown=unknown or (shape.unknown if shape else ""),
    )


def _estimate_s(flops: float, microbatches: int, threads: int, *, on_gpu: bool) -> float:
    from raysharded.planning.search import CPU_SPEEDS, Cluster

    speed = Cluster(workers=1).flops if on_gpu else CPU_SPEEDS["flops"] * threads
    return _STEPS_COMPUTED * microbatches * flops / speed


def require_room(needs: Needs, free_device_bytes: tuple[int, ...] | None, *, timeout_s: float) -> None:
    """Raise ConfigError, with the numbers and the remedy, for a check that does not fit. `free_device_bytes`: free
    memory of each GPU; None: on CPUs, or unknown."""
    smaller = (
        "Give settings of a smaller model, as arguments of the function that makes the trainer or with --config; or a "
        "smaller batch.microbatch_size"
    )
    room = needs.available_bytes
    if room is not None and needs.host_bytes > room * (1 - _HEADROOM):
        raise ConfigError(
            f"the check needs up to {size(needs.host_bytes)} of memory for {WORKERS} workers and the processes that "
            f"build and read for them, and {size(room)} is available, of which a tenth stays free. {smaller}."
        )
    if free_device_bytes is not None and len(free_device_bytes) < WORKERS:
        raise ConfigError(
            f"the check needs {WORKERS} GPUs, one for each worker, and finds {len(free_device_bytes)}. Try the trainer "
            "on CPUs: --device cpu, or check(device='cpu')."
        )
    least = min((free_device_bytes or ())[:WORKERS], default=0)
    if free_device_bytes is not None and needs.device_bytes > least * (1 - _HEADROOM):
        raise ConfigError(
            f"the check needs {size(needs.device_bytes)} of each of {WORKERS} GPUs, and {size(least)} is free, of "
            f"which a tenth stays free. {smaller}, or test it on CPUs: --device cpu, or check(device='cpu')."
        )
    if needs.estimate_s > timeout_s:
        raise ConfigError(
            f"the check would compute for about {duration(needs.estimate_s)}, and has {duration(timeout_s)}. {smaller}"
            "; or fewer --steps, or a longer --timeout."
        )
