"""Every command of the README and of docs/ is executed: here, or by the test that is named here.

A new command needs a line in one of the two tables. Those of HERE run in this process, in a folder that has the files
of the pages; runs take plain processes for workers instead of a Ray.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import raysharded as rs
from raysharded.cli import app, machine
from raysharded.testing import processes
from tests.cli.test_commands import succeed
from tests.docs.blocks import PAGES, all_commands, blocks, page
from tests.driver.recorded import recorded
from tests.driver.scripted import training
from tests.paths import ROOT
from tests.planning.configs import TINY
from tests.report.entries import run_with_a_loss, write_run

HERE: dict[str, dict[str, str]] = {
    "raysharded data pack --format text my_texts/ corpus/": {"corpus/": "packed/"},
    "raysharded data pack my_texts/ corpus/": {"corpus/": "packed/"},
    "raysharded data pack --format jsonl --text-field body --tokenizer tokenizer.json dump/ corpus/": {
        "corpus/": "packed/"
    },
    "raysharded data info corpus/ --seq-len 128": {},
    "raysharded data info corpus/ --documents": {},
    "raysharded plan train.py --workers 8 --workers-per-node 4 --device-memory 80GiB --host-memory 512GiB": {},
    "raysharded plan examples/train_gpt.py examples/train_gpt.yaml data.paths=corpus/ --workers 3": {
        "examples/": f"{ROOT}/examples/"
    },
    "raysharded report runs/gpt --html report.html": {"runs/gpt": "runs/bytes"},
    "raysharded wait runs/gpt --timeout 86400": {"runs/gpt": "runs/bytes"},
    "raysharded status s3://bucket/runs/gpt --follow": {"s3://bucket/runs/gpt": "runs/bytes"},
    "raysharded plan config.json --global-batch-size 512 --seq-len 4096 --workers 64 --device-memory 80GiB": {},
    "raysharded run train.py:trainer batch.global_batch_size=32 run.max_steps=2000": {"=2000": "=1", "=32": "=8"},
    "raysharded run train.py run.name=small scaling.num_workers=1,3": {},
    "raysharded run my.module:ByteGPT --config run.yaml": {},
    "raysharded report runs/bytes": {},
    "raysharded report runs/bytes --html report.html": {},
    "raysharded report s3://runs/bytes --json": {"s3://": ""},
    "raysharded replay runs/gpt-5m | less": {" | less": ""},
}
"""Command -> the replacements of its parts here: other folders, fewer steps."""

QUICKSTART = "tests/ray/test_quickstart.py::test_the_first_ten_minutes"
INSTALLED = "tests/packaging/test_install.py::test_the_lines_of_the_readme_install_it_and_its_first_example_runs"
ADAPTER = "tests/docs/test_python.py::test_an_adapter_is_trained_and_exported_as_the_guide_says"
EXAMPLES = "tests/examples/test_examples.py"
KUBERAY = "tests/packaging/test_kuberay_yaml.py::test_kuberays_schema_accepts_it"
ELSEWHERE = {
    "pip install .": INSTALLED,
    "python3 -m venv .venv && . .venv/bin/activate": INSTALLED,
    "pip install torch==2.13.0": INSTALLED,
    "pip install 'raysharded[tensorboard]'": "tests/docs/test_commands.py::test_every_extra_that_is_named_exists",
    "tensorboard --logdir curves": "tests/metrics/test_tensorboard.py::test_the_events_that_were_written_are_read_back",
    "raysharded check train.py": "tests/preflight/test_checks.py::"
    "test_a_task_that_keeps_the_promise_holds_with_everything_and_ends_with_0",
    "raysharded run train.py --detach": "tests/ray/test_hosted.py::"
    "test_a_detached_start_returns_when_the_driver_leads_the_run_or_with_its_refusal",
    "raysharded data arrange corpus/ --seq-len 2048": "tests/cli/test_commands.py::"
    "test_data_arrange_plans_what_pack_wrote_and_changes_no_plan_that_is_there",
    "raysharded data convert old_corpus/ corpus/": "tests/cli/test_commands.py::"
    "test_token_files_become_a_store_with_the_same_samples",
    "raysharded doctor": "tests/cli/test_commands.py::test_doctor_tries_what_a_run_needs_and_reports_what_it_found",
    "python examples/quickstart.py": f"{EXAMPLES}::test_the_quickstart_shows_a_loss_and_the_same_weights",
    "python examples/train_gpt.py examples/train_gpt.yaml data.paths=corpus/ run.storage_path=runs/": f"{EXAMPLES}::"
    "test_the_pretraining_script_takes_its_settings_from_the_file_and_survives_a_loss",
    "python train.py": QUICKSTART,
    "raysharded kill runs/first --worker 1": QUICKSTART,
    "raysharded status runs/first": QUICKSTART,
    "raysharded report runs/first": QUICKSTART,
    "raysharded report runs/first --html report.html": QUICKSTART,
    "raysharded run train.py run.name=undisturbed scaling.num_workers=1": QUICKSTART,
    "raysharded run train.py run.max_steps=400 scaling.num_workers=2": QUICKSTART,
    "raysharded checkpoint ls runs/first": QUICKSTART,
    "raysharded checkpoint verify runs/first": QUICKSTART,
    "raysharded checkpoint import llama base --map peft.json": ADAPTER,
    "raysharded checkpoint export runs/lora adapter --format peft --config lora/adapter_config.json": ADAPTER,
    "kubectl apply -f docs/kuberay.yaml": KUBERAY,
    "kubectl get rayjob gpt": KUBERAY,
    "kubectl logs -f job/gpt": KUBERAY,
}
"""Command -> the test that executes it, or the nearest thing that can be executed without a cluster in a cloud."""

TRAIN = """
import raysharded as rs
from tests.training.harness import SmallTask, samples

