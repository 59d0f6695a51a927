"""Pretrain a GPT, elastically, from a file of settings: a custom task, custom data, and the trainer.

    raysharded data pack --format text my_texts/ corpus/       # or JSONL, or Parquet with a text column
    python examples/train_gpt.py examples/train_gpt.yaml data.paths=corpus/ run.storage_path=runs/
    ray job submit --working-dir . -- python examples/train_gpt.py run.storage_path=/shared/runs

Arguments override the settings of the file, which is by default the one in this folder. Without a corpus/ it packs
Python's own standard library, to have something to read. Run it again with the same settings and it resumes. Kill a
worker meanwhile: training continues. `raysharded run examples/train_gpt.py:NextToken --config FILE` does the same, with
options.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import raysharded as rs
from raysharded.cli.settings import apply, read_settings
from raysharded.data.pack import pack
from raysharded.demo.run import standard_library_sources

CONFIG = Path(__file__).with_name("train_gpt.yaml")
DEFAULT_CORPUS = "corpus/"
"""The corpus that the file of settings names."""


class GPT(nn.Module):
    """Token ids [batch, length] to logits [batch * length, vocabulary]."""

    def __init__(self, vocab_size: int, seq_len: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocab_size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        x = self.tokens(ids) + self.positions(torch.arange(length, device=ids.device))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(x.flatten(0, 1))
        return logits


class NextToken(rs.Task):
    """Its arguments are the section `task` of the settings."""

    max_grad_norm = 1.0

    def __init__(
        self,
        *,
        vocab_size: int,
        seq_len: int,
        width: int = 256,
        layers: int = 4,
        heads: int = 4,
        dropout: float = 0.1,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
        total_steps: int,
    ) -> None:
        self.shape = (vocab_size, seq_len, width, layers, heads, dropout)
        self.lr, self.weight_decay = lr, weight_decay
        self.warmup_steps, self.total_steps = warmup_steps, total_steps

    def build_model(self) -> nn.Module:
        return GPT(*self.shape)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        matrices = [param for param in model.parameters() if param.dim() >= 2]
        vectors = [param for param in model.parameters() if param.dim() < 2]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        logits, targets = model(batch[:, :-1]), batch[:, 1:].flatten()
        total = F.cross_entropy(logits.float(), targets, reduction="sum")
        correct = (logits.argmax(-1) == targets).sum()
        return rs.Loss(total, targets.numel(), metrics={"accuracy": (correct, targets.numel())})

    def lr_scale(self, step: int) -> float:
        return rs.warmup_cosine(step, warmup_steps=self.warmup_steps, total_steps=self.total_steps)


def trainer(*arguments: str) -> rs.ElasticTrainer:
    """The trainer from a file of settings (first, if given) and settings such as `run.max_steps=1000` that override
    it."""
    is_given = arguments and "=" not in arguments[0]
    config, overrides = (arguments[0], arguments[1:]) if is_given else (CONFIG, arguments)
    settings = read_settings(str(config), overrides)
    corpus = settings["data"]["paths"]
    if corpus == DEFAULT_CORPUS and not Path(corpus).exists():
        print(f"packing Python's standard library into {corpus}")
        pack(standard_library_sources(), corpus, input_format="text")
    return apply(NextToken, settings)


if __name__ == "__main__":
    result = trainer(*sys.argv[1:]).fit()
    print(f"{result.steps} steps, fingerprint {result.fingerprint}, checkpoint {result.checkpoint}")
