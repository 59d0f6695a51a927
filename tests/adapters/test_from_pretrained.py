"""Models of `from_pretrained` as tasks.md shows them: how often they are built, with which bits; generation; the
example; an iterable dataset of Hugging Face."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import raysharded as rs
from raysharded.checkpoint import list_checkpoints, open_storage
from raysharded.checkpoint.interop import import_huggingface, place_of
from raysharded.data.pack import pack
from raysharded.errors import InexactError
from raysharded.ids import WorkerId
from raysharded.locations import join_url
from raysharded.report import load
from raysharded.testing import Fault, FaultPlan
from raysharded.testing.processes import fit
from tests.docs.blocks import blocks, page
from tests.paths import ROOT
from tests.training.harness import GptTask
from tests.training.test_mixture_runs import TokenShards, source, trained as trained_on

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.procs

CODE = """
import os
import torch
import torch.nn.functional as F
from torch import nn
import raysharded as rs

{shown}


class Counted(Generating):
    def build_model(self):
        model = super().build_model()
        where = "meta" if next(model.parameters()).is_meta else "whole"
        with open(self.folder + "-builds", "a") as log:
            print(os.getpid(), where, file=log)
        return model


class FromConfig(FromFolder):
    def build_model(self):
        from transformers import AutoConfig
        config = AutoConfig.from_pretrained(self.folder)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


class EndsEarly(FromFolder):
    def evaluate(self, model, batch):
        ends = list(range(20))  # so many tokens that some texts end soon
        model.generate(batch[:, :4], max_new_tokens=20, do_sample=True, eos_token_id=ends, pad_token_id=0)
        return self.loss(model, batch)