def trainer():
    return rs.ElasticTrainer(
        task=SmallTask(), data=samples(), batch=rs.BatchConfig(global_batch_size=4, microbatch_size=2),
        scaling=rs.ScalingConfig(num_workers=(1, 2)),
        run=rs.RunConfig(name="set", storage_path="runs", max_steps=1),
    )
"""
MODULE = """
from tests.training.harness import SmallTask

class ByteGPT(SmallTask):
    def __init__(self, layers):
        self.layers = layers
"""
SETTINGS = """
task: {layers: 2}
data: {paths: [corpus/], seq_len: 8}
batch: {global_batch_size: 4, microbatch_size: 2}
scaling: {num_workers: 1}
run: {name: from-yaml, storage_path: runs, max_steps: 1}
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the pages: texts, packed tokens, a tokenizer, trainers, and two runs."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "my_texts").mkdir()
    # Bytes of digits and spaces alone: tokens that the small model has.
    (folder / "my_texts" / "digits.txt").write_text(" ".join(map(str, range(2000))))
    (folder / "dump").mkdir()
    (folder / "dump" / "a.jsonl").write_text(json.dumps({"body": "hello world"}) + "\n")
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "train.py").write_text(TRAIN)
    (folder / "my").mkdir()
    (folder / "my" / "module.py").write_text(MODULE)
    (folder / "run.yaml").write_text(SETTINGS)
    succeed("data", "pack", folder / "my_texts", folder / "corpus")
    write_run(folder / "runs" / "bytes", run_with_a_loss())
    recorded(folder / "runs" / "gpt-5m", training(2, max_steps=10))
    return folder


