"""Arguments of a `Trainer` that a session cannot keep are refused by their names, each with the way out."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler

import raysharded as rs
from raysharded.actors.session.held_out import refuse_numbers
from raysharded.adapters.hf_arguments import require_data, require_steps, require_supported, require_to_build
from raysharded.adapters.replaced_methods import HUGGING_FACE, TORCHTITAN, require_own_methods
from raysharded.errors import ConfigError, RayshardedError
from tests.adapters.programs import (
    MICROBATCHES,
    SIZE,
    STEPS,
    Script,
    arguments,
    causal_lm,
    padded,
    run,
    texts,
    with_lora,
)

BATCH = rs.BatchConfig(global_batch_size=SIZE * MICROBATCHES, microbatch_size=SIZE)

SETTINGS: dict[str, Any] = {
    "auto_find_batch_size": True,
    "average_tokens_across_devices": False,
    "bf16_full_eval": True,
    "deepspeed": {"zero_optimization": {"stage": 2}},
    "enable_jit_checkpoint": True,
    "eval_on_start": True,
    "fp16": True,
    "fp16_full_eval": True,
    "fsdp": "full_shard",
    "gradient_accumulation_steps": 3,
    "include_num_input_tokens_seen": "all",
    "load_best_model_at_end": True,
    "optim": "adalomo",
    "parallelism_config": object(),
    "per_device_train_batch_size": 8,
    "push_to_hub": True,
    "torch_compile": True,
    "train_sampling_strategy": "group_by_length",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("arguments")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_cannot_be_kept_is_refused_by_its_name_with_the_way_out(folder: Path, name: str) -> None:
    args = arguments(str(folder))
    setattr(args, name, SETTINGS[name])
    with pytest.raises(ConfigError, match=rf"TrainingArguments\({name}=.*(Leave|leave|[Uu]se|[Ss]et|compiled by)"):
        require_supported(args, BATCH)


def test_batches_that_are_divided_by_process_are_refused(folder: Path) -> None:
    args = arguments(str(folder), accelerator_config={"split_batches": True})
    with pytest.raises(ConfigError, match="accelerator_config"):
        require_supported(args, BATCH)


def test_usual_settings_are_accepted(folder: Path) -> None:
    for changed in ({}, {"gradient_accumulation_steps": 1}, {"bf16": True}, {"optim": "adamw_torch_fused"}):
        require_supported(arguments(str(folder), **changed), BATCH)


@pytest.mark.parametrize(
    ("changed", "steps"), [({"max_steps": 5}, 6), ({"max_steps": -1, "num_train_epochs": 2}, 5)], ids=repr
)
def test_another_number_of_steps_is_refused_with_the_right_one(
    folder: Path, changed: dict[str, Any], steps: int
) -> None:
    right = 11 - steps
    with pytest.raises(ConfigError, match=re.escape(f"give RunConfig(max_steps={right})")):
        require_steps(arguments(str(folder), **changed), 24, BATCH, steps)
    require_steps(arguments(str(folder), **changed), 24, BATCH, right)


@pytest.mark.parametrize("data", [None, iter(())])
def test_data_without_a_length_is_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match=r"Trainer\(train_dataset="):
        require_data(SimpleNamespace(model_init=None, train_dataset=data), 24, BATCH)


def test_a_model_that_the_trainer_would_build_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model_init=.*session\.build"):
        require_data(SimpleNamespace(model_init=causal_lm, train_dataset=texts()), 24, BATCH)


def trainer_with(folder: Path, count: int = 24, **changed: Any) -> SimpleNamespace:
    """The parts of a trainer that are checked before it trains."""
    parts = {"model_init": None, "train_dataset": texts(count), "compute_metrics": changed.pop("compute_metrics", None)}
    own = changed.pop("metrics", None)
    return SimpleNamespace(
        args=arguments(str(folder), **changed), **parts, **({} if own is None else {"_metrics": own})
    )


@pytest.mark.parametrize("given", [20, 30])
def test_data_of_another_length_than_the_trainers_are_refused_with_the_right_ones(folder: Path, given: int) -> None:
    has = f"data= has {given} samples, and SimpleNamespace's train_dataset 24, as it is prepared: give data=range(24)."
    with pytest.raises(ConfigError, match=re.escape(has)):
        require_data(trainer_with(folder), given, BATCH)
    require_data(trainer_with(folder), 24, BATCH)


def test_packed_data_are_refused_with_their_length_and_the_number_of_steps_that_then_fits(folder: Path) -> None:
    trainer = trainer_with(folder, 10, max_steps=-1, num_train_epochs=2)
    for given, has in ((24, "data= has 24 samples"), (None, "data= is left out")):
        with pytest.raises(ConfigError) as raised:
            require_data(trainer, given, BATCH)
        assert has in str(raised.value)
        assert "give data=range(10). num_train_epochs=2 is RunConfig(max_steps=3) then" in str(raised.value)


TRLS: dict[str, Any] = {"train": {}, "eval": {}}


@pytest.mark.parametrize(
    ("metric", "others"),
    [
        ("eval_mean_token_accuracy", {"metrics": TRLS}),
        ("mean_token_accuracy", {"metrics": TRLS, "compute_metrics": len}),
        ("eval_num_tokens", {"metrics": TRLS}),
        ("entropy", {"metrics": TRLS}),
        ("aux_loss", {"metrics": TRLS}),
        ("eval_rewards/accuracies", {"metrics": TRLS}),
        ("eval_runtime", {}),
        ("eval_samples_per_second", {"compute_metrics": len}),
    ],
)
def test_a_metric_of_one_process_is_refused_by_its_name(folder: Path, metric: str, others: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf'metric_for_best_model=.{metric}.\).*Use "eval_loss"'):
        require_data(trainer_with(folder, metric_for_best_model=metric, **others), 24, BATCH)


@pytest.mark.parametrize(
    ("metric", "others"),
    [
        ("loss", {"metrics": TRLS}),
        ("eval_german_loss", {"metrics": TRLS}),
        ("eval_accuracy", {"metrics": TRLS, "compute_metrics": len}),
        ("accuracy", {}),
    ],
)
def test_a_metric_of_all_samples_is_accepted(folder: Path, metric: str, others: dict[str, Any]) -> None:
    require_data(trainer_with(folder, metric_for_best_model=metric, **others), 24, BATCH)


def test_a_model_that_the_session_has_not_built_is_refused_by_the_argument() -> None:
    built, other = causal_lm(), causal_lm()
    wrapped = with_lora()
    cases = [
        (("gpt2", None, None), r"SFTTrainer\(model='gpt2'\).*session\.build\(.*from_pretrained\('gpt2', \.\.\.\)"),
        ((built, {"r": 2}, built), r"SFTTrainer\(peft_config=dict\(\.\.\.\)\).*session\.build\(lambda: get_peft_model"),
        ((other, None, None), r"SFTTrainer\(model=LlamaForCausalLM\): the session has built no model"),
        ((other, None, built), r"SFTTrainer\(model=LlamaForCausalLM\) is another model than session\.build"),
        (
            (wrapped, None, wrapped.get_submodule("base_model.model")),
            r"model=PeftModelForCausalLM\): the LlamaForCausalLM of session\.build was wrapped behind it",
        ),
    ]
    for (model, peft_config, own), sentence in cases:
        with pytest.raises(ConfigError, match=sentence):
            require_to_build("SFTTrainer", model, peft_config, own)
    require_to_build("SFTTrainer", built, None, built)


def nothing(*_: Any, **__: Any) -> None:
    """In place of a method."""


def overriding(name: str, base: type | None = None, module: str = "program") -> type:
    """A subclass of transformers' `Trainer`, or of `base`, that overrides a method."""
    import transformers

    kind = type("Mine", (base or transformers.Trainer,), {name: nothing})
    kind.__module__ = module
    return kind


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_subclass_with_a_method_that_the_session_replaces_is_refused_by_its_name_with_the_way_out(name: str) -> None:
    import transformers

    from raysharded.adapters.transformers import elastic

    assert hasattr(transformers.Trainer, name)
    below = type("Below", (overriding(name),), {})
    for kind, through in ((overriding(name), ""), (below, ", of which Below is a subclass")):
        sentence = rf"Mine\.{name} would not be called in a session{through}: .*(Change|Give|Set|Read|Override) "
        with pytest.raises(ConfigError, match=sentence):
            elastic(kind, SimpleNamespace(device=torch.device("cpu")))  # type: ignore[arg-type]


