"""A plan as tables for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raysharded.display.quantities import count, size
from raysharded.planning.memory.footprint import HOST_KINDS, KINDS
from raysharded.planning.plans import Plan
from raysharded.planning.search import short_duration
from raysharded.planning.traffic.worker_traffic import KINDS as LINKS
from raysharded.report.history.row_table import RowTable
from raysharded.report.history.tables import DIM, facts_table, verdict

_WHAT = {
    "parameters": "this worker's part",
    "gradients": "this worker's part",
    "optimizer": "its state for that part",
    "accumulators": "partial sums of the step's gradient",
    "activations": "of one microbatch, with whole gradients of one unit",
    "gathered": "whole parameters of units in use, and the all-gather's buffers",
    "exchange": "gradients on their way",
    "buffers": "the model's buffers",
    "communicators": "NCCL's buffers, an estimate",
    "snapshots": "this worker's state at finished steps",
    "mirrors": "other workers' state, or parity of it",
}
_LINK = {
    "all_gather": "parameters",
    "reduction": "gradients inside the shard group",
    "replicas": "partial sums between replicas",
    "tensor": "activations and their gradients inside the tensor parallel group",
    "mirror": "the snapshot",
    "agreement": "one small sum over all workers",
}
_MOST_ROWS = 16


def show(plan: Plan, out: Console) -> None:
    """Print the plan."""
    out.print(_facts(plan))
    out.print()
    out.print(_memory(plan))
    out.print()
    out.print(_traffic(plan))
    out.print()
    out.print(_layouts(plan))
    for title, lines in (("because", plan.reasons), ("note", plan.notes)):
        for line in lines:
            out.print(Text.assemble((f"{title}: ", DIM), line))


def _facts(plan: Plan) -> Table:
    shapes, cluster, setting = plan.setting.shapes, plan.cluster, plan.setting
    table = facts_table()
    table.add_row("model", f"{shapes.num_parameters:,} parameters in {count(len(shapes.units), 'unit')}")
    engine = setting.engine
    settings = [f"{engine.accumulation} accumulation", f"computes in {engine.param_dtype or 'the parameters dtype'}"]
    if engine.activation_checkpointing:
        settings.append("activation checkpointing")
    table.add_row("engine", ", ".join(settings))
    batch = plan.batch
    table.add_row(
        "batch",
        f"{count(batch.global_batch_size, 'sample')} in {count(setting.num_microbatches, 'microbatch', 'microbatches')}"
        f" of {batch.microbatch_size}",
    )
    limits = [f"{count(cluster.workers, 'worker')}, {cluster.workers_per_node} per node"]
    if cluster.device_memory is not None:
        limits.append(f"{size(cluster.device_memory)} per device")
    if cluster.host_memory is not None:
        limits.append(f"{size(cluster.host_memory)} per node's host")
    table.add_row("cluster", ", ".join(limits))
    chosen = plan.chosen
    layout = chosen.layout
    name = f"{layout}: {count(layout.replicas, 'replica')} of {count(layout.data.shards, 'shard')}"
    if layout.tensor > 1:
        name += f", tensor parallel degree {layout.tensor}"
    table.add_row("layout", verdict(good=chosen.fits, text=f"{name}, {'fits' if chosen.fits else 'does not fit'}"))
    return table


def _table(first: str, *numbers: str) -> RowTable:
    table = RowTable()
    table.add_column(first)
    for name in numbers:
        table.add_column(name, right=True)
    return table


def _memory(plan: Plan) -> RowTable:
    memory = plan.chosen.memory
    table = _table("memory of a worker", "bytes")
    table.add_column(style=DIM, long="wrap")
    for kind in KINDS:
        if memory.kinds[kind]:
            where = "host: " if memory.on_gpu and kind in HOST_KINDS else ""
            table.add_row(kind, size(memory.kinds[kind]), where + _WHAT[kind])
    if memory.on_gpu:
        table.add_row("device, at most", size(memory.device), f"in: {memory.moment}")
        table.add_row("host", size(memory.host), f"{size(plan.chosen.node_host_bytes)} per node")
    else:
        table.add_row("at most", size(memory.total), f"in: {memory.moment}")
    for phase, most in memory.phases.items():
        table.add_row(f"in {phase}", size(most), "device, at most" if memory.on_gpu else "at most")
    return table


def _traffic(plan: Plan) -> RowTable:
    traffic = plan.chosen.traffic
    table = _table("sent by a worker in a step", "bytes", "to other nodes")
    table.add_column(style=DIM, long="wrap")
    for kind in LINKS:
        if traffic.sent[kind]:
            table.add_row(kind.replace("_", "-"), size(traffic.sent[kind]), size(traffic.between[kind]), _LINK[kind])
    table.add_row("together", size(traffic.total), size(traffic.total_between))
    return table


def _layouts(plan: Plan) -> RowTable:
    table = RowTable()
    table.add_column("layout")
    for name, rank in (("device", 0), ("host per node", 1), ("sent", 2), ("to other nodes", 3), ("rounds", 5)):
        table.add_column(name, right=True, rank=rank)
    for name, rank in (("idle", 4), ("step, at least", 0), ("fits", 0)):
        table.add_column(name, right=True, rank=rank)
    for each in plan.options[:_MOST_ROWS]:
        chosen = " *" if each.layout == plan.chosen.layout else ""
        table.add_row(
            f"{each.layout}{chosen}",
            size(each.memory.device),
            size(each.node_host_bytes),
            size(each.traffic.total),
            size(each.traffic.total_between),
            str(each.rounds),
            f"{each.idle:.0%}",
            short_duration(each.step_s),
            verdict(good=each.fits, text="yes" if each.fits else "no"),
        )
    return table
