"""Arguments of a `Trainer` that a session cannot keep are refused by their names, each with the way out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import raysharded as rs
from raysharded.adapters.hf_arguments import require_data, require_steps, require_supported
from raysharded.errors import ConfigError, RayshardedError
from tests.adapters.programs import MICROBATCHES, SIZE, Script, arguments, causal_lm, run, texts
from tests.paths import ROOT

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
        require_data(SimpleNamespace(model_init=None, train_dataset=data))


def test_a_model_that_the_trainer_would_build_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model_init=.*session\.build"):
        require_data(SimpleNamespace(model_init=causal_lm, train_dataset=texts()))


@pytest.mark.procs
@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"auto_find_batch_size": True}, r"TrainingArguments\(auto_find_batch_size=True\): A step has the same"),
        ({"max_steps": 7}, r"give RunConfig\(max_steps=7\)"),
    ],
    ids=["an argument", "the number of steps"],
)
def test_a_run_ends_with_the_sentence(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RayshardedError, match=sentence):
        run(1, Script(**changed))


def test_no_other_module_imports_transformers() -> None:
    code = (
        "import sys, raysharded.trainer, raysharded.actors.worker, raysharded.adapters.hf_arguments\n"
        "assert not {'transformers', 'accelerate', 'peft'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)