def test_a_subclass_with_methods_that_are_called_in_a_session_is_accepted() -> None:
    import transformers

    from raysharded.adapters.transformers import elastic

    session: Any = SimpleNamespace(device=torch.device("cpu"))
    for name in ("compute_loss", "create_optimizer", "create_scheduler", "evaluate", "log", "prediction_step", "_save"):
        assert issubclass(elastic(overriding(name), session), transformers.Trainer)
    assert issubclass(elastic(overriding("log", transformers.Seq2SeqTrainer), session), transformers.Trainer)
    shadowed = type("Mixin", (), {"training_step": nothing})
    elastic(type("Mixed", (transformers.Trainer, shadowed), {}), session)


def test_a_subclass_of_torchtitans_trainer_is_refused_by_the_replaced_method() -> None:
    base = type("Trainer", (), dict.fromkeys(TORCHTITAN, nothing))
    base.__module__ = "torchtitan.trainer"
    require_own_methods(base, TORCHTITAN)
    require_own_methods(overriding("post_dataloading_process", base), TORCHTITAN)
    for name in TORCHTITAN:
        with pytest.raises(ConfigError, match=rf"Mine\.{name} would not be called in a session: "):
            require_own_methods(overriding(name, base, "torchtitan.models.flux.trainer"), TORCHTITAN)


