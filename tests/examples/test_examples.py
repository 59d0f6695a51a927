"""The examples, run in a small form: with the real driver and worker processes, and through Ray as a user does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raysharded import BatchConfig, ScalingConfig
from raysharded.checkpoint import list_checkpoints, open_storage
from raysharded.data.pack import pack
from raysharded.ids import WorkerId
from raysharded.testing import Fault, FaultPlan
from raysharded.testing.faults import READY
from raysharded.testing.processes import fit
from tests.cases import tried_each_time
from tests.paths import ROOT

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb", ".yaml"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A few thousand bytes of text, packed."""
    folder = tmp_path_factory.mktemp("corpus")
    pack(str(EXAMPLES / "train_gpt.py"), str(folder), input_format="text")
    return str(folder)


def ready_after(other: int, worker: int) -> Fault:
    """The worker is ready only when the other one has started, too."""
    return Fault(worker=WorkerId(worker), step=0, phase=READY, kind="wait", until=WorkerId(other))


TOGETHER = (ready_after(0, 1), ready_after(1, 0))
"""The first generation of two workers has both, however late one starts."""


def test_no_example_is_longer_than_a_person_reads() -> None:
    assert {"quickstart.py", "train_gpt.py", "finetune_hf.py", "spot_s3.py", "notebook.ipynb"} <= set(SCRIPTS)
    for name in SCRIPTS:
        text = (EXAMPLES / name).read_text(encoding="utf-8")
        if name.endswith(".ipynb"):
            cells = json.loads(text)["cells"]
            assert not any(cell.get("outputs") for cell in cells), f"{name}: commit it without outputs"
            text = "".join("".join([*cell["source"], "\n"]) for cell in cells)
        assert len(text.splitlines()) < 150, name


@pytest.mark.procs
def test_the_pretraining_script_takes_its_settings_from_the_file_and_survives_a_loss(
    corpus: str, tmp_path: Path
) -> None:
    from examples.train_gpt import trainer

    def made(name: str, workers: str) -> Any:
        return trainer(
            str(EXAMPLES / "train_gpt.yaml"),
            f"data.paths={corpus}",
            "data.seq_len=16",
            'task={"vocab_size": 257, "seq_len": 16, "width": 16, "layers": 1, "total_steps": 2}',
            f"scaling.num_workers={workers}",
            f"run.name={name}",
            f"run.storage_path={tmp_path}",
            "run.max_steps=2",
            "engine.prefetch=false",  # no process that reads has to start
        )

    undisturbed = fit(made("undisturbed", "1"))
    disturbed = made("disturbed", "[1, 2]")
    kill = Fault(worker=WorkerId(1), step=2, phase="backward", kind="kill")
    disturbed.faults = FaultPlan(faults=(*TOGETHER, kill), folder=str(tmp_path))
    assert (disturbed.batch.num_microbatches, disturbed.run.checkpoint.every_steps) == (8, 50)  # the file's
    assert fit(disturbed).fingerprint == undisturbed.fingerprint
    assert disturbed.faults.fired(kill)


LEARNED = {40: 3.3, 60: 3.0}
"""Steps -> the loss of the own loop is below this."""


@pytest.mark.procs
@pytest.mark.parametrize("steps", tried_each_time([40], LEARNED))
def test_the_own_loop_learns_and_ends_with_the_same_bits_when_one_of_two_workers_is_killed(
    tmp_path: Path, steps: int
) -> None:
    from examples.own_loop import trainer

    undisturbed, disturbed = trainer(str(tmp_path / "one"), steps), trainer(str(tmp_path / "two"), steps)
    undisturbed.scaling = ScalingConfig(num_workers=1)
    undisturbed.engine = replace(undisturbed.engine, prefetch=False)  # no process that reads has to start
    kill = Fault(worker=WorkerId(1), step=steps // 2, phase="backward", kind="kill")
    disturbed.faults = FaultPlan(faults=(*TOGETHER, kill), folder=str(tmp_path))
    one, two = fit(undisturbed), fit(disturbed)
    assert disturbed.faults.fired(kill)
    assert one.fingerprint == two.fingerprint
    assert two.loss is not None
    assert two.loss < LEARNED[steps]  # 3.42 in the first step


def test_without_a_corpus_the_pretraining_script_packs_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from examples import train_gpt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_gpt, "standard_library_sources", lambda: [str(EXAMPLES / "train_gpt.py")])
    trainer = train_gpt.trainer("run.max_steps=3")
    assert (trainer.run.max_steps, trainer.data.vocab_size) == (3, 257)
    assert list((tmp_path / "corpus").glob("*.tokens"))


