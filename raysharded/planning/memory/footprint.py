"""Bytes of one worker by kind, for a layout. Pure, and fast enough for a policy that evaluates thousands of layouts.

Counts the tensors that `actors` allocates: see docs/planning.md. A worker's device holds all but snapshots and mirrors.
Those are in host memory, which on CPU workers is the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from raysharded.actors.numerics.norm_blocks import BLOCK, DIGEST_BLOCK, DIGEST_BYTES, SMALL, num_folds, row_length
from raysharded.config import EngineConfig
from raysharded.errors import ConfigError
from raysharded.layout import Mesh, Parity, parity_of
from raysharded.layout.parity import block_bytes
from raysharded.layout.reshard.plan import has_mirrors, mirror_of
from raysharded.layout.sharding import shard_map
from raysharded.planning.memory.partial_sums import Round, Within, rounds_of, rounds_per_step
from raysharded.planning.memory.timeline import Moments, moments_of
from raysharded.planning.memory.units import UnitBytes, kept_units, unit_bytes
from raysharded.planning.models.shapes import ModelShapes
from raysharded.planning.trace import Trace, empty_trace

KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "accumulators",
    "activations",
    "gathered",
    "exchange",
    "buffers",
    "communicators",
    "snapshots",
    "mirrors",
)
"""Kinds of memory. gathered: whole parameters and the all-gather's buffers. exchange: gradients in transfer and the
reducer's buffers. activations: including whole gradients of the current unit. accumulators: partial sums of the step's
gradient. mirrors: or parity blocks. communicators: NCCL's buffers, which depend on the nodes; `nccl_buffers` adds
them."""
HOST_KINDS = ("snapshots", "mirrors")
PHASES = ("forward", "backward", "the gradient's norm", "the optimizer's step")
"""Phases of a step. Backward includes the reduction of gradients."""
_SQUARE_BYTES = 8  # a float64
_DIGIT_BYTES = 24  # a float64 and two int64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Setting:
    """Inputs of the plan that do not depend on the layout."""

    shapes: ModelShapes
    num_microbatches: int
    engine: EngineConfig = field(default_factory=EngineConfig)
    trace: Trace | None = None
    """Trace of one microbatch; None: no activations."""
    on_gpu: bool = False
    spare_snapshot: bool = False
    """Whether checkpoints are written in the background, which may need one more snapshot."""
    degree: int = 1
    """Tensor parallel degree with which the trace was measured: only meshes with this degree can be planned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerMemory:
    """Memory of the worker that needs most: one that holds first chunks."""

    kinds: Mapping[str, int]
    """Kind -> bytes at the device's peak."""
    moment: str
    """The moment of the peak."""
    on_gpu: bool
    phases: Mapping[str, int] = field(default_factory=dict)
    """Phase of a step -> peak bytes on the device; on a CPU worker, with those of the host."""

    @property
    def host(self) -> int:
        """Bytes in host memory; on a CPU worker all bytes."""
        return sum(self.kinds[kind] for kind in HOST_KINDS) if self.on_gpu else self.total

    @property
    def device(self) -> int:
        """Peak bytes on the device; on a CPU worker the same memory as the host's."""
        return self.total - self.host if self.on_gpu else self.total

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


