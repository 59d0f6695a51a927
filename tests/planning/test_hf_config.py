"""Hugging Face configs: known totals, transformers' own models, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import raysharded as rs
from raysharded.errors import ConfigError
from raysharded.planning.models.hf_config import KNOWN, parse_config, read_config
from raysharded.planning.models.llama import LlamaTask
from raysharded.planning.plans import setting_of_config
from raysharded.planning.trace import Phase, Trace
from raysharded.planning.tracing.measurement import measure
from tests.cases import tried_each_time
from tests.planning.configs import LLAMA_8B, LLAMA_70B, LLAMA_405B, TINY

RECOMPUTING = rs.EngineConfig(activation_checkpointing=True)


@pytest.mark.parametrize(
    ("config", "total"),
    [(LLAMA_8B, 8_030_261_248), (LLAMA_70B, 70_553_706_496), (LLAMA_405B, 405_853_388_800)],
)
def test_known_models_have_their_known_number_of_parameters(config: dict[str, Any], total: int) -> None:
    assert parse_config(config, "it").model().num_parameters == total


@pytest.mark.parametrize("kind", KNOWN)
def test_names_and_shapes_are_those_of_transformers_and_of_our_model(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = TINY | {"model_type": kind}
    shape = parse_config(config, "it")
    ours = {p.name: p.shape for p in shape.model().parameters}
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
        own = LlamaTask(shape, 8).build_model()
    assert {name: tuple(p.shape) for name, p in made.named_parameters()} == ours
    assert {name: tuple(p.shape) for name, p in own.named_parameters()} == ours


@pytest.mark.parametrize("engine", tried_each_time([RECOMPUTING], [rs.EngineConfig(), RECOMPUTING]))
def test_blocks_that_are_not_measured_are_as_those_that_are(engine: rs.EngineConfig) -> None:
    shape = replace(parse_config(TINY, "it"), layers=4)
    batch = rs.BatchConfig(global_batch_size=4, microbatch_size=2)
    found = setting_of_config(shape, batch, engine, seq_len=16, on_gpu=False)
    samples = [torch.zeros(17, dtype=torch.int64)] * 2
    shapes, trace = measure(LlamaTask(shape, 16), engine, samples)
    assert found.trace is not None
    assert working(found.trace) == working(trace)
    assert found.trace.flops == trace.flops
    assert [(u.name, {(p.name, p.shape, p.dtype, p.trainable) for p in u.parameters}) for u in found.shapes.units] == [
        (u.name, {(p.name, p.shape, p.dtype, p.trainable) for p in u.parameters}) for u in shapes.units
    ]
    assert {s.name: (s.shape, s.dtype) for s in found.shapes.state.tensors} == {
        s.name: (s.shape, s.dtype) for s in shapes.state.tensors
    }


def working(trace: Trace) -> list[Phase]:
    """Without the moments between two blocks, in which nothing happens."""
    return [phase for phase in trace.phases if not phase.start == phase.peak == phase.end]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "it: model_type 'bert' is not one of llama, mistral, qwen2, qwen3; plan it as a task"),
        ({"hidden_size": None}, "it: hidden_size=None; it must be a whole number of 1 or more"),
        ({"num_hidden_layers": 2.5}, "it: num_hidden_layers=2.5; it must be a whole number of 1 or more"),
    ],
)
def test_other_configs_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(TINY | change, "it")
    assert str(error.value).startswith(message)


def test_files_that_are_no_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        read_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON that can be read"):
        read_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="is a JSON object, this is a list"):
        read_config(tmp_path / "config.json")