@pytest.mark.procs
def test_packed_documents_train_with_the_same_bits_at_one_worker_and_two(tmp_path: Path) -> None:
    from examples.train_packed import trainer
    from raysharded.data.packed.arrange import arrange

    pack([str(path) for path in EXAMPLES.glob("*.py")], str(tmp_path / "store"), input_format="text")
    arrange(tmp_path / "store", seq_len=64)

    def made(workers: int) -> Any:
        trained = trainer(str(tmp_path / "store"), str(tmp_path / str(workers)), seq_len=64, steps=2, width=16)
        trained.scaling = ScalingConfig(num_workers=workers)
        return trained

    one, two = fit(made(1)), fit(made(2))
    assert one.steps == 2
    assert one.fingerprint == two.fingerprint


def test_a_document_does_not_see_another_in_the_packed_example() -> None:
    torch = pytest.importorskip("torch")
    from examples.train_packed import GPT, document_mask

    torch.manual_seed(0)
    model = GPT(20, 8, 16, 2, 4).eval()
    ids = torch.randint(0, 20, (1, 8))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]])
    packed = model(ids, positions, document_mask(documents))
    alone = model(ids[:, 3:7], positions[:, 3:7], document_mask(documents[:, 3:7]))
    assert torch.allclose(packed[3:7], alone, atol=1e-6)
    causal = model(ids, torch.arange(8)[None], document_mask(torch.zeros_like(documents)))
    assert not torch.allclose(causal[3:7], alone, atol=1e-2)


@pytest.mark.procs
@pytest.mark.parametrize("preferences", tried_each_time([True], [True, False]), ids=["preferences", "conversations"])
def test_samples_of_any_length_train_with_the_same_bits_at_one_worker_and_two(
    tmp_path: Path, preferences: bool
) -> None:
    from examples.finetune_chat import trainer

    def made(workers: int) -> Any:
        trained = trainer(str(tmp_path / str(workers)), preferences=preferences, steps=2, width=16)
        trained.scaling = ScalingConfig(num_workers=workers)
        return trained

    assert fit(made(1)).fingerprint == fit(made(2)).fingerprint


def test_only_the_assistants_tokens_count_in_a_conversation() -> None:
    from examples.finetune_chat import Chat, collated, encoded

    torch = pytest.importorskip("torch")
    one = encoded([("user", "ab"), ("assistant", "cd")])
    assert one["input_ids"].tolist() == [256, *b"ab", 256, *b"cd"]
    assert one["labels"].tolist() == [-100, -100, -100, *b"cd", 256]
    torch.manual_seed(0)
    task = Chat(16)
    model = task.build_model().eval()
    longer = encoded([("user", "a longer question, with more words"), ("assistant", "yes")])
    alone, both = task.loss(model, collated([one])), task.loss(model, collated([one, longer]))
    rest = task.loss(model, collated([longer]))
    assert (int(alone.weight), int(both.weight)) == (3, 3 + 4)
    assert torch.allclose(both.total, alone.total + rest.total, atol=1e-4)


def test_the_preference_loss_is_that_of_plain_torch_pair_by_pair() -> None:
    """As the paper writes it, without padding: -log sigmoid(beta (log-ratio of the better - that of the worse))."""
    from examples.finetune_chat import BETA, Preferences, encoded

    torch = pytest.importorskip("torch")
    question = ("user", "What is 7 plus 8?")
    pairs = [
        {"better": encoded([question, ("assistant", better)]), "worse": encoded([question, ("assistant", worse)])}
        for better, worse in (("15.", "I do not know."), ("7 plus 8 is 15. Ask me more!", "16"), ("15", "No."))
    ]
    torch.manual_seed(0)
    task = Preferences(16)
    model = task.build_model().double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # as sure of some answers as a trained one

    def log_probability(sample: Any) -> Any:
        ids, labels = (torch.from_numpy(sample[key]) for key in ("input_ids", "labels"))
        each = model(ids[None]).log_softmax(-1)
        return sum(each[place, token] for place, token in enumerate(labels.tolist()) if token != -100)

    reference = -12.5  # one probability for all answers
    ratios = [[log_probability(pair[which]) - reference for which in ("better", "worse")] for pair in pairs]
    expected = -sum(torch.log(1 / (1 + torch.exp(-BETA * (better - worse)))) for better, worse in ratios)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    found = task.loss(model, task.collate(pairs))
    assert torch.allclose(found.total.double(), expected, rtol=1e-5)
    gradients = torch.autograd.grad(found.total, list(model.parameters()))
    assert all(torch.allclose(mine, true, rtol=1e-4, atol=1e-6) for mine, true in zip(gradients, wanted, strict=True))
    assert any(true.abs().max() > 1e-3 for true in wanted)
    assert int(found.weight) == len(pairs)
    right, number = found.metrics["right"]
    assert (int(right), int(number)) == (sum(bool(better > worse) for better, worse in ratios), len(pairs))


