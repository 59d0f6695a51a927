"""The model that a Hugging Face config describes, for the measurement of its memory: same parameters, same operations.

Not for training: the weights have no trained values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from raysharded.planning.models.hf_config import LlamaShape
from raysharded.task import Loss, Task

_ROTARY_BASE = 10_000.0


class _Attention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        q, kv = shape.heads * shape.head_width, shape.key_value_heads * shape.head_width
        self.q_proj = nn.Linear(shape.width, q, bias=shape.query_key_value_bias)
        self.k_proj = nn.Linear(shape.width, kv, bias=shape.query_key_value_bias)
        self.v_proj = nn.Linear(shape.width, kv, bias=shape.query_key_value_bias)
        self.o_proj = nn.Linear(q, shape.width, bias=shape.output_bias)
        if shape.query_key_norm:
            self.q_norm, self.k_norm = nn.RMSNorm(shape.head_width), nn.RMSNorm(shape.head_width)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.shape.heads, self.shape.head_width)
        k = self.k_proj(x).view(batch, length, self.shape.key_value_heads, self.shape.head_width)
        v = self.v_proj(x).view(batch, length, self.shape.key_value_heads, self.shape.head_width).transpose(1, 2)
        if self.shape.query_key_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = _rotate(q.transpose(1, 2), cos, sin), _rotate(k.transpose(1, 2), cos, sin)
        times = self.shape.heads // self.shape.key_value_heads
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))
        return result


class _Mlp(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=shape.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class _Block(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(shape), _Mlp(shape)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class _Body(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)


class Llama(nn.Module):
    """Token ids [batch, length] to logits [batch, length, vocabulary]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, shape: LlamaShape, max_length: int) -> None:
        super().__init__()
        self.model = _Body(shape)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        steps = torch.arange(0, shape.head_width, 2) / shape.head_width
        angles = torch.outer(torch.arange(max_length), _ROTARY_BASE**-steps)
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.model.embed_tokens(tokens)
        length = tokens.shape[1]
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        logits: torch.Tensor = self.lm_head(self.model.norm(x))
        return logits


class LlamaTask(Task):
    """Next-token prediction with AdamW, as such models are trained."""

    max_grad_norm = 1.0

    def __init__(self, shape: LlamaShape, seq_len: int) -> None:
        self.shape, self.seq_len = shape, seq_len

    def build_model(self) -> nn.Module:
        return Llama(self.shape, self.seq_len)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-4)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        logits, targets = model(batch[:, :-1]), batch[:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return Loss(total, targets.numel())


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
