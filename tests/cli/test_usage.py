"""Wrong usage of every command: one message, in the command's own words, and nothing left behind."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raysharded.checkpoint import open_storage
from raysharded.cli.option_names import Option, Wording
from raysharded.ray_backend import cluster
from tests.checkpoint.retention.runs import Run
from tests.cli.processes import everything_below
from tests.cli.test_commands import invoke
from tests.cli.test_run import REAL
from tests.cli.test_shell import ALL
from tests.report.entries import data, finished, generation, started, step, write_run

TRAINER = f"""
import raysharded as rs

class Tiny(rs.Task):
    build_model = build_optimizer = loss = lambda self, *given: None

class Trainer(rs.ElasticTrainer):
    def __init__(self):
{REAL}

def trainer():
    return Trainer()
"""
CONFIG = (
    '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, '
    '"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}'
)
PLAN = "plan config.json --workers 4 --seq-len 8 --global-batch-size 8"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a run `run` with checkpoints of steps 10 and 20, and files to name."""
    run = Run(open_storage(str(tmp_path / "run")))
    for number in (10, 20):
        run.save(number, metrics={"loss": 1.0})
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n{broken\n')
    (tmp_path / "config.json").write_text(CONFIG)
    (tmp_path / "usage_trainer.py").write_text(TRAINER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # no cluster, wherever the tests run
    monkeypatch.setattr(cluster, "_ANSWER_S", 0.1)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.setattr("sys.path", list(sys.path))
    yield tmp_path
    sys.modules.pop("usage_trainer", None)


# -- what is missing --


def _required(path: tuple[str, ...]) -> list[Any]:
    return [param for param in ALL[path].params if param.required]


@pytest.mark.parametrize("path", [path for path in ALL if _required(path)], ids=" ".join)
def test_everything_that_is_missing_is_told_at_once(path: tuple[str, ...]) -> None:
    found = invoke(*path)
    assert found.exit_code == 2
    (line,) = [line for line in found.stderr.splitlines() if line.startswith("Error: ")]
    for param in _required(path):
        assert (param.opts[0] if param.param_type_name == "option" else param.metavar or param.name) in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "checkpoint export",
            "Missing argument 'RUN', argument 'DEST', option '--format' (choose from: {}).".format(
                "dcp, safetensors, peft, raysharded"
            ),
        ),
        ("checkpoint export r --format dcp", "Missing argument 'DEST'."),
        ("data pack", "Missing argument 'INPUT', argument 'OUTPUT'."),
        ("data pack in", "Missing argument 'INPUT'."),
        ("kill", "Missing argument 'RUN', option '--worker'."),
        ("completion", "Missing argument 'SHELL' (choose from: bash, zsh, fish)."),
        ("completion tcsh", "Invalid value for 'SHELL': 'tcsh' is not one of 'bash', 'zsh', 'fish'."),
    ],
)
def test_only_what_is_missing_is_told_to_be(arguments: str, message: str) -> None:
    assert f"Error: {message}" in invoke(*arguments.split()).stderr.splitlines()


@pytest.mark.parametrize(
    ("arguments", "name"), [("learning-rate r -1", "FACTOR"), ("rewind r -3 --skip-data", "STEP"), ("resize r -2", "N")]
)
def test_a_negative_number_is_a_value_and_no_option(arguments: str, name: str) -> None:
    (told,) = (line for line in invoke(*arguments.split()).stderr.splitlines() if line.startswith("Error: "))
    assert told.startswith(f"Error: Invalid value for '{name}': ")
    assert "range" in told or "greater than or equal" in told


def test_a_plan_of_a_config_names_all_numbers_that_it_needs(here: Path) -> None:
    assert "give --seq-len N, --global-batch-size N and --workers N." in invoke("plan", "config.json").stderr


# -- in the command's words --


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (f"{PLAN} --param-dtype int3", "--param-dtype int3: choose one of float32, bfloat16."),
        (f"{PLAN} --accumulation foo", "--accumulation foo: choose one of sharded, local."),
        (f"{PLAN} --workers-per-node 0", "--workers-per-node 0: give a whole number of 1 or more."),
        (f"{PLAN} --headroom 2", "--headroom 2.0: give a share of the memory from 0 to below 1, such as 0.1."),
        (
            f"{PLAN} --microbatch-size 3",
            "--global-batch-size 8 is not a multiple of --microbatch-size 3 (remainder 2). Take --global-batch-size 6.",
        ),
        (f"{PLAN} --device-memory 1KiB", "take a smaller microbatch, --activation-checkpointing or smaller units."),
        (
            "plan usage_trainer.py --global-batch-size 0",
            "--global-batch-size 0: give a whole number of 1 or more.",
        ),
        ("checkpoint export run out --format safetensors --dtype int7", "--dtype int7 is not a floating point dtype"),
        ("run usage_trainer.py --chaos foo", "--chaos foo: there is no fault 'foo'"),
        ("run usage_trainer.py run.max_steps=0", "run.max_steps=0: give a whole number of 1 or more."),
        ("run usage_trainer.py batch.seed=x", "batch.seed=x: give a whole number."),
        (
            "run usage_trainer.py batch.global_batch_size=5 batch.microbatch_size=2",
            "batch.global_batch_size=5 is not a multiple of batch.microbatch_size=2 (remainder 1). Take",
        ),
        (
            "run usage_trainer.py engine.param_dtype=int3",
            "engine.param_dtype=int3: choose one of float32, bfloat16.",
        ),
        ("check usage_trainer.py scaling.num_workers=0", "scaling.num_workers=0: give a number of 1 or more."),
    ],
)
def test_messages_of_the_library_speak_of_the_commands_options(here: Path, arguments: str, message: str) -> None:
    found = invoke(*arguments.split())
    assert found.exit_code in (1, 2)
    assert message in found.stderr


