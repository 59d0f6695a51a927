"""A nested state can be taken apart and put together again; an unsupported value is refused by its path."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import assume, given, strategies as st

from raysharded.checkpoint.state_dict import tree
from raysharded.errors import CheckpointError, CorruptCheckpoint

values = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.builds(lambda: torch.zeros(2))
)
states = st.recursive(
    values,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text("abc", max_size=3) | st.integers(-3, 30), inner, max_size=3)
    ),
    max_leaves=12,
).map(lambda state: {"root": state})


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a is b
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(states)
def test_a_state_comes_back_as_it_was(state: dict[str, Any]) -> None:
    try:
        flat = tree.flatten(state)
    except CheckpointError:
        assume(False)  # {1: tensor, "1": tensor}
    stored = json.loads(json.dumps(flat.tree))
    assert same(tree.unflatten(stored, flat.tensors.__getitem__), state)


def test_not_a_number_and_infinities_come_back() -> None:
    flat = tree.flatten({"a": float("nan"), "b": float("-inf")})
    back = tree.unflatten(json.loads(json.dumps(flat.tree, allow_nan=False)), flat.tensors.get)
    assert str(back) == "{'a': nan, 'b': -inf}"


def test_names_are_paths() -> None:
    state = OrderedDict({"model": {"layers": [{"w": torch.zeros(1)}]}, 5: torch.ones(1)})
    assert list(tree.flatten(state).tensors) == ["model.layers.0.w", "5"]


def test_two_tensors_of_one_name_are_refused_with_both_paths() -> None:
    with pytest.raises(CheckpointError, match=r"state\['a'\]\['b'\] and state\['a.b'\]"):
        tree.flatten({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)})


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": [object()]}, r"state\['a'\]\[0\]: a builtins.object"),
        ({"a": {1, 2}}, r"state\['a'\]: a builtins.set"),
        ({"a": torch.Size([1])}, r"state\['a'\]: a torch.Size"),
        ({(1, 2): 3}, r"key \(1, 2\)"),
        ({True: 3}, "key True"),
        (torch.zeros(1), "needs a name"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_its_path(state: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        tree.flatten(state)


def test_a_state_that_holds_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["again"] = state
    with pytest.raises(CheckpointError, match="does it hold itself"):
        tree.flatten(state)


@pytest.mark.parametrize(
    "bad",
    [
        None,
        1,
        {},
        {"tensor": 1},
        {"value": [1]},
        {"float": "1"},
        {"dict": [["a"]]},
        {"list": {}},
        {"other": 1},
        {"a": 1, "b": 2},
    ],
)
def test_a_malformed_tree_is_refused(bad: Any) -> None:
    with pytest.raises(CorruptCheckpoint, match="malformed"):
        tree.unflatten({"dict": [["key", bad]]}, lambda name: name)


def test_a_tree_that_is_nested_too_deep_is_refused() -> None:
    deep: Any = {"value": 1}
    for _ in range(5000):
        deep = {"list": [deep]}
    with pytest.raises(CorruptCheckpoint):
        tree.unflatten(deep, lambda name: name)


def test_settings_are_taken_whole_and_beside_tensors_one_by_one() -> None:
    w = torch.zeros(1)
    wanted = tree.flatten({"model": {"w": w, "n": 1, "gone": 2}, "settings": {"old": 1}}).tree
    stored = tree.flatten({"model": {"w": w, "n": 5}, "settings": {"new": [1, 2]}, "more": 1}).tree
    parts = dict(tree.value_parts(wanted, stored))
    assert {tree.name_of(path) for path in parts} == {"model.n", "model.gone", "settings"}
    assert parts["model", "gone"] is None
    found = {path: part for path, part in parts.items() if part is not None}
    assert tree.unflatten(tree.replaced(wanted, found), lambda name: name) == {
        "model": {"w": "model.w", "n": 5, "gone": 2},
        "settings": {"new": [1, 2]},
    }


def flattened(state: dict[str, Any]) -> tree.Tree:
    try:
        return tree.flatten(state).tree
    except CheckpointError:
        assume(False)  # {1: tensor, "1": tensor}


@given(states, states, st.integers(0, 4))
def test_a_stored_value_is_taken_or_has_no_place(wanted: dict[str, Any], stored: dict[str, Any], levels: int) -> None:
    target, source = flattened(wanted), flattened(stored)

    def is_below(path: tree.Path) -> bool:
        return len(path) >= levels

    taken = {path: part for path, part in tree.value_parts(target, source, is_below) if part is not None}
    inside = [(*at, *path) for at, part in taken.items() for path, _, _ in tree.leaves(part)]
    without = list(tree.values_without_place(target, source, is_below))
    assert sorted(map(repr, [*inside, *without])) == sorted(
        repr(path) for path, name, _ in tree.leaves(source) if name is None
    )
    assert all(len(path) >= max(levels, 1) for path in taken)
    assert not list(tree.values_without_place(source, source))
