"""torchtitan's llama debug model on CPUs, as its tests train it. Loads torchtitan when it is called."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import _utils

from tests.paths import ROOT

FOLDER = ROOT / "build" / "torchtitan"
"""The folder that `make test-long` installs torchtitan into."""
SIZE, MICROBATCHES, LENGTH, SEED = 2, 2, 64, 7


def stand_in_for_a_device() -> None:
    """Give torchtitan the CPU as its accelerator, and what torch 2.13 lacks. Call it before torchtitan is imported."""

    def nothing(*_: Any) -> None: ...

    found = {name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("_")}
    found |= {
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=1 << 30),
        "memory_stats": lambda *_: {},
        **dict.fromkeys(("reset_peak_memory_stats", "empty_cache", "set_device"), nothing),
    }
    own = SimpleNamespace(**found)
    vars(_utils)["_get_available_device_type"] = lambda: "cpu"
    vars(_utils)["_get_device_module"] = lambda _: own
    complete_torch()


def complete_torch() -> None:
    """Give torch 2.13 what torchtitan uses and it lacks."""

    def nothing(*_: Any) -> None: ...

    if not hasattr(dist, "set_timeout"):
        vars(dist)["set_timeout"] = nothing


def write_assets(folder: Path) -> None:
    """A tokenizer of bytes, and texts of uneven lengths, in files as torchtitan reads them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {token: number for number, token in enumerate([*alphabet, "<s>", "</s>"])}
    tokenizer: Any = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    (folder / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "texts").mkdir()
    texts = (f"text {n}: " + " ".join(str(n * k % 97) for k in range(5 + n % 23)) for n in range(300))
    (folder / "texts" / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))


def config_of(folder: Path, steps: int, *, validates: bool = True) -> Any:
    """torchtitan's own configuration of its llama debug model, with short sequences. `validates`: every other step."""
    from torchtitan.models.common import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    found = llama3_debugmodel()
    for layer in found.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention has no backward on CPUs
    found.hf_assets_path, found.dataloader.dataset_path = str(folder / "tokenizer"), str(folder / "texts")
    found.optimizer.implementation = "foreach"
    training = found.training
    training.local_batch_size, training.global_batch_size = SIZE, SIZE * MICROBATCHES
    training.seq_len, training.steps = LENGTH, steps
    training.disable_cuda_graphs, training.mixed_precision_param = True, "float32"
    found.parallelism.spmd_backend = "partial_dtensor"
    found.checkpoint.enable = False
    found.validator.enable, found.validator.freq, found.validator.steps = validates, 2, 2
    found.validator.dataloader.dataset = "c4_test"
    found.validator.dataloader.dataset_path = str(folder / "texts")
    found.dump_folder, found.debug.seed = str(folder / "out"), SEED
    return found


class ConfigManager:
    """In place of torchtitan's: the command line is the folder and the number of steps."""

    def parse_args(self, options: list[str]) -> Any:
        return config_of(Path(options[0]), int(options[1]))


class Training:
    """A training function with torchtitan's `Trainer`. It writes the losses that it validates, and their step."""

    def __init__(self, folder: Path, notes: str = "validated") -> None:
        self._folder, self._notes = folder, notes

    def __call__(self, session: Any) -> None:
        from torchtitan.trainer import Trainer

        from raysharded.adapters.torchtitan import elastic

        trainer = elastic(Trainer, session)(config_of(self._folder, session.max_steps))
        processor = trainer.metrics_processor
        log = processor.log_validation

        def noted(loss: float, step: int, **others: Any) -> None:
            with (self._folder / self._notes).open("a") as file:
                file.write(f"{step} {loss!r}\n")
            log(loss, step, **others)

        processor.log_validation = noted
        trainer.train()
