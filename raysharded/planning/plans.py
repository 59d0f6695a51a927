"""The plan of a run, for a trainer's task or for a Hugging Face config. Needs torch, and no device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from raysharded.config import BatchConfig, EngineConfig
from raysharded.display.quantities import count
from raysharded.errors import ConfigError, RayshardedError
from raysharded.layout import Mesh
from raysharded.planning.memory.footprint import Setting
from raysharded.planning.models.hf_config import LlamaShape
from raysharded.planning.models.llama import LlamaTask
from raysharded.planning.search import (
    Cluster,
    Option,
    first_weights_shortage,
    option,
    options,
    recommended,
    short_duration,
    why_not,
    why_nothing_fits,
)
from raysharded.planning.trace import Trace, repeat_unit
from raysharded.planning.tracing.measurement import measure
from raysharded.task import Task, require_methods

_SHORT_STEP_S = 0.2
"""Predicted time of a step below which what the model leaves out may be most of it."""
_MEASURED_LAYERS = 3
"""Measured blocks of a model of equal blocks: a first one, one to repeat, and a last one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The result of planning; `problem` is set if nothing fits, or not the requested layout."""

    setting: Setting
    cluster: Cluster
    batch: BatchConfig
    options: Sequence[Option]
    chosen: Option
    """The requested layout, the recommended one, or the one that needs least."""
    reasons: Sequence[str]
    notes: Sequence[str]
    problem: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The plan for JSON; bytes and seconds."""
        return {
            "parameters": self.setting.shapes.num_parameters,
            "units": len(self.setting.shapes.units),
            "global_batch_size": self.batch.global_batch_size,
            "microbatch_size": self.batch.microbatch_size,
            "microbatches": self.setting.num_microbatches,
            "workers": self.cluster.workers,
            "workers_per_node": self.cluster.workers_per_node,
            "tensor_parallel_degree": self.setting.degree,
            "device_limit_bytes": self.cluster.device_limit,
            "host_limit_bytes": self.cluster.host_limit,
            "chosen": _as_dict(self.chosen),
            "layouts": [_as_dict(each) for each in self.options],
            "reasons": list(self.reasons),
            "notes": list(self.notes),
            "problem": self.problem,
        }


def setting_of_task(
    task: Task,
    data: Any,
    batch: BatchConfig,
    engine: EngineConfig,
    *,
    on_gpu: bool,
    checkpoints: bool,
    degree: int = 1,
) -> Setting:
    """Measure a task with the first samples of its data, on no device. `degree`: the tensor parallel degree."""
    require_methods(task, "a plan (`raysharded plan`, ScalingConfig.memory_per_worker)")
    try:
        samples = [data[index] for index in range(min(batch.microbatch_size, len(data)))]
    except RayshardedError:
        raise
    except Exception as error:
        raise ConfigError(f"the data's first samples cannot be read ({type(error).__name__}: {error}).") from error
    if not samples:
        raise ConfigError("the data has no samples; give a dataset that has at least one to plan with.")
    samples = [samples[index % len(samples)] for index in range(batch.microbatch_size)]
    shapes, trace = measure(task, engine, samples, degree=degree)
    return Setting(
        shapes=shapes,
        num_microbatches=batch.num_microbatches,
        engine=engine,
        trace=trace,
        on_gpu=on_gpu,
        spare_snapshot=checkpoints,
        degree=degree,
    )


def setting_of_config(
    shape: LlamaShape, batch: BatchConfig, engine: EngineConfig, *, seq_len: int, on_gpu: bool
) -> Setting:
    """Measure a few blocks of the model that a config describes; the other blocks are equal."""
    few = replace(shape, layers=min(shape.layers, _MEASURED_LAYERS))
    samples = [torch.zeros(seq_len + 1, dtype=torch.int64)] * batch.microbatch_size
    measured, trace = measure(LlamaTask(few, seq_len), engine, samples)
    shapes = shape.model()
    if shape.layers > few.layers:
        trace = repeat_unit(trace, 1, shape.layers - few.layers + 1, _flops_of_block(few, engine, samples, trace))
    return Setting(
        shapes=replace(shapes, buffers=measured.buffers, transient=measured.transient),
        num_microbatches=batch.num_microbatches,
        engine=engine,
        trace=trace,
        on_gpu=on_gpu,
        spare_snapshot=True,
    )