def test_a_checkpoint_that_exists_is_not_overwritten_and_no_option_is_named_that_does_not_exist(here: Path) -> None:
    for _ in range(2):
        found = invoke("checkpoint", "export", "run", "copy", "--format", "raysharded")
    assert found.exit_code == 1
    assert "is a checkpoint already" in found.stderr
    assert "overwrite=" not in found.stderr


WORDS = Wording(
    "pack",
    {
        "input_format": Option(written="--format", value="xml"),
        "steps": Option(written="--steps", value=3),
        "name": Option(written="NAME", value="a b"),
        "checked": Option(written="--checked", negative="--no-checked", is_switch=True),
        "unset": Option(written="--unset"),
    },
)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("pack: input_format='xml': choose one of None, 'text', 'jsonl'.", "--format xml: choose one of text, jsonl."),
        ("EngineConfig.steps=3: give 4.", "--steps 3: give 4."),
        ("Run.train.steps=3: give 4.", "--steps 3: give 4."),
        ("Some: steps=3 is too few. Take steps=4.", "--steps 3 is too few. Take --steps 4."),
        ("steps=5 in the file is too few", "steps=5 in the file is too few"),
        ("unset=3: give 4", "unset=3: give 4"),
        ("write Config(steps=3) in it", "write Config(steps=3) in it"),
        ("Run.fork: there is one.", "there is one."),
        ("input_format 'xml': there is none.", "--format xml: there is none."),
        ("there is no input_format 'xml'", "there is no input_format 'xml'"),
        ("name='a b': no spaces.", "NAME 'a b': no spaces."),
        ("try checked=True or checked=False.", "try --checked or --no-checked."),
        ("take another; or give overwrite=True.", "take another."),
    ],
)
def test_phrases_of_the_library_become_options(message: str, told: str) -> None:
    assert WORDS.of(message) == told


# -- nothing stays --


@pytest.mark.parametrize(
    "arguments",
    [
        "data pack none.txt out",
        "data pack b.jsonl out",
        "data pack a.txt out --tokenizer none.json",
        "data pack a.txt out --format parquet",
        "checkpoint export run out --format dcp --step 99",
        "checkpoint export run out --format dcp --names none",
        "checkpoint export run out --format raysharded --names none",
        "checkpoint export run out --format safetensors --names none",
        "checkpoint export run out --format safetensors --dtype int7",
        "checkpoint export run out --format safetensors --map none.json",
        "checkpoint export run out --format safetensors --config none.json",
        "checkpoint export run a.txt/out --format dcp",
        "checkpoint import none out",
        "checkpoint import a.txt out",
        "checkpoint import run out --format dcp",
        "checkpoint fork run out --step 99",
        "checkpoint fork run a.txt/out",
        "checkpoint pin run a/b",
        "checkpoint pin run tag --step 99",
        "checkpoint unpin run tag",
        "checkpoint gc none",
        "checkpoint gc run --keep-last 1 --keep-best none:min",
        "checkpoint verify none",
        "report none --html page.html",
        "report run --html none/page.html",
        "demo --workers 2 --storage out",
        "demo --chaos foo --storage out",
        "demo --json none/out.json --storage out",
        "demo --storage s3://bucket/runs",
        "demo --storage a.txt",
        "run usage_trainer.py run.start_from=none run.storage_path=out",
        "run usage_trainer.py run.storage_path=a.txt",
        "run usage_trainer.py --detach run.storage_path=out",
        "run usage_trainer.py --chaos foo run.storage_path=out",
        "check usage_trainer.py batch.seed=x",
        "doctor a.txt/out",
        "status none",
        "runs none",
        "replay none",
        "kill none --worker 0",
        "attach none",
        "fork none other",
    ],
)
def test_a_command_that_refuses_leaves_nothing_behind(
    here: Path, arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raysharded.cli.diagnostics.collectives", list)  # they take seconds
    before = everything_below(here)
    found = invoke(*arguments.split())
    retry_helps = arguments.startswith("run ") and ("storage_path=a.txt" in arguments or "--detach" in arguments)
    assert found.exit_code in ((75,) if retry_helps else (1, 2)), found.output
    assert found.exception is None or isinstance(found.exception, SystemExit)
    assert everything_below(here) == before


@pytest.mark.parametrize("to", ["dcp", "safetensors", "raysharded"])
def test_the_export_of_a_damaged_checkpoint_leaves_nothing_behind(here: Path, to: str) -> None:
    for file in (here / "run").rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    before = everything_below(here)
    assert invoke("checkpoint", "export", "run", "out", "--format", to).exit_code == 1
    assert everything_below(here) == before


# -- one, and several --

THINGS = (
    "checkpoints|documents|files|microbatches|nodes|parts|processes|replicas|runs|samples|segments|shards|steps|"
    "tensors|times|tokens|units|workers"
)


def test_one_thing_is_singular(here: Path) -> None:
    entries = [started(max_steps=1), data(), *generation(1, [0], 0), step(1, 1), finished(1)]
    write_run(here / "short", entries)
    told = "".join(
        invoke(*arguments.split()).output
        for arguments in (
            "report short",
            "status short",
            "runs short",
            "checkpoint show run",
            "checkpoint diff run run --step-a 10 --step-b 20",
            "checkpoint diff run run",
            "checkpoint export run out --format safetensors",
            "data pack a.txt packed",
            "data pack a.txt packed",
            "plan config.json --workers 1 --seq-len 8 --global-batch-size 1",
        )
    )
    assert "1 of 1 step\n" in told
    assert "1 tensor, " in told
    assert re.findall(rf"\b1 (?:[a-z]+ )?(?:{THINGS})\b", told, re.IGNORECASE) == []
