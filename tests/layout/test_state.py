"""The state's line of bytes."""

from __future__ import annotations

import pickle

import pytest

from raysharded.errors import ConfigError
from raysharded.layout import StateSpec, TensorSpec

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
    with pytest.raises(ConfigError, match="negative"):
        TensorSpec(name="n", dtype="int8", shape=(-1,))
