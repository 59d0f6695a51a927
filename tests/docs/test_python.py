"""The Python of the documentation: every block compiles and names what exists, and nearly all of them run.

README.md, checkpoints.md, exchange.md, metrics.md and testing.md are run by tests in other folders.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import re
import shlex
import socket
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import raysharded as rs
from raysharded import checkpoint
from raysharded.ids import WorkerId
from raysharded.testing import Fault, FaultPlan, processes
from tests.cli.test_commands import succeed
from tests.docs.blocks import PAGES, blocks, commands, page, programs
from tests.driver.recorded import recorded
from tests.driver.scripted import training
from tests.paths import ROOT
from tests.report.entries import run_with_a_loss, write_run
from tests.training.harness import Collector, Tokens, samples

ELSEWHERE = {
    "README.md": "packaging/test_readme.py",
    "checkpoints.md": "checkpoint/state_dict/test_guide.py",
    "coming-from-hugging-face.md": "adapters/test_coming_from.py",
    "coming-from-torchtitan.md": "adapters/test_torchtitan.py",
    "exchange.md": "checkpoint/interop/test_docs.py",
    "metrics.md": "metrics/test_docs.py",
    "testing.md": "faults/test_docs.py",
    "quickstart.md": "ray/test_quickstart.py",
    "running.md": "ray/test_hosted.py",
}
HERE = {
    "coming-from-ray-train.md",
    "coming-from-torchft.md",
    "coming-from-torchrun.md",
    "format.md",
    "layouts.md",
    "own-loop.md",
    "planning.md",
    "report.md",
    "tasks.md",
    "troubleshooting.md",
}
COMING_FROM = sorted(name for name in HERE if name.startswith("coming-from-"))
THEIRS = "# "
"""Beginning of a block of another system's code."""
NOT_INSTALLED = {"ray.train", "ray.train.torch", "torchft", "torchdata.stateful_dataloader"}
"""Imports of the other systems' code besides torch; nothing here depends on them."""

ANNOTATIONS = """
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
"""
"""Imports that tasks.md leaves to the reader."""

Load = Callable[[str, str], ModuleType]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Makes a module of some code, in a folder where workers find it; it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = set()

    def module(name: str, code: str) -> ModuleType:
        Path(tmp_path, f"{name}.py").write_text(code, encoding="utf-8")
        made.add(name)
        return importlib.import_module(name)

    yield module
    for name in made:
        del sys.modules[name]


def test_every_page_with_python_is_run_somewhere() -> None:
    assert {path.name for path in PAGES if blocks(path, "python")} == HERE | set(ELSEWHERE)
    for name, test in ELSEWHERE.items():
        assert name in (ROOT / "tests" / test).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(HERE | set(ELSEWHERE)))
def test_every_block_compiles_and_names_what_exists(name: str) -> None:
    for block in blocks(page(name), "python"):
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rs":
                assert node.attr in rs.__all__, f"{name}: rs.{node.attr}"
            elif isinstance(node, ast.ImportFrom) and node.module and is_ours_or_torch(node.module):
                module = importlib.import_module(node.module)
                for one in node.names:
                    if not hasattr(module, one.name):
                        importlib.import_module(f"{node.module}.{one.name}")


def is_ours_or_torch(module: str) -> bool:
    return module.partition(".")[0] in ("raysharded", "torch")


# -- coming from --


def model_and_ours(name: str) -> tuple[str, str]:
    """The model that the three pages share, and the page's script for raysharded."""
    (model,) = (block for block in blocks(page("coming-from-ray-train.md"), "python") if "class Model" in block)
    (ours,) = (block for block in blocks(page(name), "python") if "rs.ElasticTrainer" in block)
    return model, ours


@pytest.mark.procs
@pytest.mark.parametrize("name", [*COMING_FROM, "own-loop.md"])
def test_our_side_trains(name: str, load: Load, tmp_path: Path) -> None:
    model, ours = model_and_ours(name)
    load("model", model)
    shown: rs.ElasticTrainer = load(name.removesuffix(".md").replace("-", "_"), ours).trainer
    trainer = rs.ElasticTrainer(
        task=shown.task,
        data=shown.data,
        batch=shown.batch,
        scaling=dataclasses.replace(shown.scaling, num_workers=shown.scaling.shard_group_size or 1, use_gpu=False),
        engine=rs.EngineConfig(prefetch=False),  # a worker reads its data itself
        run=dataclasses.replace(shown.run, storage_path=str(tmp_path / "runs"), max_steps=1),
    )
    result = processes.fit(trainer)
    assert result.steps == 1
    assert result.report().ok