def _flops_of_block(few: LlamaShape, engine: EngineConfig, samples: Sequence[Any], trace: Trace) -> float:
    fewer = replace(few, layers=few.layers - 1)
    length = len(samples[0]) - 1
    return trace.flops - measure(LlamaTask(fewer, length), engine, samples)[1].flops


def make_plan(
    setting: Setting, cluster: Cluster, batch: BatchConfig, *, wanted: Mesh | None = None, builds_whole: bool = False
) -> Plan:
    """Evaluate all layouts of the cluster's workers. `builds_whole`: the task has no `init_weights`."""
    if wanted is not None and wanted.world_size != cluster.workers:
        raise ConfigError(
            f"layout {wanted} is of {count(wanted.world_size, 'worker')}, not of {cluster.workers}: replicas times "
            "shards must be the number of workers."
        )
    found = options(setting, cluster)
    best = recommended(found)
    problem = None
    if wanted is not None:
        chosen = option(setting, cluster, wanted)
        reasons = best[1] if best is not None and best[0].layout == wanted else []
        problem = None if chosen.fits else why_not(setting, cluster, chosen, found)
    elif best is not None:
        chosen, reasons = best
    else:
        chosen, reasons = min(found, key=lambda each: (each.memory.device, each.memory.host)), []
        problem = why_nothing_fits(setting, cluster, found)
    notes = [_assumed(cluster), _left_out(chosen)]
    if builds_whole and (shortage := first_weights_shortage(setting, cluster, chosen.layout)):
        notes.append(shortage)
    return Plan(
        setting=setting,
        cluster=cluster,
        batch=batch,
        options=found,
        chosen=chosen,
        reasons=reasons,
        notes=notes,
        problem=problem,
    )


def _assumed(cluster: Cluster) -> str:
    return (
        f"step times assume {cluster.flops / 1e12:g} TFLOP/s per device, {cluster.node_bandwidth / 1e9:g} GB/s inside "
        f"a node and {cluster.network_bandwidth / 1e9:g} GB/s per worker between nodes"
    )


def _left_out(chosen: Option) -> str:
    """The time that the model does not have. Per step of CPU workers 40 to 90 ms were measured (docs/planning.md)."""
    left_out = (
        "step times are lower bounds: reading samples, the optimizer, snapshots, Python and the messages of every "
        "round are left out"
    )
    if chosen.step_s >= _SHORT_STEP_S:
        return left_out
    return (
        f"{left_out}. Of a step as short as {short_duration(chosen.step_s)} they are most: expect tens of milliseconds "
        "on CPU workers; `status` shows a run's own time"
    )


def _as_dict(each: Option) -> dict[str, Any]:
    memory, traffic = each.memory, each.traffic
    found: Mapping[str, Any] = {
        "layout": str(each.layout),
        "replicas": each.layout.replicas,
        "shards": each.layout.shards,
        "tensor_parallel_degree": each.layout.tensor,
        "fits": each.fits,
        "shortages": list(each.shortages),
        "device_bytes": memory.device,
        "host_bytes": memory.host,
        "node_host_bytes": each.node_host_bytes,
        "memory_bytes": dict(memory.kinds),
        "peak_at": memory.moment,
        "phase_bytes": dict(memory.phases),
        "sent_bytes": dict(traffic.sent),
        "sent_between_nodes_bytes": dict(traffic.between),
        "rounds": each.rounds,
        "idle": each.idle,
        "step_s": each.step_s,
    }
    return dict(found)
