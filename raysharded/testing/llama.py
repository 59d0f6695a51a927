"""Shapes of real models, for tests and benchmarks of layouts: the tensors of the Llama family.

Sources: Touvron et al., "LLaMA", 2023, table 2; Grattafiori et al., "The Llama 3 Herd of Models", 2024, table 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from raysharded.layout import StateSpec, TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama:
    """The sizes of a model; its embedding and its output are not tied."""

    layers: int
    width: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every parameter, in the model's order."""
        kv = self.width // self.heads * self.kv_heads
        layer = [
            ("q", (self.width, self.width)),
            ("k", (kv, self.width)),
            ("v", (kv, self.width)),
            ("o", (self.width, self.width)),
            ("gate", (self.hidden, self.width)),
            ("up", (self.hidden, self.width)),
            ("down", (self.width, self.hidden)),
            ("attention_norm", (self.width,)),
            ("norm", (self.width,)),
        ]
        layers = [(f"layers.{i}.{name}", shape) for i in range(self.layers) for name, shape in layer]
        ends = (self.vocabulary, self.width)
        return [("embedding", ends), *layers, ("norm", (self.width,)), ("output", ends)]

    @property
    def num_parameters(self) -> int:
        """The elements of all parameters."""
        return sum(tensor.rows * tensor.row_bytes // tensor.itemsize for tensor in self._tensors(""))

    @property
    def state(self) -> StateSpec:
        """The state of a run with Adam: every parameter, both of its moments, in float32, and its count of steps."""
        kinds = ("model", "exp_avg", "exp_avg_sq")
        steps = [TensorSpec(name=f"step.{name}", dtype="float32", shape=()) for name, _ in self.shapes]
        return StateSpec(tensors=tuple(tensor for kind in kinds for tensor in self._tensors(kind)) + tuple(steps))

    def _tensors(self, kind: str) -> list[TensorSpec]:
        return [TensorSpec(name=f"{kind}.{name}", dtype="float32", shape=shape) for name, shape in self.shapes]


LLAMA_1B = Llama(layers=16, width=2048, hidden=8192, vocabulary=128256, heads=32, kv_heads=8)
LLAMA_70B = Llama(layers=80, width=8192, hidden=28672, vocabulary=128256, heads=64, kv_heads=8)
LLAMA_7B = Llama(layers=32, width=4096, hidden=11008, vocabulary=32000, heads=32, kv_heads=32)
LLAMA_405B = Llama(layers=126, width=16384, hidden=53248, vocabulary=128256, heads=128, kv_heads=8)
