"""Train a GPT over bytes, elastically: a task of your own, data of your own, and the trainer.

    raysharded data pack --format text my_texts/ corpus/       # or JSONL, or Parquet with a text column
    python examples/train_gpt.py corpus/ runs/

Run it again with the same folders and it resumes. Kill a worker meanwhile: it goes on.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import raysharded as rs

SEQ_LEN = 128
STEPS = 200


class LanguageModel(nn.Module):
    def __init__(self, vocab_size: int, width: int = 256, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(SEQ_LEN, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocab_size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        x = self.tokens(ids) + self.positions(torch.arange(length, device=ids.device))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(x)
        return logits


class NextToken(rs.Task):
    max_grad_norm = 1.0

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def build_model(self) -> nn.Module:
        return LanguageModel(self.vocab_size)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        logits, targets = model(batch[:, :-1]), batch[:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        correct = (logits.argmax(-1) == targets).sum()
        return rs.Loss(total, targets.numel(), metrics={"accuracy": (correct, targets.numel())})

    def lr_scale(self, step: int) -> float:
        return rs.warmup_cosine(step, warmup_steps=20, total_steps=STEPS)


def trainer(corpus: str, runs: str) -> rs.ElasticTrainer:
    data = rs.TokenDataset(corpus, seq_len=SEQ_LEN)
    return rs.ElasticTrainer(
        task=NextToken(data.vocab_size),
        data=data,
        batch=rs.BatchConfig(global_batch_size=16, microbatch_size=2, seed=0),
        scaling=rs.ScalingConfig(num_workers=(1, 4), cpus_per_worker=0.5, use_gpu=torch.cuda.is_available()),
        run=rs.RunConfig(
            name="bytes",
            storage_path=runs,
            max_steps=STEPS,
            checkpoint=rs.CheckpointConfig(every_steps=50, keep_last=2),
        ),
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    result = trainer(sys.argv[1], sys.argv[2]).fit()
    print(f"{result.steps} steps, fingerprint {result.fingerprint}, checkpoint {result.checkpoint}")