def worker_memory(
    setting: Setting, layout: Mesh, *, rank: int | None = None, workers_per_node: int = 1
) -> WorkerMemory:
    """Memory of one worker while it trains; `rank`: in the mesh, None for the worker that needs most.
    `workers_per_node`: if they are several, gradients are added inside nodes first.

    Holds for a step after the first few, when all snapshots exist. A step's memory besides the state is that of the
    busiest worker, for any `rank`. Law: the peak does not grow with `layout.shards`, except for padding. Raises
    ConfigError for a mesh whose tensor parallel degree differs from the setting's.
    """
    require_degree(setting, layout)
    if rank is None:
        ranks = {0, layout.apart % layout.shards}
        found = (worker_memory(setting, layout, rank=r, workers_per_node=workers_per_node) for r in ranks)
        return max(found, key=lambda memory: memory.total)
    steady = _steady(setting, layout, layout.shard_of(rank))
    peaks = _peaks(local_setting(setting, 0), layout.data, max(1, workers_per_node // layout.tensor))
    highest = max(peaks.values(), key=lambda peak: peak.size)
    held = sum(size for kind, size in steady.items() if not (setting.on_gpu and kind in HOST_KINDS))
    return WorkerMemory(
        kinds={kind: steady.get(kind, 0) + highest.kinds.get(kind, 0) for kind in KINDS},
        moment=highest.moment,
        on_gpu=setting.on_gpu,
        phases={phase: held + peaks[phase].size for phase in PHASES if phase in peaks},
    )


def require_degree(setting: Setting, layout: Mesh) -> None:
    """Raise ConfigError for a mesh whose tensor parallel degree differs from the setting's."""
    if layout.tensor != setting.degree:
        raise ConfigError(
            f"layout {layout} has a tensor parallel degree of {layout.tensor}, but the model was measured with "
            f"{setting.degree}; measure it with the same."
        )


@lru_cache(maxsize=64)
def local_setting(setting: Setting, tensor_rank: int) -> Setting:
    """The setting as FSDP2 sees it on one worker of each tensor parallel group: with that worker's parts of the
    parameters, laid out over `Mesh.data`."""
    if setting.degree == 1:
        return setting
    return replace(setting, shapes=setting.shapes.local(setting.degree, tensor_rank), degree=1)


def snapshot_bytes(shapes: ModelShapes, shards: int, rank: int, degree: int = 1) -> int:
    """Bytes of one host copy of a shard at a tensor parallel degree: pieces at multiples of 64 bytes."""
    return shard_map(shapes.state_at(degree), shards, rank, degree).size_bytes


def optimizer_bytes(shapes: ModelShapes, shards: int, rank: int) -> int:
    """Bytes of the optimizer's tensors for a shard; without FSDP2's padding."""
    c = shapes.columns
    return int((c.held(shards, rank) * c.state_per_element + c.state_once).sum())


def first_weights_bytes(setting: Setting, layout: Mesh) -> int:
    """Host memory while a task without `init_weights` draws its first weights: the whole model on every worker."""
    shapes, data_shards = setting.shapes, layout.data.shards
    share = sum(
        p.size_bytes if p.name in shapes.replicated else -(-p.size_bytes // data_shards)
        for p in local_setting(setting, 0).shapes.parameters
    )
    copies = 1 + _has_mirror(setting, layout)
    on_device = 0 if setting.on_gpu else share
    return shapes.size_bytes + shapes.buffer_bytes + copies * share + on_device


def _has_mirror(setting: Setting, layout: Mesh) -> bool:
    return setting.engine.mirrors and has_mirrors(layout) and parity_for(setting, layout) is None


def parity_for(setting: Setting, layout: Mesh) -> Parity | None:
    """Parity that takes the place of mirrors in this layout; None if there is none, or if workers are too few."""
    parity = parity_of(setting.engine.redundancy, layout.tensor, layout.apart)
    return parity if parity is not None and parity.protects(layout) else None


def parity_block_bytes(setting: Setting, layout: Mesh, parity: Parity) -> int:
    """Bytes of one parity block."""
    return block_bytes(setting.shapes.state_at(layout.tensor), layout.shards, parity, layout.tensor)


def _steady(setting: Setting, layout: Mesh, shard: int) -> dict[str, int]:
    shapes, data = setting.shapes, layout.data
    local = local_setting(setting, layout.tensor_of(shard)).shapes

    def snapshot(of: int) -> int:
        return snapshot_bytes(shapes, layout.shards, of, layout.tensor)

    held = snapshot(mirror_of(shard, layout.shards, layout.apart)) if _has_mirror(setting, layout) else 0
    if (parity := parity_for(setting, layout)) is not None:
        held = parity.m * parity_block_bytes(setting, layout, parity)
    return {
        "parameters": int(_units(local, setting.engine, data.shards).shard.sum()),
        "optimizer": optimizer_bytes(local, data.shards, layout.data_rank_of(shard)),
        "buffers": shapes.buffer_bytes,
        "snapshots": (2 + setting.spare_snapshot) * snapshot(shard),
        "mirrors": 2 * held,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Peak:
    """The peak of one phase of a step."""

    moment: str
    kinds: Mapping[str, int]
    """Kind -> bytes beyond the steady ones."""

    @property
    def size(self) -> int:
        return sum(self.kinds.values())


def _peaks(setting: Setting, layout: Mesh, per_node: int) -> dict[str, _Peak]:
    """Phase -> its peak. `per_node`: data shards of one node."""
    view = _View(setting, layout)
    always = _always(setting, layout, view.units)
    found = [
        peak for cut, whole in _rounds(setting, layout, view.units, per_node) for peak in view.worst(cut, whole, always)
    ]
    peaks: dict[str, _Peak] = {}
    for phase, peak in [*found, *_after_backward(setting, layout, view)]:
        if phase not in peaks or peak.size > peaks[phase].size:
            peaks[phase] = peak
    return peaks


def _keeps_whole_sums(engine: EngineConfig, shards: int) -> bool:
    """True if each worker keeps sums of whole gradients until the last round."""
    return engine.accumulation == "local" and shards > 1


def _rounds(setting: Setting, layout: Mesh, units: UnitBytes, per_node: int) -> set[tuple[Round, Round]]:
    """The distinct rounds of all workers, as (of sharded units, of replicated units)."""
    if setting.engine.reduction == "fast":
        received = 0 if setting.on_gpu or layout.data.shards == 1 else layout.data.shards
        of_cut, of_whole = (Round(before=0, after=0, moments=(Within(sums=0, chunks=n),)) for n in (received, 0))
        return {(of_cut, of_whole)}
    mode, has_whole = setting.engine.accumulation, bool(units.is_replicated.any())
    copied = units.sums_are_copies or (layout.shards == 1 and units.is_cast_back)
    copied_whole = units.sums_are_copies or units.is_cast_back
    found: set[tuple[Round, Round]] = set()
    for rank in range(0, layout.world_size, 1 if has_whole or mode == "local" else layout.shards):
        cut = rounds_of(layout, setting.num_microbatches, mode, copied, rank, per_node=per_node)
        whole = rounds_of(layout, setting.num_microbatches, mode, copied_whole, rank, True) if has_whole else cut
        found.update(zip(cut, whole, strict=True))
    return found


def _always(setting: Setting, layout: Mesh, units: UnitBytes) -> dict[str, int]:
    """Memory that the backend's reduction keeps from round to round: FSDP2 accumulates."""
    if setting.engine.reduction == "exact" or rounds_per_step(layout, setting.num_microbatches) == 1:
        return {}
    if setting.engine.accumulation == "local":
        return {"exchange": int(units.reduce_input.sum())}
    return {"gradients": int(units.gradient.sum())}


class _View:
    """The moments of a round, as arrays, for one layout."""

    def __init__(self, setting: Setting, layout: Mesh) -> None:
        shapes, engine, shards = setting.shapes, setting.engine, layout.shards
        self.units = _units(shapes, engine, shards)
        self._whole_sums = _keeps_whole_sums(engine, shards)
        self._moments = m = _moments(shapes, engine, setting.trace, shards)
        self._names = [*(unit.name or "the root" for unit in shapes.units), "the loss"]
        self._is_whole = self.units.is_replicated[m.unit]
        holders = np.where(self._is_whole, layout.world_size, layout.replicas)
        self._is_uneven = (self.units.sum_numel[m.unit] % holders != 0).astype(np.int64)
        self._shard_sum = np.where(m.own > 0, self.units.sum_chunk[m.unit], 0)

    def worst(self, cut: Round, whole: Round, always: dict[str, int]) -> list[tuple[str, _Peak]]:
        """(phase, peak) of the round's forward and backward. `whole`: the round of units that are replicated."""
        m = self._moments
        aliased = 0 if self._whole_sums else cut.aliased
        carried = (cut.after - aliased) * m.done + cut.before * m.rest
        carried = carried + (whole.after - whole.aliased) * m.done_whole + whole.before * m.rest_whole
        exchange = m.exchange - m.retained * (cut.aliased if self._whole_sums else 0)
        gradients = np.maximum(m.gradients, always.get("gradients", 0))
        fixed = m.activations + m.gathered + exchange + gradients + carried
        kinds_of_units = [(cut, ~self._is_whole), (whole, self._is_whole)] if self._is_whole.any() else [(cut, True)]
        totals = [
            (within, np.where(of_kind, fixed + within.sums * m.own + self._exchanged(within), -1))
            for each, of_kind in kinds_of_units
            for within in each.moments
        ]
        found = []
        for phase, span in (("forward", slice(m.num_forward)), ("backward", slice(m.num_forward, None))):
            if not len(m.unit[span]):
                continue
            most, total = max(totals, key=lambda each: each[1][span].max())
            place = (span.start or 0) + int(total[span].argmax())
            what, unit = m.labels[place]
            kinds = {
                "activations": int(m.activations[place]),
                "gathered": int(m.gathered[place]),
                "exchange": int(exchange[place] + self._exchanged(most)[place]) + always.get("exchange", 0),
                "gradients": int(gradients[place]),
                "accumulators": int(carried[place] + most.sums * m.own[place]),
            }
            found.append((phase, _Peak(moment=f"{what} {self._names[unit]}", kinds=kinds)))
        return found

    def _exchanged(self, within: Within) -> NDArray[np.float64]:
        shards = within.exchanged + within.filled * self._is_uneven
        found: NDArray[np.float64] = shards * self._shard_sum + within.chunks * self._moments.arriving
        return found


@lru_cache(maxsize=1024)
def _units(shapes: ModelShapes, engine: EngineConfig, shards: int) -> UnitBytes:
    return unit_bytes(shapes, shards, engine)


@lru_cache(maxsize=1024)
def _moments(shapes: ModelShapes, engine: EngineConfig, trace: Trace | None, shards: int) -> Moments:
    units = _units(shapes, engine, shards)
    factor = np.where(units.is_replicated, 1, shards) if _keeps_whole_sums(engine, shards) else 1
    return moments_of(
        trace or empty_trace(len(shapes.units)), units, units.sum_chunk * factor, kept=kept_units(shapes, engine)
    )


def _after_backward(setting: Setting, layout: Mesh, view: _View) -> list[tuple[str, _Peak]]:
    """(phase, peak) between backward and the snapshot."""
    c = setting.shapes.columns
    learning = c.chunk(layout.shards) * c.trainable
    largest, everything = int(learning.max()), int(learning.sum())
    gradients = int(view.units.gradient.sum())
    transient = setting.shapes.transient
    step = int(transient.of_largest * largest + transient.of_all * everything)
    norm = _norm_bytes(learning, _folds(setting.shapes), BLOCK[setting.on_gpu])
    kinds = {"the gradient's norm": {"gradients": gradients, "exchange": norm}}
    if setting.engine.reduction == "exact":
        # Digests of gradients are compared around the steps 1, 2, 4, 8, ... of the optimizer.
        step = max(step, DIGEST_BYTES * min(largest, DIGEST_BLOCK[setting.on_gpu]))
    kinds["the optimizer's step"] = {"gradients": gradients, "optimizer": step}
    return [(phase, _Peak(moment=phase, kinds=of_phase)) for phase, of_phase in kinds.items()]


@lru_cache(maxsize=64)
def _folds(shapes: ModelShapes) -> NDArray[np.int64]:
    """The number of folds of each parameter's gradient rows for the norm."""
    return np.array([num_folds(row_length(int(numel))) for numel in shapes.columns.row_numel], np.int64)


def _norm_bytes(numel: NDArray[np.int64], folds: NDArray[np.int64], block: int) -> int:
    """Bytes of `grad_norm` for gradients of these sizes: squares of a block, gathered folded ones, digits."""
    folded, small = np.minimum(numel, block) >> folds, block // SMALL
    gathered = min(int((numel >> folds)[folded < small].sum()), 2 * small)
    squares = min(block, int(numel.max())) + gathered
    return _SQUARE_BYTES * squares + _DIGIT_BYTES * max(int(folded.max()), gathered)
