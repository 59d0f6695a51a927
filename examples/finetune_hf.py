"""Fine-tune a causal language model of Hugging Face transformers, elastically, and write it back in their format.

    raysharded data pack --tokenizer my_model/tokenizer.json my_texts/ corpus/    # and the same for held_out/
    python examples/finetune_hf.py corpus/ held_out/ runs/ --model my_model/ --out my_model-tuned/

`my_model/` is a folder with `config.json` and safetensors files, as `save_pretrained` writes it, that every machine
sees. Without `--model` a small Llama starts from random weights, for a corpus of bytes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig

import raysharded as rs
from raysharded.checkpoint import open_checkpoint
from raysharded.checkpoint.interop import export_huggingface, place_of

SMALL = LlamaConfig(
    vocab_size=257,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


class FineTune(rs.Task):
    """Starts from the random weights of `config`."""

    max_grad_norm = 1.0

    def __init__(self, config: PretrainedConfig, *, lr: float, warmup_steps: int, total_steps: int) -> None:
        self.config, self.lr, self.warmup_steps, self.total_steps = config, lr, warmup_steps, total_steps

    def build_model(self) -> nn.Module:
        return AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)  # type: ignore[no-untyped-call, no-any-return]

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=0.01)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        logits, targets = model(input_ids=batch[:, :-1], use_cache=False).logits, batch[:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return rs.Loss(total, targets.numel())

    def lr_scale(self, step: int) -> float:
        return rs.warmup_cosine(step, warmup_steps=self.warmup_steps, total_steps=self.total_steps)


class FineTuneFrom(FineTune):
    """Starts from the weights in a folder: each worker reads them a module at a time, and keeps its own shard."""

    def __init__(self, folder: str, **settings: Any) -> None:
        super().__init__(AutoConfig.from_pretrained(folder), **settings)
        self.files = weight_files(Path(folder).resolve())

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for name, module in model.named_modules():
            module.name_in_model = name
        return model

    def init_weights(self, module: nn.Module, generator: torch.Generator) -> None:
        for name, param in module.named_parameters(f"{module.name_in_model}", recurse=False):
            with safe_open(self.files[name], "pt") as file, torch.no_grad():
                param.copy_(file.get_tensor(name))


def weight_files(folder: Path) -> dict[str, str]:
    """The file of each tensor."""
    files: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            files |= dict.fromkeys(file.keys(), str(path))
    return files


def trainer(
    corpus: str, held_out: str, runs: str, *, model: str | None = None, steps: int = 200, seq_len: int = 128
) -> rs.ElasticTrainer:
    warmup_steps, often = max(2, steps // 10), max(1, steps // 4)
    task = (
        FineTuneFrom(model, lr=2e-5, warmup_steps=warmup_steps, total_steps=steps)
        if model
        else FineTune(SMALL, lr=1e-3, warmup_steps=warmup_steps, total_steps=steps)
    )
    return rs.ElasticTrainer(
        task=task,
        data=rs.TokenDataset(corpus, seq_len=seq_len),
        batch=rs.BatchConfig(global_batch_size=16, microbatch_size=2, seed=0),
        scaling=rs.ScalingConfig(num_workers=(1, 4), cpus_per_worker=0.5, use_gpu=torch.cuda.is_available()),
        run=rs.RunConfig(
            name="finetune",
            storage_path=runs,
            max_steps=steps,
            checkpoint=rs.CheckpointConfig(every_steps=often, keep_best=("evaluation.loss", "min", 1)),
        ),
        evaluation=rs.EvalConfig(data=rs.TokenDataset(held_out, seq_len=seq_len), every_steps=often, num_samples=64),
        engine=rs.EngineConfig(param_dtype="bfloat16" if torch.cuda.is_available() else None),
    )


def export(result: rs.Result, task: FineTune, out: str) -> None:
    """Write the best checkpoint, or else the last, as `from_pretrained` loads it. Raises CheckpointError if something
    exists there already."""
    config = json.dumps(task.config.to_dict(), default=str).encode()
    chosen = result.best_checkpoint.url if result.best_checkpoint else result.checkpoint
    export_huggingface(open_checkpoint(*place_of(chosen)), place_of(out), config=config)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("corpus", "held_out", "runs"):
        parser.add_argument(name)
    parser.add_argument("--model", help="a folder with weights to start from")
    parser.add_argument("--out", default="finetuned", help="where the model is written at the end; a new folder or URL")
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    made = trainer(given.corpus, given.held_out, given.runs, model=given.model, steps=given.steps)
    result = made.fit()
    assert isinstance(made.task, FineTune)
    export(result, made.task, given.out)
    if result.best_checkpoint:
        print(f"the best of its checkpoints: step {result.best_checkpoint.step}, {result.best_checkpoint.value:.4f}")
    print(
        f'{result.steps} steps, fingerprint {result.fingerprint}; AutoModelForCausalLM.from_pretrained("{given.out}")'
    )
