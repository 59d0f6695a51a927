"""Pretrain a GPT on whole documents, packed to the length of a sequence, that do not see each other.

    raysharded data pack --format text my_texts/ corpus/
    raysharded data arrange corpus/ --seq-len 256
    python examples/train_packed.py corpus/ runs/

A place attends to earlier places of the same document, by `document_ids`. The mask here is a dense one for PyTorch's
`scaled_dot_product_attention`. For long sequences, `flex_attention` computes only the blocks that it needs, from the
same condition: `create_block_mask(lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (q >= k), ...)`. Models of Hugging Face
take `position_ids` and `shift_labels=batch["labels"]`.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import raysharded as rs

SEQ_LEN = 256
Batch = dict[str, torch.Tensor]


def document_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """True where a place may attend; [batch, 1, length, length] from [batch, length]."""
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return same.tril()[:, None]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return y


class GPT(nn.Module):
    """A batch of `rs.PackedDataset` to logits [batch * length, vocabulary]."""

    def __init__(self, vocab_size: int, seq_len: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x, mask)
        logits: torch.Tensor = self.head(x.flatten(0, 1))
        return logits


class NextToken(rs.Task):
    max_grad_norm = 1.0

    def __init__(self, *, vocab_size: int, seq_len: int, width: int = 256, layers: int = 4, heads: int = 4) -> None:
        self.shape = (vocab_size, seq_len, width, layers, heads)

    def build_model(self) -> nn.Module:
        return GPT(*self.shape)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

    def loss(self, model: nn.Module, batch: Batch) -> rs.Loss:
        logits = model(batch["input_ids"], batch["position_ids"], document_mask(batch["document_ids"]))
        labels = batch["labels"].flatten()
        total = F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")
        return rs.Loss(total, (labels != -100).sum())  # the number of targets: padding has no weight


def trainer(
    corpus: str, storage: str, *, seq_len: int = SEQ_LEN, steps: int = 1000, width: int = 256
) -> rs.ElasticTrainer:
    data = rs.PackedDataset(corpus, seq_len=seq_len)
    return rs.ElasticTrainer(
        task=NextToken(vocab_size=data.vocab_size, seq_len=seq_len, width=width),
        data=data,
        scaling=rs.ScalingConfig(num_workers=(1, 4)),
        batch=rs.BatchConfig(global_batch_size=32, microbatch_size=4),
        run=rs.RunConfig(name="packed", storage_path=storage, max_steps=steps),
    )


if __name__ == "__main__":
    result = trainer(*sys.argv[1:3]).fit()
    print(f"{result.steps} steps, fingerprint {result.fingerprint}, checkpoint {result.checkpoint}")