def test_of_trl_those_trainers_are_accepted_whose_own_methods_change_nothing() -> None:
    import transformers

    def of_trl(name: str, *methods: str) -> type:
        kind = type(name, (transformers.Trainer,), dict.fromkeys(methods, nothing))
        kind.__module__ = f"trl.trainer.{name.removesuffix('Trainer').lower()}_trainer"
        return kind

    require_own_methods(of_trl("SFTTrainer", "training_step"), HUGGING_FACE)
    require_own_methods(of_trl("KTOTrainer", "training_step", "_get_train_sampler"), HUGGING_FACE)
    with pytest.raises(ConfigError, match=r"GRPOTrainer\.training_step .* a session has SFTTrainer and DPOTrainer\."):
        require_own_methods(of_trl("GRPOTrainer", "training_step", "get_train_dataloader"), HUGGING_FACE)
    with pytest.raises(ConfigError, match=r"SFTTrainer\.get_train_dataloader would not be called"):
        require_own_methods(of_trl("SFTTrainer", "training_step", "get_train_dataloader"), HUGGING_FACE)


def test_samples_that_are_numbers_are_refused_where_a_number_is_a_place() -> None:
    class Broken(list[int]):
        def __getitem__(self, index: Any) -> Any:
            raise OSError("no disk")

    for data in ([7, 3, 0], range(4), [True]):
        with pytest.raises(ConfigError, match=r'^what: its samples are numbers, as .*Wrap them, as \{"id": n\}'):
            refuse_numbers("what", data)
    for sound in ([{"id": 7}], np.arange(3), [1.5], [], Broken([1])):
        refuse_numbers("what", sound)


NODES = [7, 3, 0, 5, 1, 2, 6, 4] * 3


def looked_up(samples: list[Any]) -> dict[str, torch.Tensor]:
    """A collator of numbers, of which it knows the texts."""
    return padded([texts()[one] for one in samples])


def evaluated(trainer: Any) -> None:
    trainer.evaluate([2, 6])


class OtherCollator:
    """A `Trainer` whose held-out data have another collator, or a sampler that leaves samples out."""

    def __init__(self, *, samples: bool) -> None:
        self._samples = samples

    def __call__(self, session: Any) -> None:
        import transformers

        from raysharded.adapters.transformers import elastic

        by_sampler: dict[str, Any] = {"collate_fn": padded, "sampler": SubsetRandomSampler([0, 1])}
        given, folder = by_sampler if self._samples else {"collate_fn": list}, tempfile.mkdtemp()

        class Own(transformers.Trainer):
            def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
                rows: Any = texts(4)
                return DataLoader(rows, 2, **given)

        trainer = elastic(Own, session)(
            session.build(causal_lm), arguments(folder, max_steps=1), train_dataset=texts(), data_collator=padded
        )
        trainer.train()
        trainer.evaluate()


def evaluated_by(kind: type, session: Any) -> tuple[Any, dict[str, float]]:
    """A `Trainer` of this class after a step, and the numbers of its evaluation."""
    from raysharded.adapters.transformers import elastic

    trainer = elastic(kind, session)(
        session.build(causal_lm),
        arguments(tempfile.mkdtemp(), max_steps=1),
        train_dataset=texts(),
        data_collator=padded,
    )
    trainer.train()
    return trainer, trainer.evaluate(texts(4))


