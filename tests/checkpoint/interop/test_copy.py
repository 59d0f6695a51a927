"""Copies of checkpoints and of parts of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from raysharded.checkpoint import api
from raysharded.checkpoint.interop.copy import copy_checkpoint
from raysharded.checkpoint.interop.huggingface.exporter import export_huggingface
from raysharded.checkpoint.interop.huggingface.importer import import_huggingface
from raysharded.checkpoint.interop.locations import place_of
from raysharded.checkpoint.interop.names import EVERYTHING
from raysharded.checkpoint.reader import Checkpoint, open_checkpoint
from raysharded.errors import CheckpointError
from tests.checkpoint.interop.ranks import assert_same


def _state() -> dict[str, Any]:
    return {
        "model": {"w": torch.ones(2), "b": torch.zeros(3), "extra": b"x"},
        "optimizer": {"state": {"w": {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]},
        "list": [torch.zeros(1), 5, torch.ones(1)],
        "epoch": 3,
    }


def _saved(tmp_path: Path, state: Any) -> Checkpoint:
    api.save(tmp_path / "whole", state, step=4, run="r", metadata={"seed": 1}, data={"at": 2})
    return open_checkpoint(*place_of(tmp_path / "whole"))


def _copied(tmp_path: Path, checkpoint: Checkpoint, *names: str) -> Checkpoint:
    copy_checkpoint(checkpoint, place_of(tmp_path / "part"), names=names)
    return open_checkpoint(*place_of(tmp_path / "part"))


def _exported(tmp_path: Path, checkpoint: Checkpoint, to: str) -> set[str]:
    export_huggingface(checkpoint, place_of(tmp_path / to))
    return set(load_file(tmp_path / to / "model.safetensors"))


@pytest.mark.parametrize("names", [(), ("*",)])
def test_a_copy_of_everything_is_the_same_state(tmp_path: Path, names: tuple[str, ...]) -> None:
    whole = _saved(tmp_path, _state())
    part = _copied(tmp_path, whole, *names)
    assert (part.manifest.tree, part.tensors, part.step) == (whole.manifest.tree, whole.tensors, 4)
    assert (part.manifest.metadata, part.manifest.data) == ({"seed": 1}, {"at": 2})
    assert_same(api.open(tmp_path / "part").state(), _state())


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("model.*",), {"model": _state()["model"]}),
        (("model.w", "epoch"), {"model": {"w": torch.ones(2)}, "epoch": 3}),
        (("*.lr",), {"optimizer": {"param_groups": [{"lr": 0.1, "params": ["w"]}]}}),
        (("list.*",), {"list": _state()["list"]}),
        (("list.2",), {"list": {2: torch.ones(1)}}),
        (("epoch",), {"epoch": 3}),
    ],
    ids=["model", "one and a value", "a value is whole", "a list", "a part of a list", "a value"],
)
def test_a_part_keeps_its_place_in_the_state(tmp_path: Path, names: tuple[str, ...], expected: Any) -> None:
    whole = _saved(tmp_path, _state())
    part = _copied(tmp_path, whole, *names)
    assert_same(api.open(tmp_path / "part").state(), expected)
    assert part.tensors.items() <= whole.tensors.items()


def test_patterns_that_match_all_tensors_choose_the_values_too(tmp_path: Path) -> None:
    _copied(tmp_path, _saved(tmp_path, {"w": torch.ones(2), "epoch": 3}), "w")
    assert_same(api.open(tmp_path / "part").state(), {"w": torch.ones(2)})


def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'modle"):
        _copied(tmp_path, _saved(tmp_path, _state()), "modle.*")
    assert not (tmp_path / "part").exists()


def test_a_part_is_loaded_where_the_whole_was_saved(tmp_path: Path) -> None:
    _copied(tmp_path, _saved(tmp_path, _state()), "model.*", "list.2")
    into: dict[str, Any] = {"model": {"w": torch.zeros(2), "b": torch.ones(3), "extra": b""}}
    assert_same(api.load(tmp_path / "part", into).state, {"model": _state()["model"]})
    into = {"list": [torch.zeros(1), 7, torch.zeros(1)]}
    loaded = api.load(tmp_path / "part", into, strict=False)
    assert set(loaded.missing) == {"list.0", "list.1"}
    assert_same(loaded.state, {"list": [torch.zeros(1), 7, torch.ones(1)]})


@pytest.mark.parametrize(
    ("state", "names", "exported"),
    [
        ({"model.weight": torch.ones(2), "model.bias": torch.zeros(2)}, ("model.weight",), {"model.weight"}),
        ({"model": {"weight": torch.ones(2)}, "epoch": 1}, ("model.*",), {"weight"}),
        ({"model": {"weight": torch.ones(2)}, "ema": {"weight": torch.ones(2)}}, ("model.*",), {"weight"}),
        ({"model": torch.ones(2), "model.bias": torch.zeros(2)}, ("model.*",), {"model.bias"}),
    ],
    ids=["a model alone", "a training state", "of two models", "a tensor called model"],
)
def test_a_part_is_exported_under_the_names_that_it_had(
    tmp_path: Path, state: Mapping[str, Any], names: tuple[str, ...], exported: set[str]
) -> None:
    whole = _saved(tmp_path, state)
    assert exported <= _exported(tmp_path, whole, "hf-whole")
    assert _exported(tmp_path, _copied(tmp_path, whole, *names), "hf-part") == exported


@pytest.mark.parametrize(
    ("there", "exported"),
    [(["model.weight", "head.bias"], {"model.weight"}), (["model.weight", "optim.weight.exp_avg"], {"weight"})],
    ids=["any names", "a trainer's"],
)
def test_a_part_of_a_checkpoint_without_a_tree_is_exported_under_the_names_that_it_had(
    tmp_path: Path, there: list[str], exported: set[str]
) -> None:
    save_file({name: torch.ones(2) for name in there}, tmp_path / "some.safetensors")
    import_huggingface(place_of(tmp_path / "some.safetensors"), place_of(tmp_path / "whole"), name_map=EVERYTHING)
    whole = open_checkpoint(*place_of(tmp_path / "whole"))
    assert exported <= _exported(tmp_path, whole, "hf-whole")
    assert _exported(tmp_path, _copied(tmp_path, whole, "model.*"), "hf-part") == exported
