"""`raysharded plan`: its output, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cases import tried_each_time
from tests.cli.test_commands import fail, invoke, succeed
from tests.planning.configs import TINY

TRAINER = """
import raysharded as rs
from tests.training.harness import GptTask, Tokens

def trainer(name="it", microbatch="2"):
    return rs.ElasticTrainer(
        task=GptTask(), data=Tokens(), batch=rs.BatchConfig(global_batch_size=16, microbatch_size=int(microbatch)),
        scaling=rs.ScalingConfig(num_workers=(1, 6)), run=rs.RunConfig(name=name, storage_path="runs", max_steps=1),
    )
"""


PARALLEL = """
import raysharded as rs
from tests.training.harness import Tokens
from tests.training.llama import LlamaTask

def trainer():
    return rs.ElasticTrainer(
        task=LlamaTask(), data=Tokens(), batch=rs.BatchConfig(global_batch_size=16, microbatch_size=2),
        scaling=rs.ScalingConfig(num_workers=(4, 9), tensor_parallel_degree=2),
        run=rs.RunConfig(name="it", storage_path="runs", max_steps=1),
    )
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY | {"num_hidden_layers": 2}))
    return str(path)


RUN = ("--global-batch-size", 32, "--seq-len", 16, "--workers", 8)


def test_a_config_is_planned(config: str) -> None:
    out = succeed("plan", config, *RUN, "--device-memory", "8GiB", "--host-memory", "10GB", "--tflops", 100)
    assert "lower bounds" in " ".join(out.split())
    for part in (
        "parameters in 3 units",
        "activation checkpointing",
        "fits",
        "1x8",
        "8x1",
        "all-gather",
        "because: ",
        "step, at least",
    ):
        assert part in out


@pytest.mark.parametrize(("speed", "is_short"), tried_each_time([(100, True)], [(100, True), (1e-6, False)]))
def test_json_has_the_same_and_a_step_time_is_never_shown_without_what_it_leaves_out(
    config: str, speed: float, is_short: bool
) -> None:
    plan = json.loads(succeed("plan", config, *RUN, "--tflops", speed, "--json"))
    chosen = plan["chosen"]
    assert plan["problem"] is None
    assert chosen["device_bytes"] + chosen["host_bytes"] == sum(chosen["memory_bytes"].values())
    assert list(chosen["phase_bytes"]) == ["forward", "backward", "the gradient's norm", "the optimizer's step"]
    assert max(chosen["phase_bytes"].values()) == chosen["device_bytes"]
    assert [each["layout"] for each in plan["layouts"]] == ["1x8", "2x4", "4x2", "8x1"]
    (note,) = [note for note in plan["notes"] if "lower bounds" in note]
    assert "reading samples, the optimizer, snapshots, Python and the messages of every round are left out" in note
    assert (plan["chosen"]["step_s"] < 0.2) == ("expect tens of milliseconds on CPU workers" in note) == is_short


def test_a_trainer_is_planned_as_run_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planned_run.py").write_text(TRAINER)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = json.loads(succeed("plan", tmp_path / "planned_run.py", "mine", "4", "--json"))
    assert (found["workers"], found["microbatch_size"], found["microbatches"]) == (6, 4, 4)
    assert [each["layout"] for each in found["layouts"]] == ["1x6", "2x3", "3x2", "6x1"]


def test_what_fits_nowhere_ends_with_1_and_the_nearest_that_fits(config: str) -> None:
    result = invoke("plan", config, *RUN, "--device-memory", "150KB", "--headroom", 0)
    assert result.exit_code == 1
    assert "does not fit" in result.stdout
    assert result.stderr.startswith("error: no layout of 8 workers fits: 8x1 needs ")
    assert result.stderr.count("\n") == 1


def test_a_layout_that_was_requested_is_the_one_that_is_shown(config: str) -> None:
    found = json.loads(succeed("plan", config, *RUN, "--shards", 2, "--json"))
    assert found["chosen"]["layout"] == "4x2"


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parallel") / "parallel_run.py"
    path.write_text(PARALLEL)
    return path


def test_a_trainer_with_tensor_parallelism_is_planned_in_whole_groups(parallel: Path) -> None:
    found = json.loads(succeed("plan", parallel, "--json"))
    assert (found["workers"], found["tensor_parallel_degree"]) == (8, 2)  # of 9, one would stand by
    assert [each["layout"] for each in found["layouts"]] == ["1x4x2", "2x2x2", "4x1x2"]
    assert found["chosen"]["sent_bytes"]["tensor"] > 0


@pytest.mark.long  # the test above has the groups
def test_a_trainer_with_tensor_parallelism_is_planned_without_it_and_in_fewer_shards(parallel: Path) -> None:
    alone = json.loads(succeed("plan", parallel, "--tensor", 1, "--workers", 2, "--json"))
    assert [each["layout"] for each in alone["layouts"]] == ["1x2", "2x1"]
    assert alone["chosen"]["sent_bytes"]["tensor"] == 0
    assert "tensor parallel degree 2, fits" in succeed("plan", parallel, "--shards", 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tensor", 3, "--workers", 8), "8 workers are not a multiple of the tensor parallel degree 3; take 6 or 9."),
        (("--tensor", 0), "a tensor parallel degree of 0: give 1 or more."),
        (("--shards", 3), "--shards 3 does not divide 8 workers in groups of whole 2; take one of 2, 4, 8."),
        (("--tensor", 5), "of length 48, over 5 workers; choose a tensor_parallel_degree that divides it."),
    ],
)
def test_degrees_that_cannot_be_are_one_sentence(parallel: Path, arguments: tuple[Any, ...], message: str) -> None:
    assert message in fail("plan", parallel, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--global-batch-size", 32, "--seq-len", 16), "does not describe a run: give --workers N."),
        (("--global-batch-size", 32, "--workers", 8), "does not describe a run: give --seq-len N."),
        ((*RUN[:-1], 0), "--workers 0: give a whole number of 1 or more."),
        ((*RUN, "--device-memory", "80 gigs"), "--device-memory 80 gigs: give a size, such as 80GiB or 500GB."),
        ((*RUN, "--shards", 3), "--shards 3 does not divide 8 workers; take one of 1, 2, 4, 8."),
        ((*RUN, "--tensor", 2), "a config.json is planned without tensor parallelism; plan a trainer whose task has"),
        ((*RUN, "--microbatch-size", 5), "--global-batch-size 32 is not a multiple of --microbatch-size 5"),
        ((*RUN, "--param-dtype", "float8"), "--param-dtype float8: choose one of float32, bfloat16."),
        ((*RUN, "--workers-per-node", 0), "--workers-per-node 0: give a whole number of 1 or more."),
    ],
)
def test_wrong_input_is_one_sentence(config: str, arguments: tuple[Any, ...], message: str) -> None:
    assert message in fail("plan", config, *arguments)


def test_targets_that_are_invalid_are_refused(tmp_path: Path) -> None:
    assert fail("plan", tmp_path / "config.json", *RUN).startswith("there is no file ")
    assert "there is no file" in fail("plan", tmp_path / "train.py")
