"""FSDP2's allocations and traffic for each unit, with its real padding: ceil(rows / shards) rows on every worker. Pure.

Source: torch 2.13, torch/distributed/fsdp/_fully_shard: `_fsdp_param.py` (`_init_sharded_param`, padding),
`_fsdp_collectives.py` (`foreach_all_gather`, `foreach_reduce`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raysharded.config import EngineConfig
from raysharded.layout.state import ITEM_BYTES
from raysharded.planning.models.shapes import Columns, ModelShapes

_SUM_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UnitBytes:
    """Bytes per unit, in the order of `ModelShapes.units`."""

    shard: NDArray[np.int64]
    """One worker's part of the parameters, padded."""
    gathered: NDArray[np.int64]
    """The parameters as forward sees them: whole, padded."""
    all_gather: NDArray[np.int64]
    """The all-gather's output; 0 at one shard."""
    cast: NDArray[np.int64]
    """The copy in the compute dtype, which is the all-gather's input."""
    whole_gradient: NDArray[np.int64]
    """The gradient after backward: whole, in the compute dtype."""
    last_gradient: NDArray[np.int64]
    """The gradient of the last parameter alone, which torch keeps until the unit is reduced."""
    reduce_input: NDArray[np.int64]
    """The whole gradient for the exchange, padded, in the dtype of the exchange."""
    chunk: NDArray[np.int64]
    """One worker's part of `reduce_input`."""
    sum_chunk: NDArray[np.int64]
    """A sum of the size of `chunk`: in float32 or wider."""
    gradient: NDArray[np.int64]
    """One worker's part of the gradient in the parameters' dtype, padded."""
    sum_numel: NDArray[np.int64]
    """Elements of one sum."""
    is_replicated: NDArray[np.bool_]
    """Whether the unit is replicated: FSDP2 treats it as a group of one."""
    is_cast_back: bool
    """Whether the dtype of the exchange differs from that of the parameters."""
    sums_are_copies: bool
    """Whether sums have a wider dtype than exchanged gradients."""


def unit_bytes(shapes: ModelShapes, shards: int, engine: EngineConfig) -> UnitBytes:
    """The bytes of all units in a group of this many workers."""
    c = shapes.columns
    count = len(shapes.units)
    chunk = c.chunk(shards)
    is_replicated = np.array([unit.strategy == "replicate" for unit in shapes.units], np.bool_)
    is_cut = ~is_replicated if shards > 1 else np.zeros(count, np.bool_)
    compute, is_cast = _compute_bytes(c, engine)
    travel = compute if not engine.param_dtype else np.full_like(compute, ITEM_BYTES[str(engine.reduce_dtype)])
    learns = c.trainable.astype(np.int64)
    sums = np.maximum(travel, _SUM_BYTES)
    padded, whole = np.where(c.replicated, chunk, chunk * shards), c.rows * c.row_numel

    def total(values: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.bincount(c.unit, weights=values, minlength=count).astype(np.int64)

    gathered = total(padded * compute)
    shard_cast = np.where(is_cast, chunk * compute, 0)
    last = np.zeros(count, np.int64)
    last[c.unit] = whole * compute * learns  # the last assignment wins
    return UnitBytes(
        shard=total(chunk * c.itemsize),
        gathered=gathered,
        all_gather=np.where(is_cut, gathered, 0),
        cast=np.where(is_cut, total(shard_cast), _largest(c, shard_cast, count)),
        whole_gradient=total(whole * compute * learns),
        last_gradient=np.where(is_cut, last, 0),
        reduce_input=total(padded * travel * learns),
        chunk=total(chunk * travel * learns),
        sum_chunk=total(chunk * sums * learns),
        gradient=total(chunk * c.itemsize * learns),
        sum_numel=total(chunk * learns),
        is_replicated=is_replicated,
        is_cast_back=bool((travel != c.itemsize)[c.trainable].any()),
        sums_are_copies=bool((travel < _SUM_BYTES)[c.trainable].any()),
    )


def kept_units(shapes: ModelShapes, engine: EngineConfig) -> frozenset[int]:
    """The units, besides the root, that stay gathered from forward to backward. Replicated units also do: FSDP2 gathers
    copies of them if the dtype differs."""
    usual = "full" if engine.reshard_after_forward else "gradients"
    return frozenset(i for i, unit in enumerate(shapes.units) if (unit.strategy or usual) != "full")


def _compute_bytes(c: Columns, engine: EngineConfig) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    if engine.param_dtype is None:
        return c.itemsize, np.zeros(len(c.itemsize), np.bool_)
    compute = np.full_like(c.itemsize, ITEM_BYTES[str(engine.param_dtype)])
    return compute, compute != c.itemsize


def _largest(c: Columns, values: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    found = np.zeros(count, np.int64)
    np.maximum.at(found, c.unit, values)
    return found