def evaluating_by_itself(session: Any) -> None:
    import transformers
    from transformers.trainer_utils import EvalLoopOutput

    class Own(transformers.Trainer):
        def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> EvalLoopOutput:
            seen = sum(len(batch) for batch in dataloader)
            return EvalLoopOutput(predictions=np.zeros(0), label_ids=None, metrics={"eval_n": seen}, num_samples=seen)

    evaluated_by(Own, session)


def evaluating_twice(session: Any) -> None:
    import transformers

    class Own(transformers.Trainer):
        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            found = super().evaluation_loop(*args, **kwargs)
            if "eval" in (*args, *kwargs.values()):
                other: Any = self.predict(texts(3, first=4))  # type: ignore[arg-type]  # a list of samples
                self.other = other.metrics["test_loss"]
            return found

    trainer, found = evaluated_by(Own, session)
    alone = trainer.predict(texts(3, first=4)).metrics["test_loss"], trainer.predict(texts(4)).metrics["test_loss"]
    assert (trainer.other, found["eval_loss"]) == alone


@pytest.mark.procs
def test_an_evaluation_loop_may_evaluate_other_data_behind_its_own() -> None:
    run(1, evaluating_twice, steps=1)


@pytest.mark.procs
def test_numbers_of_the_training_data_may_be_samples_if_the_run_reads_its_places() -> None:
    script = Script(data=NODES, given=lambda: {"data_collator": looked_up}, max_steps=2)  # type: ignore[arg-type]
    rows = [texts()[one] for one in NODES]
    assert run(1, script, range(24), steps=2).bits == run(1, Script(data=rows, max_steps=2), rows, steps=2).bits
    with pytest.raises(RayshardedError, match=r"Trainer\(train_dataset=\.\.\.\): its samples are numbers, as 7"):
        run(1, script, NODES, steps=2)


def without_build(session: Any) -> None:
    import transformers

    from raysharded.adapters.transformers import elastic

    elastic(transformers.Trainer, session)(causal_lm(), arguments(tempfile.mkdtemp()), train_dataset=texts())


def without_elastic(session: Any) -> None:
    import transformers

    model = session.build(causal_lm)
    transformers.Trainer(model, arguments(tempfile.mkdtemp()), train_dataset=texts()).train()


def adapter_behind_build(session: Any) -> None:
    from peft import LoraConfig, get_peft_model

    model = session.build(causal_lm)
    get_peft_model(model, LoraConfig(init_lora_weights="olora", target_modules=["q_proj"], task_type="CAUSAL_LM"))


@pytest.mark.procs
@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (Script(auto_find_batch_size=True), r"TrainingArguments\(auto_find_batch_size=True\): A step has the same"),
        (Script(max_steps=7), r"give RunConfig\(max_steps=7\)"),
        (Script(data=texts(20)), r"data= has 24 samples, and Trainer's train_dataset 20, .*: give data=range\(20\)"),
        (Script(behind=evaluated, max_steps=1), r"Trainer: held-out data: its samples are numbers, as 2"),
        (OtherCollator(samples=False), r"Own\.get_eval_dataloader: its collate_fn is another than data_collator="),
        (OtherCollator(samples=True), r"Own\.get_eval_dataloader: its SubsetRandomSampler leaves samples out"),
        (evaluating_by_itself, r"Own\.evaluation_loop: .* a session computes held-out batches itself\. Call super\(\)"),
        (without_build, r"Trainer\(model=LlamaForCausalLM\): the session has built no model"),
        (without_elastic, r"\d: .* moved to a device: .*In a session a Trainer is elastic\(Trainer, session\)"),
        (adapter_behind_build, r"test_refusals\.py:\d+: adapter_behind_build: .*get_peft_model.*variable\.set_data"),
    ],
    ids=[
        "an argument",
        "the number of steps",
        "data of another length",
        "held-out numbers",
        "another collator of held-out data",
        "a part of held-out data",
        "an evaluation loop of a subclass",
        "no build",
        "no elastic",
        "OLoRA behind build",
    ],
)
def test_a_run_ends_with_the_sentence(script: Any, sentence: str) -> None:
    steps = 1 if "held-out" in sentence or "get_eval" in sentence or "evaluation_loop" in sentence else STEPS
    with pytest.raises(RayshardedError, match=sentence):
        run(1, script, steps=steps)
