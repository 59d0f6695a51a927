"""The state's line of bytes."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from raysharded.checkpoint.format.manifest import SAFETENSORS_DTYPES
from raysharded.errors import ConfigError
from raysharded.layout import ITEM_BYTES, StateSpec, TensorSpec, tensor_specs

SPEC = StateSpec(
    tensors=(
        TensorSpec(name="w", dtype="bfloat16", shape=(5, 3)),
        TensorSpec(name="step", dtype="int64", shape=()),
        TensorSpec(name="none", dtype="float32", shape=(0, 4)),
        TensorSpec(name="b", dtype="float64", shape=(2,), replicated=True),
    )
)


def test_tensors_lie_end_to_end_on_the_line() -> None:
    assert SPEC.nbytes.tolist() == [30, 8, 0, 16]
    assert SPEC.base.tolist() == [0, 30, 38, 38]
    assert SPEC.total_bytes == 54


def test_a_tensor_of_no_dimensions_is_always_replicated() -> None:
    assert SPEC.replicated.tolist() == [False, True, False, True]
    assert TensorSpec(name="s", dtype="bool", shape=()) == TensorSpec(name="s", dtype="bool", shape=(), replicated=True)


def test_the_digest_is_the_same_everywhere_and_differs_for_any_other_spec() -> None:
    assert SPEC.digest() == "d2fa373a292c3b8f2c5448efaf7a0e31f668668b616e26dbb80fb4a8b1facb2c"
    changed = [
        SPEC.tensors[::-1],
        SPEC.tensors[1:],
        (TensorSpec(name="w2", dtype="bfloat16", shape=(5, 3)), *SPEC.tensors[1:]),
        (TensorSpec(name="w", dtype="float16", shape=(5, 3)), *SPEC.tensors[1:]),
        (TensorSpec(name="w", dtype="bfloat16", shape=(3, 5)), *SPEC.tensors[1:]),
        (TensorSpec(name="w", dtype="bfloat16", shape=(5, 3), replicated=True), *SPEC.tensors[1:]),
    ]
    digests = {StateSpec(tensors=tensors).digest() for tensors in changed}
    assert len(digests | {SPEC.digest()}) == len(changed) + 1


def test_every_dtype_of_a_state_can_be_written_to_a_checkpoint() -> None:
    assert {dtype: SAFETENSORS_DTYPES.get(dtype, ("", 0))[1] for dtype in ITEM_BYTES} == ITEM_BYTES


def test_a_spec_survives_pickling_and_compares_by_value() -> None:
    again = pickle.loads(pickle.dumps(SPEC))
    assert again == SPEC
    assert hash(again) == hash(SPEC)
    assert again.base.tolist() == SPEC.base.tolist()


def test_the_same_spec_from_many_workers_is_one_object() -> None:
    first, second = (StateSpec(tensors=(TensorSpec(name="w", dtype="float32", shape=(5, 3)),)) for _ in range(2))
    assert pickle.loads(pickle.dumps(first)) is pickle.loads(pickle.dumps(second))


def test_a_spec_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="'w'"):
        StateSpec(tensors=(SPEC.tensors[0], SPEC.tensors[0]))
    with pytest.raises(ConfigError, match="complex64"):
        TensorSpec(name="c", dtype="complex64", shape=(1,))
    with pytest.raises(ConfigError, match=r"'buffer\.scale': dtype 'float8_e8m0fnu' is not one of .*persistent=False"):
        TensorSpec(name="buffer.scale", dtype="float8_e8m0fnu", shape=(1,))
    with pytest.raises(ConfigError, match="negative"):
        TensorSpec(name="n", dtype="int8", shape=(-1,))


def test_strips_have_the_shape_of_the_whole_and_their_own_bytes() -> None:
    strips = tensor_specs("w", "bfloat16", (3, 4, 6), tensor_dim=2, strips=3)
    spec = StateSpec(tensors=(*strips, TensorSpec(name="b", dtype="int8", shape=(2,), tensor_dim=0)))
    assert [t.shape for t in strips] == [(3, 4, 6)] * 3
    assert [t.strip_range for t in strips] == [(2, 0, 2), (2, 2, 4), (2, 4, 6)]
    assert spec.nbytes.tolist() == [48, 48, 48, 2]
    assert spec.base.tolist() == [0, 48, 96, 144]
    assert spec.strips.tolist() == [3, 3, 3, 0]
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    assert again.tensors == spec.tensors
    assert len(spec.to_rows()) == 2
    others = [
        (*tensor_specs("w", "bfloat16", (3, 4, 6), tensor_dim=2, strips=2), spec.tensors[-1]),
        (*tensor_specs("w", "bfloat16", (3, 4, 6), tensor_dim=0), spec.tensors[-1]),
        (*tensor_specs("w", "bfloat16", (3, 4, 6)), spec.tensors[-1]),
    ]
    assert len({StateSpec(tensors=tensors).digest() for tensors in (spec.tensors, *others)}) == 4


def test_strips_that_are_not_all_there_or_differ_are_refused() -> None:
    one, two, three = tensor_specs("w", "float32", (2, 6), tensor_dim=1, strips=3)
    for tensors in ((one, two), (two, three), (one, three, two), (one, one, two), (one, two, three, one)):
        with pytest.raises(ConfigError, match="'w'"):
            StateSpec(tensors=tensors)
    for unlike in (replace(two, dtype="int32"), replace(two, shape=(3, 6)), replace(two, name="v")):
        with pytest.raises(ConfigError, match="'w'"):
            StateSpec(tensors=(one, unlike, three))
    with pytest.raises(ConfigError, match="equal width"):
        tensor_specs("w", "float32", (2, 6), tensor_dim=1, strips=4)
    with pytest.raises(ConfigError, match="equal width"):
        TensorSpec(name="w", dtype="float32", shape=(6, 2), tensor_dim=0, strips=2)
    for shape, replicated, dim in (((2, 6), True, 0), ((2, 6), False, 2), ((2, 6), False, -1), ((), False, 0)):
        with pytest.raises(ConfigError, match="tensor_dim"):
            TensorSpec(name="w", dtype="float32", shape=shape, replicated=replicated, tensor_dim=dim)
