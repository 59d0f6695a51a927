"""Fine-tune on conversations, and on preference pairs: samples of any length, with losses of the right tokens alone.

    python examples/finetune_chat.py runs/                  # conversations: only the assistant's tokens count
    python examples/finetune_chat.py runs/ --preferences    # pairs of a better and a worse answer

The model here is a small GPT on bytes with random weights, to have no download. For one of Hugging Face, see
`finetune_hf.py`; its tokenizer's `apply_chat_template(..., return_assistant_tokens_mask=True)` gives the loss mask.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import raysharded as rs
from raysharded.data import padded

Batch = dict[str, torch.Tensor]
MAX_LEN, VOCABULARY, BETA = 128, 257, 0.1
CHATS = [
    [("user", f"What is {a} plus {b}?"), ("assistant", f"{a} plus {b} is {a + b}." + " Ask me more!" * (a % 4))]
    for a in range(1, 17)
    for b in range(1, 17)
]


def encoded(turns: list[tuple[str, str]]) -> dict[str, np.ndarray[Any, Any]]:
    """The tokens of a conversation, and labels that are -100 where somebody else than the assistant writes."""
    ids, labels = [256], list[int]()
    for who, text in turns:
        tokens = [*text.encode(), 256]
        ids += tokens
        labels += tokens if who == "assistant" else [-100] * len(tokens)
    return {"input_ids": np.asarray(ids[:-1][:MAX_LEN]), "labels": np.asarray(labels[:MAX_LEN])}


def collated(samples: list[Any]) -> Batch:
    batch = padded(samples, {"input_ids": 256, "labels": -100}, multiple_of=8)
    return {key: torch.from_numpy(value) for key, value in batch.items()}


class GPT(nn.Module):
    """Token ids [batch, length] to logits [batch * length, vocabulary]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(MAX_LEN, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        x = self.tokens(ids) + self.positions(torch.arange(length, device=ids.device))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(x.flatten(0, 1))
        return logits


class Chat(rs.Task):
    """The mean loss of the assistant's tokens, over the whole step: the weight of a microbatch is their number."""

    def __init__(self, width: int = 64) -> None:
        self.width = width

    def build_model(self) -> nn.Module:
        return GPT(self.width)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def collate(self, samples: list[Any]) -> Any:
        return collated(samples)

    def losses(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss of each token, 0 where none counts; [batch, length]. Padding is at the end, so no token sees it."""
        logits = model(batch["input_ids"])
        losses = F.cross_entropy(logits.float(), batch["labels"].flatten(), ignore_index=-100, reduction="none")
        return losses.view_as(batch["labels"])

    def loss(self, model: nn.Module, batch: Batch) -> rs.Loss:
        return rs.Loss(self.losses(model, batch).sum(), (batch["labels"] != -100).sum())


class Preferences(Chat):
    """Direct preference optimization (Rafailov et al., 2023), with a reference that gives all answers one probability.

    A pair is two rows of one batch: the model is called once, and the better answers come first.
    """

    def collate(self, samples: list[Any]) -> Any:
        return collated([sample[which] for which in ("better", "worse") for sample in samples])

    def loss(self, model: nn.Module, batch: Batch) -> rs.Loss:
        better, worse = (-self.losses(model, batch).sum(1)).chunk(2)
        total = -F.logsigmoid(BETA * (better - worse)).sum()
        right = (better > worse).sum()
        return rs.Loss(total, len(better), metrics={"right": (right, len(better))})  # a pair counts once


def trainer(storage: str, *, preferences: bool = False, steps: int = 100, width: int = 64) -> rs.ElasticTrainer:
    batch = rs.BatchConfig(global_batch_size=16, microbatch_size=4)
    samples: list[Any] = [encoded(turns) for turns in CHATS]
    lengths = [len(sample["input_ids"]) for sample in samples]
    if preferences:
        wrong = [encoded([turns[0], ("assistant", "I do not know.")]) for turns in CHATS]
        samples = [{"better": better, "worse": worse} for better, worse in zip(samples, wrong, strict=True)]
    return rs.ElasticTrainer(
        task=Preferences(width) if preferences else Chat(width),
        data=rs.Bucketed(samples, lengths, microbatch_size=batch.microbatch_size, window=16),
        batch=batch,
        scaling=rs.ScalingConfig(num_workers=(1, 4)),
        run=rs.RunConfig(name="preferences" if preferences else "chat", storage_path=storage, max_steps=steps),
    )


if __name__ == "__main__":
    result = trainer(sys.argv[1], preferences="--preferences" in sys.argv).fit()
    print(f"{result.steps} steps, fingerprint {result.fingerprint}, checkpoint {result.checkpoint}")
