"""The states of several ranks are one checkpoint: equal values stay, different ones have a rule or are refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given

from raysharded.checkpoint import api
from raysharded.checkpoint.sharded_io.coordinator import PeerFailed
from raysharded.checkpoint.state_dict import tree
from raysharded.checkpoint.state_dict.rank_merge import merge
from raysharded.errors import CheckpointError
from tests.checkpoint.state_dict.ranks import outcomes, run_ranks
from tests.checkpoint.state_dict.test_tree import same, states


def merged(*of_ranks: Any) -> Any:
    """The result of a load from the states of several ranks; tensors as their names."""
    return tree.unflatten(merge([tree.flatten(state).tree for state in of_ranks]), lambda name: name)


@given(states)
def test_equal_states_stay_as_they_are_though_a_rank_has_more(state: dict[str, Any]) -> None:
    flat = tree.flatten(state)
    assert merge([flat.tree, flat.tree]) == flat.tree
    rest = [tree.flatten({**state, f"rng.{rank}": rank}).tree for rank in range(3)]
    kept = tree.unflatten(merge(rest), flat.tensors.__getitem__)
    assert [kept.pop(f"rng.{rank}") for rank in range(3)] == [0, 1, 2]
    assert same(kept, state)


def test_text_that_repeats_is_kept_when_ranks_have_different_values() -> None:
    words = {"words": ["the", "cat", "the", "dog"], "pair": ("x", "x"), "nested": [["a", "a"], {"b": ["c", "c"]}]}
    kept = merged({**words, "rng.0": 1}, {**words, "rng.1": 2})
    assert kept == {**words, "rng.0": 1, "rng.1": 2}


def test_the_stages_of_a_pipeline_are_united_with_the_names_in_their_parameter_groups() -> None:
    def stage(names: list[str]) -> dict[str, Any]:
        weights = {name: torch.zeros(1) for name in names}
        return {"model": weights, "optimizer": {"state": {}, "param_groups": [{"lr": 0.5, "params": names}]}}

    kept = merged(stage(["a", "shared"]), stage(["shared", "b"]), stage(["a", "shared"]))
    assert list(kept["model"]) == ["a", "shared", "b"]
    assert kept["optimizer"]["param_groups"] == [{"lr": 0.5, "params": ["a", "shared", "b"]}]


@pytest.mark.parametrize(
    ("of_ranks", "said"),
    [
        ([{"epoch": 3}, {"epoch": 4}, {"epoch": 3}], r"state\['epoch'\] is 3 on ranks 0, 2 and 4 on rank 1\. Give"),
        ([{"a": ["r0"]}, {"a": ["r1"]}], r"state\['a'\]\[0\] is 'r0' on rank 0 and 'r1' on rank 1"),
        ([{"a": ["x", "y"]}, {"a": ["x"]}], r"state\['a'\] is \['x', 'y'\] on rank 0 and \['x'\] on rank 1"),
        ([{"params": ["a"]}, {"params": ["b"]}], r"state\['params'\]\[0\] is 'a' on rank 0 and 'b' on rank 1"),
        ([{"a": [1]}, {"a": (1,)}], r"state\['a'\] is \[1\] on rank 0 and \(1,\) on rank 1"),
        ([{"a": {"b": 1}}, {"a": {"b": 1}}, {"a": [1]}], r"is a dict of 1 on ranks 0, 1 and \[1\] on rank 2"),
        ([{"a": torch.zeros(1)}, {"a": 1}], r"state\['a'\] is a tensor on rank 0 and 1 on rank 1"),
        ([{"a": b"0"}, {"a": b"1"}], r"is b'0' on rank 0 and b'1' on rank 1"),
        ([{"a": float("inf")}, {"a": 1.5}], r"is inf on rank 0 and 1.5 on rank 1"),
        ([{"a": "x" * 99 + "1" + "x" * 99}, {"a": "x" * 99 + "2" + "x" * 99}], "different on each, on ranks 0, 1"),
        ([{"a": 0, "b": [0, 0]}, {"a": 1, "b": [0, 1]}], r"state\['a'\] is .*; state\['b'\]\[1\] is 0 on rank 0 and 1"),
    ],
)
def test_what_differs_and_has_no_rule_is_refused_by_its_place_and_the_ranks(of_ranks: list[Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        merged(*of_ranks)


def test_many_differences_are_listed_in_an_error_of_bounded_length() -> None:
    with pytest.raises(CheckpointError, match="and 92 more places") as refused:
        merged(*({f"k{number}": rank for number in range(100)} for rank in range(100)))
    assert len(str(refused.value)) < 3000


def save_generators(rank: int, folder: str) -> str:
    """The log of two saves."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("raysharded.checkpoint").addHandler(handler)
    torch.manual_seed(rank)
    state = {
        "generator": torch.get_rng_state(),
        "same": torch.arange(9.0).reshape(3, 3).t(),
        f"own.{rank}": torch.tensor(rank),
        "large": torch.full((40_000,), float(rank)),
    }
    for step in range(2):
        api.save(f"{folder}/{step}", state, step=step, timeout_s=60)
    return "\n".join(said)


@pytest.mark.procs
def test_small_tensors_that_differ_where_they_should_be_copies_are_named_in_the_log(tmp_path: Path) -> None:
    said, nothing = run_ranks(2, save_generators, str(tmp_path))
    assert said == (
        "tensors differ between the ranks that hold them, and only one rank's copy of each is stored: generator "
        "('generator' differs on ranks 0, 1). Give each rank's tensor its own key, as f'rng.{rank}'"
    ), "once, and of neither what is a rank's own, nor what is the same, nor what is large"
    assert nothing == ""


def save_words(rank: int, folder: str, epochs: tuple[int, int]) -> str:
    state = {"words": ["the", "cat", "the", "dog"], "pair": ("x", "x"), "epoch": epochs[rank], f"rng.{rank}": rank}
    return api.save(folder, state, timeout_s=60).digest


@pytest.mark.procs
def test_two_ranks_with_different_states_save_what_each_gave(tmp_path: Path) -> None:
    run_ranks(2, save_words, str(tmp_path / "c"), (1, 1))
    assert api.open(tmp_path / "c").state() == {
        "words": ["the", "cat", "the", "dog"],
        "pair": ("x", "x"),
        "epoch": 1,
        "rng.0": 0,
        "rng.1": 1,
    }
    refused = outcomes(2, save_words, str(tmp_path / "d"), (1, 2))
    assert [type(error) for error in refused] == [CheckpointError, PeerFailed]
    assert all("state['epoch'] is 1 on rank 0 and 2 on rank 1" in str(error) for error in refused)
    assert not list(tmp_path.glob("d/**/manifest.json"))
