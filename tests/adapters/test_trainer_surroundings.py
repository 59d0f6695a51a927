"""Callbacks, early stopping, files, resumption, generation: what surrounds the loop of a `Trainer` in a session."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raysharded.driver.state.step_watch import LONG_PHASES
from raysharded.errors import InexactError, RayshardedError, TaskError
from raysharded.task import TrainFunction
from tests.adapters.plain import plain_trainer
from tests.adapters.programs import STEPS, Script, causal_lm, classifier, run, sentences, texts, translator, with_lora
from tests.training.harness import make_driver, make_limits
from tests.training.test_checkpoints import Listening, fingerprint, resume, small_job

pytestmark = pytest.mark.procs

EVERY_STEP: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}


def impatient() -> dict[str, Any]:
    """Ends at the first evaluation that is not better by 0.05 than the best."""
    from transformers import EarlyStoppingCallback

    patience = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.05)
    return {"eval_dataset": texts(5, first=100), "callbacks": [patience]}


def test_early_stopping_ends_the_run_with_the_step_of_the_plain_trainer(tmp_path: Path) -> None:
    make = partial(causal_lm, 0.0)
    plain = plain_trainer(str(tmp_path), make, texts(), impatient(), **EVERY_STEP)
    last = plain.state.global_step
    assert 2 < last < STEPS
    script = Script(make, given=impatient, **EVERY_STEP)
    found = run(2, script, kills=[(1, last, "apply")], done=last)
    for line in (line for line in plain.state.log_history if "eval_loss" in line):
        assert found.numbers[line["step"] - 1]["metrics"]["eval_loss"] == pytest.approx(line["eval_loss"], abs=1e-5)
    assert found.bits == run(1, script, done=last).bits


def witness(folder: str) -> dict[str, Any]:
    """A callback that writes down what it sees, and a metric's number that it has counted."""
    from transformers import TrainerCallback

    class Witness(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._note(state, f"begin {state.global_step} {state.epoch:.3f}")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._note(state, f"end {state.global_step} {state.epoch:.3f}")

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._note(state, f"epoch {state.epoch:.3f}")

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                self._note(state, f"log {state.global_step} {logs['loss']:.6f}")

        def _note(self, state: Any, line: str) -> None:
            if state.is_world_process_zero:
                with Path(folder, "seen").open("a") as file:
                    file.write(f"{line}\n")

    return {"callbacks": [Witness()]}


def test_callbacks_see_the_state_that_belongs_to_the_step_also_when_it_is_done_again(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("undisturbed", "disturbed")]
    for folder, kills in zip(folders, ([], [(1, 3, "apply")]), strict=True):
        folder.mkdir()
        run(2 if kills else 1, Script(given=partial(witness, str(folder)), logging_steps=2), kills=kills)
    undisturbed, disturbed = (folder.joinpath("seen").read_text().splitlines() for folder in folders)
    assert undisturbed[:3] == ["begin 0 0.000", "end 1 0.333", "begin 1 0.333"]
    assert [line for line in undisturbed if line.startswith("epoch")] == ["epoch 1.000", "epoch 2.000"]
    assert len(disturbed) > len(undisturbed)
    assert sorted(set(disturbed)) == sorted(set(undisturbed))
    begun = -1
    for line in disturbed:
        what, number, *_ = line.split()
        if what == "begin":
            begun = int(number)
        elif what == "end":
            assert int(number) == begun + 1


def look_at_the_end(folder: str, trainer: Any) -> None:
    """Lines of a script behind `train()`. While one worker writes the model, the others wait for longer than a step."""
    engine = trainer.session._training.engine
    assert engine.phase not in LONG_PHASES
    trainer.save_model()
    assert engine.phase in LONG_PHASES
    with Path(folder, "saved").open("a") as file:
        file.write(f"{trainer.session.rank}\n")
    trainer.model.save_pretrained(Path(folder, "by the model"))
    with Path(folder, "printed").open("a") as file:
        trainer.accelerator.print("saved", file=file)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_state()
    found = trainer.predict(sentences(5, first=200))
    with Path(folder, "predictions").open("a") as file:
        file.write(f"{found.predictions.shape} {found.predictions.sum()!r} {found.metrics['test_loss']!r}\n")


def pretrained() -> nn.Module:
    """A classifier in eval mode, as `from_pretrained` returns it."""
    return classifier(0.0).eval()


def held_out() -> dict[str, Any]:
    return {"eval_dataset": sentences(7, first=100)}


def test_lines_behind_train_find_the_whole_model_and_files_come_from_rank_0(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    make = pretrained
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    plain = plain_trainer(str(tmp_path / "plain"), make, sentences(), held_out())
    wanted = plain.evaluate()
    script = Script(make, sentences(), str(tmp_path), partial(look_at_the_end, str(tmp_path)), held_out, **saving)
    outcome = run(2, script, sentences())
    assert [fields["step"] for fields in outcome.of("checkpoint")] == [2, 4, 6]
    assert "eval mode" not in repr(outcome.entries)
    assert sorted((tmp_path / "saved").read_text().split()) == ["0", "1"]
    assert (tmp_path / "printed").read_text().splitlines() == ["saved"]
    written = [folder / "model.safetensors" for folder in (tmp_path, tmp_path / "by the model")]
    assert written[0].read_bytes() == written[1].read_bytes()
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    for name, value in plain.model.state_dict().items():
        assert torch.allclose(saved.state_dict()[name], value, atol=1e-5), name
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval_loss"] == pytest.approx(
        wanted["eval_loss"], abs=1e-5
    )
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert (state["global_step"], state["epoch"]) == (6, 2.0)
    lines = (tmp_path / "predictions").read_text().splitlines()
    assert len(lines) == 2
    assert len(set(lines)) == 1
    assert lines[0].startswith("(5, 3)")


def saved_and_merged(folder: str, trainer: Any) -> None:
    trainer.model.save_pretrained(folder)
    trainer.model.merge_and_unload()


def generated_behind(trainer: Any) -> None:
    trainer.model.generate(input_ids=torch.tensor([[3, 4]]), max_new_tokens=2)


def saved_by_rank_0(trainer: Any) -> None:
    if trainer.is_world_process_zero():
        trainer.model.save_pretrained("never written")


def test_a_model_that_rank_0_alone_would_write_ends_the_run_with_a_sentence() -> None:
    with pytest.raises(
        InexactError, match=r"1 of 2 workers call what gathers the whole model.*save_pretrained.*let all do"
    ):
        run(2, Script(behind=saved_by_rank_0, max_steps=1), steps=1)


def read_behind(trainer: Any) -> None:
    torch.nn.functional.embedding(torch.tensor([3, 4]), next(trainer.model.parameters()))


SENTENCE = r"each worker has a part of the model\. Use trainer\.save_model\(folder\), and merge or generate from"


def test_a_model_of_peft_writes_its_adapter_and_is_not_merged_in_parts(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    script = Script(with_lora, behind=partial(saved_and_merged, str(tmp_path)), max_steps=2)
    with pytest.raises(
        RayshardedError, match=rf"surroundings\.py:\d+: model\.merge_and_unload\(\): {SENTENCE}"
    ) as raised:
        run(2, script, retries=1, steps=2)
    assert "KeyError" not in str(raised.value)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    kept = {name.replace(".default", "") for name, _ in with_lora().named_parameters() if "lora" in name}
    assert weights.keys() == kept
    assert all(value.abs().sum() > 0 for value in weights.values())


def test_what_needs_the_whole_model_behind_the_loop_is_refused_by_the_line() -> None:
    with pytest.raises(RayshardedError, match=rf"surroundings\.py:\d+: model\.generate\(\): {SENTENCE}"):
        run(1, Script(with_lora, behind=generated_behind, max_steps=1), steps=1)
    with pytest.raises(
        TaskError, match=r"\.py:\d+: Script: each worker has a part of the model\..*got mixed torch\.Tensor"
    ):
        run(1, Script(behind=read_behind, max_steps=1), steps=1)


def test_a_run_is_resumed_with_another_number_of_workers_by_its_own_checkpoint(tmp_path: Path) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    interrupted = TrainFunction(Script(folder=str(tmp_path), given=power_cut, **saving))
    job = small_job(f"{tmp_path}/run", task=interrupted, steps=STEPS, data=texts())
    with pytest.raises(TaskError, match="the power is gone"):
        make_driver(job, make_limits(job, 2), Listening()).run()
    shuffled = TrainFunction(Script(data=texts()[::-1], folder=str(tmp_path), **saving))
    with pytest.raises(RayshardedError, match=r"Trainer's train_dataset has other rows than the run began with.*seed"):
        resume(job.run_url, 1, steps=STEPS, task=shuffled, data=texts())
    whole = TrainFunction(Script(folder=str(tmp_path), behind=partial(train_losses, str(tmp_path)), **saving))
    state, listener = resume(job.run_url, 1, steps=STEPS, task=whole, data=texts())
    assert 4 <= min(fields["step"] for fields in listener.of("step")) <= 5
    outcome = run(1, Script(behind=partial(train_losses, str(tmp_path))))
    assert fingerprint(state) == outcome.fingerprint
    assert len(set((tmp_path / "train loss").read_text().splitlines())) == 1


def power_cut() -> dict[str, Any]:
    from transformers import TrainerCallback

    class PowerCut(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 4:
                raise OSError("the power is gone")

    return {"callbacks": [PowerCut()]}


def train_losses(folder: str, trainer: Any) -> None:
    """Write down the mean loss of all steps, also of those before the run was resumed."""
    (line,) = [line for line in trainer.state.log_history if "train_loss" in line]
    with Path(folder, "train loss").open("a") as file:
        file.write(f"{line['train_loss']!r}\n")


def generated(folder: str, trainer: Any) -> None:
    found = trainer.predict(texts(3, first=200))
    assert trainer.session._training.engine.phase in LONG_PHASES
    with Path(folder, "generated").open("a") as file:
        file.write(f"{found.predictions.tolist()}\n")


def test_seq2seq_trainer_generates_the_same_on_every_worker(tmp_path: Path) -> None:
    script = Script(
        translator,
        behind=partial(generated, str(tmp_path)),
        kind="Seq2SeqTrainer",
        predict_with_generate=True,
        generation_max_length=6,
        max_steps=2,
    )
    assert run(2, script, steps=2, kills=[(1, 2, "backward")]).bits == run(1, script, steps=2).bits
    lines = (tmp_path / "generated").read_text().splitlines()
    assert len(lines) >= 2  # more if a worker joined between: its step is done again
    assert len(set(lines)) == 1