@pytest.mark.procs
def test_the_llama_trains_in_tensor_parallel_pairs(corpus: str, tmp_path: Path) -> None:
    from examples.train_llama import NextToken
    from raysharded.cli.settings import apply, read_settings

    small = '{"vocab_size": 257, "width": 16, "layers": 1, "heads": 4, "kv_heads": 2}'
    changes = (f"data.paths={corpus}", "data.seq_len=16", "run.max_steps=2", f"run.storage_path={tmp_path}")
    settings = read_settings(str(EXAMPLES / "train_llama.yaml"), (*changes, f"task={small}", "scaling.num_workers=2"))
    result = fit(apply(NextToken, settings))
    assert result.steps == 2
    assert [generation.mesh for generation in result.report().summary.generations] == ["1x1x2"]


def use(environment: dict[str, str]) -> None:
    """Set the environment in a worker's process, before anything else."""
    os.environ.update(environment)


@pytest.mark.s3
@pytest.mark.procs
def test_a_run_on_spot_workers_keeps_on_s3_what_it_should_and_loses_nothing(
    corpus: str, s3_url: str, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    from examples.spot_s3 import trainer
    from raysharded.demo.model import ByteGPT
    from raysharded.testing.processes import ProcessLauncher

    spot = trainer(corpus, s3_url, cloud="gcp", steps=24, save_every=2, workers=(2, 3), logs=str(tmp_path / "logs"))
    spot.task = ByteGPT(layers=1, width=32, seq_len=128, total_steps=24)
    spot.batch = BatchConfig(global_batch_size=4, microbatch_size=1)
    kill = Fault(worker=WorkerId(1), step=3, phase="backward", kind="kill")
    leave = Fault(worker=WorkerId(0), step=6, phase="data", kind="term")
    spot.faults = FaultPlan(faults=(kill, leave), folder=str(tmp_path))
    credentials = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    prepare = dict.fromkeys(map(WorkerId, range(20)), partial(use, credentials))
    result = spot.start_with(partial(ProcessLauncher, prepare=prepare)).wait(240)

    assert spot.faults.fired(kill)
    assert spot.faults.fired(leave)
    report = result.report()
    assert report.ok
    assert len(report.summary.recoveries) == 1
    kept = [found.step for found in list_checkpoints(open_storage(result.url))]
    assert kept[-1] == 24
    assert 2 <= len(kept) < len(report.summary.checkpoints)  # two; the deletion of others may wait for slow storage
    assert list((tmp_path / "logs" / "spot").glob("events.out.tfevents.*"))


@pytest.mark.ray
@pytest.mark.clusters
def test_the_quickstart_shows_a_loss_and_the_same_weights(tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_ADDRESS": "local", "RAY_TMPDIR": "/tmp", "TMPDIR": str(tmp_path)}
    environment["PYTHONPATH"] = str(ROOT)
    script = (EXAMPLES / "quickstart.py").read_text(encoding="utf-8")
    for text, other in (
        ("\nSTEPS = 60\n", "\nSTEPS = 16\n"),
        # The first generation has worker 1 and one more, however late they start.
        ("(1, workers)", "(min(2, workers), workers)"),
        ("faults=(kill,)", f"faults=({ready_after(1, 0)!r}, {ready_after(1, 2)!r}, kill)"),
    ):
        assert text in script
        script = script.replace(text, other)
    (tmp_path / "quickstart.py").write_text(script, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "quickstart.py")],
        capture_output=True,
        text=True,
        timeout=290,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    told = "on a separate Ray on this machine (as RAY_ADDRESS=local says): starting it, then 3 workers\n"
    assert ran.stderr.startswith(told)
    assert "worker 1 lost: its process ended silently: killed (SIGKILL, " in ran.stderr
    assert "step 8: recovered" in ran.stderr
    fingerprints = re.findall(r"^(?:3 workers|1 worker), .*: +([0-9a-f]{32})$", ran.stdout, re.MULTILINE)
    assert len(fingerprints) == 2, ran.stdout
    assert fingerprints[0] == fingerprints[1]