"""
VOCABULARY = 67


TEXTS = [np.random.default_rng(index).integers(0, VOCABULARY, 9) for index in range(64)]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The tasks of the guide, and others made of them."""
    shown = [block for block in blocks(page("tasks.md"), "python") if "FromFolder" in block]
    assert len(shown) == 2
    (tmp_path / "tasks_of_hugging_face.py").write_text(CODE.format(shown="\n\n".join(shown)), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("tasks_of_hugging_face")
    del sys.modules["tasks_of_hugging_face"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder as `save_pretrained` writes it, in several files."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model", max_shard_size="5KB")
    return str(tmp_path / "model")


def trained(task: rs.Task, folder: Path, name: str, workers: int, *, evaluates: bool = False, **run: Any) -> rs.Result:
    return fit(
        rs.ElasticTrainer(
            task=task,
            data=TEXTS,
            batch=rs.BatchConfig(global_batch_size=8, microbatch_size=2),
            scaling=rs.ScalingConfig(num_workers=workers),
            run=rs.RunConfig(name=name, storage_path=str(folder / "runs"), max_steps=2, **run),
            evaluation=rs.EvalConfig(data=TEXTS, every_steps=1, num_samples=8) if evaluates else None,
        )
    )


def test_from_pretrained_begins_with_its_weights_at_every_size_as_an_import_does(
    tmp_path: Path, module: ModuleType, model: str
) -> None:
    """Evaluations sample the same texts at every size, and change nothing."""
    one, two = (
        trained(module.Counted(model), tmp_path, f"on-{workers}", workers, evaluates=True) for workers in (1, 2)
    )
    assert one.evaluation == two.evaluation
    assert one.evaluation.keys() == {"loss", "as_in_the_data"}
    import_huggingface(place_of(model), place_of(str(tmp_path / "base")))
    given = trained(module.FromConfig(model), tmp_path, "imported", 1, start_from=str(tmp_path / "base"))
    drawn = trained(module.FromConfig(model), tmp_path, "drawn", 1)
    assert one.fingerprint == two.fingerprint == given.fingerprint != drawn.fingerprint
    builds: dict[str, list[str]] = {}
    for line in Path(f"{model}-builds").read_text().splitlines():
        builds.setdefault(line.split()[0], []).append(line.split()[1])
    assert str(os.getpid()) not in builds
    assert list(builds.values()) == [["meta", "meta", "whole"]] * 3  # one worker, then two


def test_a_text_that_ends_before_others_is_refused(tmp_path: Path, module: ModuleType, model: str) -> None:
    with pytest.raises(InexactError, match=r"forward of the evaluation after step 1, microbatch \d comes to"):
        trained(module.EndsEarly(model), tmp_path, "early", 1, evaluates=True)


def test_the_example_fine_tunes_a_model_from_a_folder_with_the_same_bits_at_one_worker_and_two(tmp_path: Path) -> None:
    from examples import finetune_hf

    corpus = str(tmp_path / "corpus")
    pack(str(ROOT / "examples" / "train_gpt.py"), corpus, input_format="text")
    torch.manual_seed(3)
    start = transformers.LlamaForCausalLM(finetune_hf.SMALL)
    start.save_pretrained(tmp_path / "start", max_shard_size="40KB")

    def made(name: str, workers: int, model: Path | None) -> Any:
        runs, weights = str(tmp_path / name), None if model is None else str(model)
        trainer = finetune_hf.trainer(corpus, corpus, runs, model=weights, steps=2, seq_len=16)
        trainer.scaling = rs.ScalingConfig(num_workers=workers)
        trainer.batch = rs.BatchConfig(global_batch_size=8, microbatch_size=2)
        assert trainer.evaluation is not None
        trainer.evaluation = replace(trainer.evaluation, num_samples=8)
        return trainer

    evaluated: list[int] = []

    def listen(kind: str, fields: dict[str, Any]) -> None:
        if kind == "step" and fields.get("evaluation"):
            evaluated.append(fields["step"])

    one, two = fit(made("one", 1, tmp_path / "start"), listen), fit(made("two", 2, tmp_path / "start"))
    assert one.fingerprint == two.fingerprint
    torch.manual_seed(4)
    random = made("random", 1, None).task.build_model()  # without a folder
    assert not any(
        torch.equal(a, b) for a, b in zip(random.parameters(), start.parameters(), strict=True) if a.dim() > 1
    )

    finetune_hf.export(two, made("two", 2, tmp_path / "start").task, str(tmp_path / "out"))
    tuned, notes = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(notes[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    moved = torch.cat([(a - b).abs().flatten() for a, b in zip(tuned.parameters(), start.parameters(), strict=True)])
    assert 0 < moved.max() < 2 * 3 * 2e-5  # two steps of AdamW from the weights of the folder
    assert evaluated == [1, 2]
    best = two.best_checkpoint
    assert best is not None
    assert (best.step, best.value) == (2, two.evaluation["loss"])

    worse = replace(two, best_checkpoint=replace(best, step=1, url=first_checkpoint(two)))
    finetune_hf.export(worse, made("two", 2, tmp_path / "start").task, str(tmp_path / "best"))
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    assert not all(torch.equal(a, b) for a, b in zip(exported.parameters(), tuned.parameters(), strict=True))


def first_checkpoint(result: rs.Result) -> str:
    """The folder of a run's oldest checkpoint."""
    storage = open_storage(result.url)
    return join_url(result.url, list_checkpoints(storage)[0].prefix)


class RowTask(GptTask):
    """Trains on rows that are lists or arrays, or dicts with one."""

    def collate(self, samples: list[Any]) -> Any:
        return torch.tensor(np.stack([one["tokens"] if isinstance(one, dict) else one for one in samples]))


@pytest.mark.long
def test_an_iterable_dataset_of_hugging_face_trains_the_bits_of_its_rows_when_a_worker_is_killed(
    tmp_path: Path,
) -> None:
    """The second epoch begins in the step of the loss."""
    datasets = pytest.importorskip("datasets")
    rows, steps = source(4, 3 * 11), 4
    plain = rs.Stream(TokenShards([rows[:11], rows[11:22], rows[22:]]), states=tmp_path / "states of one", every=5)
    undisturbed, alone = trained_on(f"{tmp_path}/alone", steps, workers=1, data=plain, task=RowTask())
    given = datasets.Dataset.from_dict({"tokens": [row.tolist() for row in rows]}).to_iterable_dataset(num_shards=3)
    fault = Fault(worker=WorkerId(1), step=3, phase="backward")
    plan = FaultPlan(faults=(fault,), folder=str(tmp_path))
    streamed = rs.Stream(given, states=tmp_path / "states", every=5)
    state, some = trained_on(f"{tmp_path}/run", steps, workers=2, data=streamed, plan=plan, task=RowTask())
    assert plan.fired(fault)
    assert state.result_fingerprint == undisturbed.result_fingerprint
    assert repr(sorted(some.numbers.items())) == repr(sorted(alone.numbers.items()))
    assert load(f"{tmp_path}/run").ok
    assert len(list((tmp_path / "states").rglob("*.json"))) >= 3