@pytest.mark.parametrize("name", COMING_FROM)
def test_their_side_compiles_and_imports_nothing_unknown(name: str) -> None:
    (theirs,) = (block for block in blocks(page(name), "python") if block.startswith(THEIRS))
    imported = {node.module for node in ast.walk(ast.parse(theirs)) if isinstance(node, ast.ImportFrom) and node.module}
    for module in imported - NOT_INSTALLED - {"model"}:
        assert importlib.util.find_spec(module), module


class MeanLoss(rs.Task):
    """The task with the loss of the diffs' loops."""

    def __init__(self, model: Callable[[], torch.nn.Module]) -> None:
        self._model = model

    def build_model(self) -> torch.nn.Module:
        return self._model()

    def build_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-4)

    def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        logits = model(batch[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


TORCHRUN = "coming-from-torchrun.md"
KILLED = Fault(worker=WorkerId(1), step=2, phase="agree")


@pytest.mark.procs
@pytest.mark.parametrize(
    ("name", "workers", "faults"),
    [
        *((name, 2, (KILLED,)) if name == TORCHRUN else (name, 1, ()) for name in COMING_FROM),
        *(pytest.param(name, 2, (), marks=pytest.mark.long) for name in COMING_FROM if name != TORCHRUN),
        *(pytest.param(TORCHRUN, workers, (KILLED,), marks=pytest.mark.long) for workers in (3, 5, 8)),
    ],
)
def test_the_diff_of_a_loop_gives_a_session_with_the_bits_of_a_task(
    name: str, workers: int, faults: tuple[Fault, ...], load: Load, tmp_path: Path
) -> None:
    before, after = programs(page(name))
    assert before.startswith(THEIRS)
    model, _ = model_and_ours(name)
    made = load("model", model)
    shown: rs.ElasticTrainer = load(f"session_of_{name.removesuffix('.md').replace('-', '_')}", after).trainer
    plan = FaultPlan(faults=faults, folder=str(tmp_path))

    steps = 3 if faults else 1

    def found(task: rs.Task, workers: tuple[int, int], plan: FaultPlan | None = None) -> tuple[str, str | None]:
        """The numbers of the journal, and the fingerprint. A single worker reads its data itself."""
        journal = Collector()
        trainer = rs.ElasticTrainer(
            task=task,
            data=shown.data,
            batch=shown.batch,
            scaling=dataclasses.replace(shown.scaling, num_workers=workers, use_gpu=False),
            engine=rs.EngineConfig(prefetch=workers != (1, 1)),
            run=dataclasses.replace(shown.run, storage_path=str(tmp_path / type(task).__name__), max_steps=steps),
        )
        trainer.faults = plan
        result = processes.fit(trainer, journal)
        assert result.steps == steps
        return repr(sorted(journal.numbers.items())), result.fingerprint

    of_loop = found(shown.task, (1 if faults else workers, workers), plan)
    assert all(plan.fired(fault) for fault in faults)
    assert of_loop == found(MeanLoss(made.Model), (1, 1))


A_GPT = """
class GPT(torch.nn.Module):
    def __init__(self, vocabulary, layers, width):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, 8)
        self.head = torch.nn.Linear(8, vocabulary)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))
"""


def test_the_task_and_the_loop_of_the_readme_have_the_same_bits(load: Load, tmp_path: Path) -> None:
    code, trainer, _ = blocks(page("README.md"), "python")[0].partition("trainer = ")
    assert trainer
    made = load("readme_train", code.replace("class ByteGPT", f"{A_GPT}\n\nclass ByteGPT"))
    found = []
    for number, how in enumerate(({"task": made.ByteGPT()}, {"train_fn": made.train})):
        trained = rs.ElasticTrainer(
            data=[torch.arange(first, first + 9) % 257 for first in range(16)],
            batch=rs.BatchConfig(global_batch_size=8, microbatch_size=2),
            scaling=rs.ScalingConfig(num_workers=number + 1),
            run=rs.RunConfig(name=f"way{number}", storage_path=str(tmp_path / "ways"), max_steps=2),
            **how,
        )
        found.append(processes.fit(trained).fingerprint)
    assert found[0] == found[1] is not None


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_torchrun_s_side_runs_and_resumes(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the only rank, in this process: torchrun's own work is not tested."""
    (theirs,) = (block for block in blocks(page("coming-from-torchrun.md"), "python") if block.startswith(THEIRS))
    load("model", model_and_ours("coming-from-torchrun.md")[0])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for last in (2, 3):
        names: dict[str, Any] = {"__name__": "train"}
        run(theirs, "coming-from-torchrun.md", names)
        names["MAX_STEPS"] = last
        names["main"]()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]


def test_a_loop_of_ones_own_keeps_its_state_with_the_functions_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shown,) = (block for block in blocks(page("coming-from-torchrun.md"), "python") if "def newest_step" in block)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    run(shown, "coming-from-torchrun.md", names)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    assert names["newest_step"](model, optimizer) == 0
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for step in (5, 6):
        names["save"](model, optimizer, step)
    other = torch.nn.Linear(3, 2)
    assert names["newest_step"](other, torch.optim.AdamW(other.parameters())) == 6
    assert torch.equal(other.weight, model.weight)


# -- an adapter --


@pytest.mark.procs
@pytest.mark.long
def test_an_adapter_is_trained_and_exported_as_the_guide_says(load: Load, tmp_path: Path) -> None:
    """Takes longer than most: each process imports transformers."""
    peft = pytest.importorskip("peft", reason="needs `pip install peft`")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=67, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama", max_shard_size="5KB")
    base = transformers.LlamaForCausalLM.from_pretrained("llama")
    (shown,) = (block for block in blocks(page("exchange.md"), "python") if "get_peft_model" in block)
    (tmp_path / "peft.json").write_text(*blocks(page("exchange.md"), "json"))
    imports, exports = (line for line in commands(page("exchange.md")) if "peft" in line)

    succeed(*shlex.split(imports)[1:])
    trainer = rs.ElasticTrainer(
        task=load("adapt", f"import torch\n{shown}").Adapt(),
        data=samples(),
        batch=rs.BatchConfig(global_batch_size=4, microbatch_size=2),
        scaling=rs.ScalingConfig(num_workers=1),
        run=rs.RunConfig(name="lora", storage_path=str(tmp_path / "runs"), max_steps=2, start_from="base"),
    )
    trained = checkpoint.open(processes.fit(trainer).checkpoint)
    succeed(*shlex.split(exports)[1:])
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
    }
    adapted = peft.PeftModel.from_pretrained(base, "adapter").state_dict()
    assert {f"model.{name}" for name in adapted} == {name for name in trained.tensors if name.startswith("model.")}
    for name, value in adapted.items():  # the adapter's, from its files; and the base model's, which the run left
        assert torch.equal(trained.read(f"model.{name}"), value), name
    assert any(value.abs().sum() > 0 for name, value in adapted.items() if ".lora_B." in name), "drawn as zeros"


