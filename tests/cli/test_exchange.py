"""`raysharded checkpoint export | import | diff`, as commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from raysharded.checkpoint.interop.locations import place_of
from raysharded.checkpoint.reader import open_checkpoint
from raysharded.checkpoint.storage.local import LocalStorage
from raysharded.cli import app
from raysharded.testing.storages import save_rows
from tests.checkpoint.interop.ranks import dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def _run(*args: str) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *args])


def _checkpoint(tmp_path: Path, name: str, **changes: Any) -> str:
    arrays = {
        "model.w": np.ones((6, 2), np.float32),
        "model.b": np.zeros(3, np.float32),
        "optim.w.step": np.array(3.0, np.float32),
    }
    storage = LocalStorage(str(tmp_path / name))
    return f"{tmp_path}/{name}/{save_rows(storage, arrays | changes, step=4, save_id='a', num_writers=2)}"


def test_export_and_import_go_through_every_format(tmp_path: Path) -> None:
    source = _checkpoint(tmp_path, "run")
    there, back, flat = str(tmp_path / "dcp"), str(tmp_path / "back"), str(tmp_path / "hf")

    said = json.loads(_run("export", source, there, "--format", "dcp", "--json").stdout)
    assert (said["step"], said["num_tensors"], said["format"]) == (4, 3, "dcp")
    into = {"model": {"w": torch.zeros(6, 2)}}
    dcp.load(into, checkpoint_id=there)
    assert into["model"]["w"].tolist() == np.ones((6, 2)).tolist()

    assert json.loads(_run("import", there, back, "--step", "4", "--json").stdout)["format"] == "dcp"
    assert open_checkpoint(*place_of(back)).tensors.keys() == {"model.w", "model.b", "optimizer.state.w.step"}

    result = _run("export", back, flat, "--format", "safetensors", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert "step 4: 2 tensors" in result.stdout
    assert {k: v.dtype for k, v in load_file(f"{flat}/model.safetensors").items()} == dict.fromkeys(
        "bw", torch.bfloat16
    )

    assert _run("import", flat, str(tmp_path / "again")).exit_code == 0
    assert open_checkpoint(*place_of(str(tmp_path / "again"))).tensors.keys() == {"model.w", "model.b"}


def test_a_copy_is_the_same_checkpoint(tmp_path: Path) -> None:
    source, copy = _checkpoint(tmp_path, "run"), str(tmp_path / "copy")
    assert _run("export", source, copy, "--format", "raysharded").exit_code == 0
    result = _run("diff", source, copy)
    assert result.exit_code == 0, result.output
    assert "nothing differs" in result.stdout
    assert _run("export", source, copy, "--format", "raysharded").exit_code == 1
    assert _run("export", source, str(tmp_path / "part"), "--format", "raysharded", "--names", "model.*").exit_code == 0
    assert open_checkpoint(*place_of(str(tmp_path / "part"))).tensors.keys() == {"model.w", "model.b"}


def test_diff_prints_what_differs_and_exits_with_1(tmp_path: Path) -> None:
    b = np.array([0.0, 0.5, 0.0], np.float32)
    one, two = _checkpoint(tmp_path, "one"), _checkpoint(tmp_path, "two", **{"model.b": b, "new": np.ones(1)})
    result = _run("diff", one, two, "--json")
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    assert (said["equal"], said["only_in_b"], said["num_equal"]) == (False, ["new"], 2)
    assert said["different"] == [
        {
            "name": "model.b",
            "num_elements": 3,
            "num_differing": 1,
            "num_not_finite": 0,
            "max_abs": 0.5,
            "mean_abs": 0.5 / 3,
            "relative_l2": None,
        }
    ]
    text = _run("diff", one, two)
    assert text.exit_code == 1
    assert "1 of 3" in text.stdout
    assert "only in B" in text.stdout


def test_a_map_of_names_is_used_in_both_directions(tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text(json.dumps({"model.w": "weight", "model.b": "bias"}))
    options = ("--map", str(tmp_path / "map.json"))
    assert (
        _run("export", _checkpoint(tmp_path, "run"), f"{tmp_path}/hf", "--format", "safetensors", *options).exit_code
        == 0
    )
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == {"weight", "bias"}
    assert _run("import", f"{tmp_path}/hf", f"{tmp_path}/back", *options).exit_code == 0
    assert open_checkpoint(*place_of(f"{tmp_path}/back")).tensors.keys() == {"model.w", "model.b"}


def test_a_copy_or_an_import_goes_only_where_a_save_would(tmp_path: Path) -> None:
    source = _checkpoint(tmp_path, "run")
    held = _run("export", source, f"{tmp_path}/run", "--format", "raysharded")
    assert "holds checkpoints, and is not one itself" in held.output
    named = _run("export", source, f"{tmp_path}/step-0000000007-abc", "--format", "raysharded")
    assert "is named after step 7, but this is step 4" in named.output
    assert not (tmp_path / "run" / "manifest.json").exists()
    assert not (tmp_path / "step-0000000007-abc").exists()

    save_file({"w": torch.ones(3)}, tmp_path / "a.safetensors")
    importing = ("import", f"{tmp_path}/a.safetensors", f"{tmp_path}/step-0000000007-abc")
    assert "is named after step 7, but this is step 3" in _run(*importing, "--step", "3").output
    assert json.loads(_run(*importing, "--json").stdout)["step"] == 7


def test_one_safetensors_file_is_imported_without_naming_its_kind(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "a.safetensors")
    result = _run("import", f"{tmp_path}/a.safetensors", f"{tmp_path}/ours", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["format"] == "safetensors"
    assert open_checkpoint(*place_of(f"{tmp_path}/ours")).tensors.keys() == {"model.w"}


def test_mistakes_are_reported(tmp_path: Path) -> None:
    source = _checkpoint(tmp_path, "run")
    assert "is of step 4" in _run("export", source, f"{tmp_path}/x", "--format", "dcp", "--step", "5").output
    assert "there are no checkpoints" in _run("diff", f"{tmp_path}/nothing", source).output
    assert "cannot be read" in _run("export", source, f"{tmp_path}/x", "--format", "safetensors", "--map", "no").output
    assert _run("export", source, f"{tmp_path}/x", "--format", "dcp", "--dtype", "float16").exit_code == 2
    assert _run("export", source, f"{tmp_path}/x").exit_code == 2
    assert not (tmp_path / "x").exists()
