"""The newest complete step, against a model that counts bytes one by one."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from raysharded.errors import ConfigError
from raysharded.ids import WorkerId
from raysharded.layout import (
    Held,
    Parity,
    Plan,
    StateSpec,
    Target,
    TensorSpec,
    block_bytes,
    make_plan,
    recoverable,
    shard_map,
    tensor_specs,
)
from tests.cases import examples

SPECS = [
    StateSpec(tensors=()),
    StateSpec(tensors=(TensorSpec(name="s", dtype="float32", shape=()),)),
    StateSpec(tensors=(TensorSpec(name="w", dtype="uint8", shape=(7, 2)),)),
    StateSpec(
        tensors=(
            TensorSpec(name="w", dtype="uint8", shape=(12,)),
            TensorSpec(name="s", dtype="int16", shape=(2,), replicated=True),
            TensorSpec(name="v", dtype="uint8", shape=(3, 2)),
        )
    ),
    StateSpec(
        tensors=(
            *tensor_specs("q", "uint8", (9, 2), tensor_dim=0),
            *tensor_specs("o", "uint8", (5, 4), tensor_dim=1, strips=2),
            *tensor_specs("norm", "uint8", (6,)),
        )
    ),
]


@st.composite
def reports(draw: st.DrawFn) -> list[Held]:
    """Up to three layouts, each with its own world size and tensor parallel degree, and any of their buffers at any of
    three steps."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    held = []
    for layout_id, size in enumerate(sizes):
        tensor = draw(st.sampled_from([1, 2])) if size % 2 == 0 else 1
        for rank in range(size):
            for medium in ("snapshot", "mirror"):
                for step in draw(st.sets(st.integers(1, 3))):
                    worker = WorkerId(draw(st.integers(0, 6)))
                    held.append(
                        Held(
                            worker=worker,
                            step=step,
                            medium="snapshot" if medium == "snapshot" else "mirror",
                            world_size=size,
                            rank=rank,
                            layout_id=layout_id,
                            tensor=tensor,
                        )
                    )
    return held


def newest_by_bytes(spec: StateSpec, held: list[Held]) -> int | None:
    for step in sorted({h.step for h in held}, reverse=True):
        covered = np.zeros(spec.total_bytes, np.bool_)
        for h in held:
            if h.step == step:
                shard = shard_map(spec, h.world_size, h.rank, h.tensor)
                for start, stop in zip(shard.line_start, shard.line_stop, strict=True):
                    covered[start:stop] = True
        if covered.all():
            return step
    return None


@settings(max_examples=examples(40, of=120), deadline=None)
@given(st.sampled_from(SPECS), reports())
def test_the_newest_step_whose_every_byte_is_held_is_found(spec: StateSpec, held: list[Held]) -> None:
    found = recoverable(spec, held)
    assert (found[0] if found else None) == newest_by_bytes(spec, held)
    assert recoverable(spec, held[::-1]) == found


@settings(max_examples=examples(20, of=60), deadline=None)
@given(st.sampled_from(SPECS), reports())
def test_its_copies_hold_every_reported_buffer_and_are_enough_for_a_plan(spec: StateSpec, held: list[Held]) -> None:
    found = recoverable(spec, held)
    if found is None:
        return
    step, copies, rebuilds = found
    assert rebuilds == ()
    listed = [
        (copy.medium, copy.world_size, copy.tensor, rank, holder)
        for copy in copies
        for rank, holder in enumerate(copy.holders)
        if holder is not None
    ]
    distinct = {h for h in held if h.step == step}
    assert sorted(listed) == sorted((h.medium, h.world_size, h.tensor, h.rank, h.worker) for h in distinct)
    plan = make_plan(spec, copies, Target(workers=(WorkerId(1), WorkerId(9)), mirrors=True))
    assert isinstance(plan, Plan)
    assert plan.bytes_from_storage == 0


def test_halves_of_one_step_in_two_layouts_make_a_whole() -> None:
    spec = StateSpec(tensors=(TensorSpec(name="w", dtype="uint8", shape=(12,)),))

    def snapshot(worker: int, step: int, world_size: int, rank: int) -> Held:
        return Held(
            worker=WorkerId(worker),
            step=step,
            medium="snapshot",
            world_size=world_size,
            rank=rank,
            layout_id=world_size,
        )

    older = [snapshot(0, 4, 2, 0), snapshot(1, 4, 2, 1)]
    parts = [snapshot(0, 5, 2, 0), snapshot(2, 5, 3, 1), snapshot(3, 5, 3, 2)]
    assert recoverable(spec, [*older, *parts[:2]]) == recoverable(spec, older)
    found = recoverable(spec, [*older, *parts])
    assert found is not None
    assert found[0] == 5
    assert [copy.world_size for copy in found[1]] == [3, 2]


def test_nothing_held_is_nothing_recoverable() -> None:
    assert recoverable(SPECS[2], []) is None


def test_one_layout_with_two_world_sizes_or_degrees_is_refused() -> None:
    for layouts in (((2, 1), (3, 1)), ((2, 1), (2, 2))):
        held = [
            Held(
                worker=WorkerId(0),
                step=1,
                medium="snapshot",
                world_size=size,
                rank=0,
                layout_id=3,
                tensor=tensor,
            )
            for size, tensor in layouts
        ]
        with pytest.raises(ConfigError, match="layout 3"):
            recoverable(SPECS[2], held)


def test_what_parity_gives_back_is_of_its_layouts_tensor_parallel_degree() -> None:
    parity = Parity(k=2, m=1)

    def held(rank: int, medium: Literal["snapshot", "parity"]) -> Held:
        kept = parity if medium == "parity" else None
        return Held(
            worker=WorkerId(rank),
            step=1,
            medium=medium,
            world_size=4,
            rank=rank,
            layout_id=1,
            parity=kept,
            tensor=2,
        )

    found = recoverable(SPECS[-1], [held(rank, medium) for rank in (0, 1, 3) for medium in ("snapshot", "parity")])
    assert found is not None
    assert [rebuild.tensor for rebuild in found.rebuilds] == [2]
    assert {copy.tensor for copy in found.copies} == {2}
    assert block_bytes(SPECS[-1], 4, parity, 2) * 2 >= max(shard_map(SPECS[-1], 4, r, 2).size_bytes for r in range(4))


def test_what_a_tensor_rank_had_in_common_with_others_is_not_lost_with_it() -> None:
    norm = StateSpec(tensors=SPECS[-1].tensors[-1:])
    held = [
        Held(worker=WorkerId(rank), step=1, medium="snapshot", world_size=4, rank=rank, layout_id=1, tensor=2)
        for rank in (1, 2)
    ]
    assert recoverable(norm, held) is not None
    assert recoverable(norm, held[:1]) is None
    assert recoverable(SPECS[-1], held) is None