# -- the other pages --


def run(code: str, name: str, names: dict[str, Any]) -> None:
    exec(compile(code, name, "exec"), names)  # noqa: S102 - our own documentation


@pytest.mark.procs
def test_the_tasks_of_the_guide_train(load: Load, tmp_path: Path) -> None:
    left_out = ("held_out", "transformers", "FromFolder")  # tests/adapters/test_from_pretrained.py runs the latter
    shown = [block for block in blocks(page("tasks.md"), "python") if not any(word in block for word in left_out)]
    module = load("tasks_of_the_guide", "\n".join([ANNOTATIONS, *shown]))
    held_out = {"rs": rs, "held_out": module.Pairs()}
    run(next(block for block in blocks(page("tasks.md"), "python") if "held_out" in block), "tasks.md", held_out)
    for task in (module.Wrapped, module.Large):
        trainer = rs.ElasticTrainer(
            task=task(vocab_size=50, width=16, steps=2),
            data=module.Pairs(),
            batch=rs.BatchConfig(global_batch_size=8, microbatch_size=2),
            scaling=rs.ScalingConfig(num_workers=1),
            run=rs.RunConfig(name=task.__name__, storage_path=str(tmp_path / "runs"), max_steps=2),
            engine=rs.EngineConfig(prefetch=task is module.Wrapped),  # else a worker reads its data itself
            evaluation=dataclasses.replace(held_out["evaluation"], every_steps=1, num_samples=5),
        )
        report = processes.fit(trainer).report()
        assert report.ok
        assert {"blocks.*.up", "blocks.*.down"} == set(module.Parallel(50, 16, 2).parallelize(None, None))