@pytest.fixture
def workplace(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The prepared folder is the current one; a run's workers are plain processes; modules are forgotten afterwards."""

    def fit(trainer: rs.ElasticTrainer, **_: Any) -> rs.Result:
        return processes.fit(trainer)

    monkeypatch.chdir(prepared)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(rs.ElasticTrainer, "fit", fit)
    before = set(sys.modules)
    yield prepared
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("my", "train"):
            del sys.modules[name]


def test_every_command_is_executed_here_or_elsewhere() -> None:
    found = all_commands()
    assert len(found) > 25
    assert {command: pages for command, pages in found.items() if command not in HERE | ELSEWHERE} == {}
    assert sorted(HERE | ELSEWHERE) == sorted(found), "the tables have commands that are on no page any more"
    assert not set(HERE) & set(ELSEWHERE)


@pytest.mark.parametrize("test", sorted(set(ELSEWHERE.values())))
def test_the_test_that_executes_a_command_exists(test: str) -> None:
    file, _, name = test.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert re.search(rf"^def {name or 'test_'}", text, re.MULTILINE)


@pytest.fixture
def tokenizer(prepared: Path) -> None:
    """Write tokenizer.json."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<|endoftext|>": 0, "hello": 1}, unk_token="hello"))
    words.save(str(prepared / "tokenizer.json"))


@pytest.mark.parametrize("command", [command for command in HERE if not command.startswith("raysharded run ")])
def test_a_command_does_as_it_stands_there(command: str, workplace: Path, tokenizer: None) -> None:
    assert execute(command, workplace) != "" or "--html" in command
    if "--html" in command:
        assert "<!DOCTYPE html>" in (workplace / "report.html").read_text(encoding="utf-8")


@pytest.mark.procs
@pytest.mark.parametrize("command", [command for command in HERE if command.startswith("raysharded run ")])
def test_a_run_does_as_it_stands_there(command: str, workplace: Path) -> None:
    assert re.search(r"^run \S+: (1 step|2 steps), fingerprint \w{32}$", execute(command, workplace), re.MULTILINE)


def execute(command: str, folder: Path) -> str:
    """The output of a raysharded command; with its parts replaced, into a folder that does not exist yet."""
    for part, other in HERE[command].items():
        assert part in command
        command = command.replace(part, other)
    name, *arguments = shlex.split(command)
    assert name == "raysharded"
    if "packed/" in arguments:
        for old in (folder / "packed").glob("*"):
            old.unlink()
    return succeed(*arguments)


# -- names in the text --


def named() -> Iterator[tuple[str, list[str]]]:
    """(page, words) of every `raysharded ...` on a page, in the text and in blocks."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        spans = re.findall(r"`(raysharded [^`\n]+)`", text)
        lines = [line for language in ("bash", "") for block in blocks(path, language) for line in block.splitlines()]
        for span in [*spans, *(line for line in lines if line.startswith("raysharded "))]:
            yield path.name, re.sub(r"\s#.*| \|.*|[\[\]]", "", span).replace(",", " ").split()[1:]


def test_every_raysharded_command_that_is_named_exists_with_its_options() -> None:
    root = typer.main.get_command(app)
    seen = 0
    for where, words in named():
        command: Any = root  # typer's classes may or may not be click's own
        options = {name for parameter in root.params for name in parameter.opts} | {"--help"}
        for word in words:
            if hasattr(command, "commands") and not word.startswith("-") and word != "...":
                assert word in command.commands, f"{where}: raysharded {' '.join(words)}"
                command = command.commands[word]
                options |= {name for parameter in command.params for name in parameter.opts}
            elif word.startswith("--"):
                assert word.partition("=")[0] in options, f"{where}: raysharded {' '.join(words)}"
        seen += 1
    assert seen > 60


def test_every_extra_that_is_named_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    found = {extra for path in PAGES for extra in re.findall(r"(?:raysharded|\.)\[(\w+)\]", path.read_text("utf-8"))}
    assert found
    assert found <= set(extras)


def test_the_table_of_extras_is_complete_and_doctor_knows_each() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    rows = re.findall(r"^\| `pip install '\.\[(\w+)\]'` \|", page("quickstart.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(declared.keys() - {"dev", "docs", "bench"})  # those are for the repository itself
    assert machine.EXTRAS.keys() == set(rows)


def test_every_make_target_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    pages = [*PAGES, ROOT / "CONTRIBUTING.md"]
    found = {
        target
        for path in pages
        for target in re.findall(r"[`\n]make ([a-z][\w-]*)(?=[`\n]| DEMO| BENCH|  )", path.read_text("utf-8"))
    }
    assert len(found) > 5
    assert {target for target in found if f"\n{target}:" not in makefile} == set()
