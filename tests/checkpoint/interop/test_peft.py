"""Adapters: what is exported is what PEFT itself saves, and what it loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from raysharded import checkpoint
from raysharded.checkpoint.interop import NameMap, export_peft, place_of
from raysharded.checkpoint.reader import Checkpoint, open_checkpoint
from raysharded.errors import CheckpointError
from tests.checkpoint.interop.ranks import bits


def peft() -> Any:
    """PEFT. Its import takes two seconds, which only the process that runs these tests should spend."""
    return pytest.importorskip("peft", reason="needs `pip install peft`")


class Net(nn.Module):
    """Has all that the adapters here are for."""

    def __init__(self) -> None:
        super().__init__()
        self.default = nn.Linear(6, 6)  # named as an adapter is
        self.embedding = nn.Embedding(11, 6)
        self.conv = nn.Conv1d(6, 6, 3)
        self.blocks = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(6, 8), "down": nn.Linear(8, 6)}) for _ in range(2)])
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 11))


KINDS: dict[str, dict[str, Any]] = {
    "lora": {"r": 3, "target_modules": ["up", "down"]},
    "everywhere": {"r": 3, "target_modules": ["up", "down", "embedding", "conv", "default"]},
    "dora": {"r": 3, "target_modules": ["up"], "use_dora": True},
    "with a head": {"r": 3, "target_modules": ["up"], "modules_to_save": ["head"]},
    "with tokens": {"r": 3, "target_modules": ["up"], "trainable_token_indices": {"embedding": [1, 5]}},
    "ia3": {"target_modules": ["up", "down"], "feedforward_modules": ["down"]},
    "oft": {"oft_block_size": 2, "target_modules": ["up"]},
}
CONFIGS = {"ia3": "IA3Config", "oft": "OFTConfig"}
"""The class of a kind's config; `LoraConfig` for all others."""


def config_of(kind: str) -> Any:
    return getattr(peft(), CONFIGS.get(kind, "LoraConfig"))(**KINDS[kind])


def adapted(kind: str, name: str = "default") -> Any:
    """A model with an adapter; no parameter is what PEFT draws."""
    torch.manual_seed(0)
    model = peft().get_peft_model(Net(), config_of(kind), adapter_name=name)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn_like(param))
    return model


def saved(folder: Path, model: Any) -> Checkpoint:
    uri = checkpoint.save(folder / "step-1", {"model": model}, step=1).uri
    return open_checkpoint(*place_of(uri))


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("kind", KINDS)
def test_the_files_are_those_that_peft_saves(tmp_path: Path, kind: str) -> None:
    model = adapted(kind)
    model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    config = (tmp_path / "theirs" / "adapter_config.json").read_bytes()
    done = export_peft(saved(tmp_path, model), place_of(tmp_path / "ours"), config=config)
    assert done.files == ("adapter_model.safetensors", "adapter_config.json")
    ours, theirs = (load_file(tmp_path / whose / "adapter_model.safetensors") for whose in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(bits(ours[name]) == bits(value) for name, value in theirs.items())

    loaded = peft().PeftModel.from_pretrained(Net(), tmp_path / "ours")
    found = loaded.state_dict()
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    assert trained
    for name in trained:
        assert bits(found[name]) == bits(model.state_dict()[name]), name


def test_one_of_two_adapters_is_exported_by_its_name(tmp_path: Path) -> None:
    model = adapted("lora", "first")
    model.add_adapter("second", config_of("dora"))
    source = saved(tmp_path, model)
    for name in ("first", "second"):
        export_peft(source, place_of(tmp_path / name), adapter=name)
        found = load_file(tmp_path / name / "adapter_model.safetensors")
        assert found.keys() == peft().get_peft_model_state_dict(model, adapter_name=name).keys()


def test_a_model_that_was_saved_alone_or_inside_another_is_exported_as_well(tmp_path: Path) -> None:
    model = adapted("lora")
    expected = peft().get_peft_model_state_dict(model).keys()
    for number, state in enumerate((model, {"model": nn.ModuleDict({"language": model})})):
        uri = checkpoint.save(tmp_path / f"step-{number}", state, step=number).uri
        export_peft(open_checkpoint(*place_of(uri)), place_of(tmp_path / f"out-{number}"))
        assert load_file(tmp_path / f"out-{number}" / "adapter_model.safetensors").keys() == expected


def test_a_model_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none of the 17 tensors .* is chosen as one of the adapter 'default'"):
        export_peft(saved(tmp_path, Net()), place_of(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_biases_of_the_base_model_need_a_map(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = peft().get_peft_model(Net(), peft().LoraConfig(r=3, target_modules=["up"], bias="lora_only"))
    source = saved(tmp_path, model)
    config = json.dumps({"peft_type": "LORA", "bias": "lora_only"}).encode()
    with pytest.raises(CheckpointError, match=r"bias='lora_only', but biases .* Give a name map"):
        export_peft(source, place_of(tmp_path / "out"), config=config)
    name_map = NameMap.of(
        [[r"model\.(.*\.lora_[AB])\.default\.weight", r"\1.weight"], [r"model\.(.*\.up\.base_layer\.bias)", r"\1"]]
    )
    export_peft(source, place_of(tmp_path / "out"), config=config, name_map=name_map)
    assert load_file(tmp_path / "out" / "adapter_model.safetensors").keys() == (
        peft().get_peft_model_state_dict(model).keys()
    )


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    source = saved(tmp_path, adapted("lora"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"another adapter_config\.json already"):
        export_peft(source, place_of(tmp_path / "out"), config=b'{"r": 3}')
    export_peft(source, place_of(tmp_path / "out"))
    with pytest.raises(CheckpointError, match=r"has adapter_model\.safetensors already"):
        export_peft(source, place_of(tmp_path / "out"))