@pytest.mark.procs
def test_texts_are_tokenized_beside_training_as_in_the_guide(load: Load, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(("<unk>", "one", "two", "three"))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    shown = [block for block in blocks(page("tasks.md"), "python") if "class NextToken" in block or "OfTexts" in block]
    code = "\n".join(shown).replace('"tokenizer.json"', repr(f"{tmp_path}/tokenizer.json"))
    module = load("texts_of_the_guide", code)
    texts = [" ".join(["one", "two", "three"][: 2 + number % 2] * (1 + number % 5)) for number in range(30)]
    padded = module.OfTexts(50, 16, 2).collate(texts[:2])
    assert padded["targets"].tolist() == [[2, -100, -100, -100, -100], [2, 3, 1, 2, 3]]
    ahead = [{key: rows[0] for key, rows in module.OfTexts(50, 16, 2).collate([text]).items()} for text in texts]
    found = []
    for number, (task, data, workers, data_processes) in enumerate(
        ((module.NextToken, ahead, 1, None), (module.OfTexts, texts, 1, None), (module.OfTexts, texts, 2, 2))
    ):
        trainer = rs.ElasticTrainer(
            task=task(vocab_size=50, width=16, steps=2),
            data=data,
            batch=rs.BatchConfig(global_batch_size=4, microbatch_size=1),
            scaling=rs.ScalingConfig(num_workers=workers),
            engine=rs.EngineConfig(data_processes=data_processes),
            run=rs.RunConfig(name=str(number), storage_path=str(tmp_path / "runs"), max_steps=2),
        )
        found.append(processes.fit(trainer).fingerprint)
    assert found[0] == found[1] == found[2] is not None


def test_the_incident_of_the_guide_happens_as_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recorded(tmp_path / "runs" / "gpt-5m", training(2, max_steps=10))
    for block in blocks(page("troubleshooting.md"), "python"):
        run(block, "troubleshooting.md", {})
    assert "Traceback" not in capsys.readouterr().out


def test_a_run_is_shown_in_a_notebook_and_as_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "bytes", run_with_a_loss())
    for block in blocks(page("report.md"), "python"):
        run(block, "report.md", {})
    assert "'step': " in capsys.readouterr().out


def test_a_checkpoint_s_file_is_read_as_the_format_describes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = checkpoint.save(tmp_path / "step-1", torch.nn.Linear(3, 2), step=1)
    (data,) = Path(saved.uri).rglob("*.safetensors")
    data.rename(tmp_path / "w0000.safetensors")
    monkeypatch.chdir(tmp_path)
    (block,) = blocks(page("format.md"), "python")
    run(block, "format.md", {})
    assert re.search(r"^weight 0\S* torch.Size\(\[2, 3\]\)$", capsys.readouterr().out, re.MULTILINE)


def test_a_layout_is_planned_as_in_the_guide() -> None:
    from raysharded.planning.plans import setting_of_task
    from tests.training.harness import GptTask

    batch = rs.BatchConfig(global_batch_size=16, microbatch_size=2)
    setting = setting_of_task(GptTask(), Tokens(), batch, rs.EngineConfig(), on_gpu=False, checkpoints=False)
    names: dict[str, Any] = {"shapes": setting.shapes, "trace": setting.trace}
    (block,) = blocks(page("planning.md"), "python")
    run(block, "planning.md", names)
    assert names["memory"].device > 0


def test_the_settings_of_the_layouts_are_accepted() -> None:
    for block in blocks(page("layouts.md"), "python"):
        names: dict[str, Any] = {"rs": rs}
        run(textwrap.dedent(block), "layouts.md", names)
        assert isinstance(names["scaling"], rs.ScalingConfig)
