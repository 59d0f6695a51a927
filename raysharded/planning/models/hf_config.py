"""A Hugging Face `config.json` of a Llama-like model as shapes, without the transformers library. Pure.

Names and shapes are those of transformers' `modeling_llama.py`, `modeling_mistral.py`, `modeling_qwen2.py` and
`modeling_qwen3.py`: attention biases on q, k and v in qwen2, norms of q and k in qwen3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysharded.errors import ConfigError
from raysharded.locations import require_file
from raysharded.planning.models.shapes import ADAMW, ModelShapes, ParameterShape, UnitShape

KNOWN = ("llama", "mistral", "qwen2", "qwen3")
"""The supported values of `model_type`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaShape:
    """The shapes in such a config."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    key_value_heads: int
    head_width: int
    hidden: int
    tied: bool
    """Whether the head and the embedding share weights."""
    query_key_value_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False

    def block(self, name: str) -> tuple[ParameterShape, ...]:
        """The parameters of the block `name`."""
        q, kv = self.heads * self.head_width, self.key_value_heads * self.head_width
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        shapes: list[tuple[str, tuple[int, ...]]] = []
        for part, rows, columns in (("q", q, self.width), ("k", kv, self.width), ("v", kv, self.width)):
            shapes += _linear(f"{attention}.{part}_proj", rows, columns, bias=self.query_key_value_bias)
        shapes += _linear(f"{attention}.o_proj", self.width, q, bias=self.output_bias)
        if self.query_key_norm:
            shapes += [(f"{attention}.{part}_norm.weight", (self.head_width,)) for part in ("q", "k")]
        for part, rows, columns in (
            ("gate", self.hidden, self.width),
            ("up", self.hidden, self.width),
            ("down", self.width, self.hidden),
        ):
            shapes += _linear(f"{mlp}.{part}_proj", rows, columns, bias=self.mlp_bias)
        shapes += [(f"{name}.{norm}.weight", (self.width,)) for norm in ("input_layernorm", "post_attention_layernorm")]
        return tuple(_parameter(*each) for each in shapes)

    def model(self) -> ModelShapes:
        """The model's shapes: every block is a unit, with AdamW's state; parameters and state in float32."""
        units = [
            UnitShape(name=name, parameters=self.block(name))
            for name in (f"model.layers.{index}" for index in range(self.layers))
        ]
        root = [_parameter("model.embed_tokens.weight", (self.vocabulary, self.width))]
        root.append(_parameter("model.norm.weight", (self.width,)))
        if not self.tied:
            root.append(_parameter("lm_head.weight", (self.vocabulary, self.width)))
        return ModelShapes(units=(*units, UnitShape(name="", parameters=tuple(root))))


def read_config(path: Path) -> LlamaShape:
    """The config in a file. Raises ConfigError if it is invalid, or for another kind of model."""
    try:
        require_file(path)
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}. Give a Hugging Face config.json, or FILE.py:NAME.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not JSON that can be read ({error}). Give a Hugging Face config.json.") from None
    return parse_config(found, str(path))


def parse_config(config: object, where: str) -> LlamaShape:
    """The shapes of a parsed JSON config; `where` is for messages."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where}: a Hugging Face config is a JSON object, this is a {type(config).__name__}.")
    kind = config.get("model_type")
    if kind not in KNOWN:
        raise ConfigError(
            f"{where}: model_type {kind!r} is not one of {', '.join(KNOWN)}; plan it as a task: FILE.py:NAME."
        )
    width, heads = _whole(config, "hidden_size", where), _whole(config, "num_attention_heads", where)
    attention_bias = bool(config.get("attention_bias", False))
    return LlamaShape(
        vocabulary=_whole(config, "vocab_size", where),
        width=width,
        layers=_whole(config, "num_hidden_layers", where),
        heads=heads,
        key_value_heads=_whole(config, "num_key_value_heads", where, heads),
        head_width=_whole(config, "head_dim", where, width // heads),
        hidden=_whole(config, "intermediate_size", where),
        tied=bool(config.get("tie_word_embeddings", False)),
        query_key_value_bias=kind == "qwen2" or attention_bias,
        output_bias=kind != "qwen2" and attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        query_key_norm=kind == "qwen3",
    )


def _whole(config: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{where}: {name}={value!r}; it must be a whole number of 1 or more.")
    return value


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"{name}.weight", (rows, columns)), *([(f"{name}.bias", (rows,))] if bias else [])]


def _parameter(name: str, shape: tuple[int, ...]) -> ParameterShape:
    return ParameterShape(name=name, shape=shape, slots=ADAMW)
