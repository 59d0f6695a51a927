"""The example's Llama-like model, tiny, with sizes that few degrees of tensor parallelism divide evenly."""

from __future__ import annotations

from examples.train_llama import NextToken
from tests.training.harness import VOCABULARY


class LlamaTask(NextToken):
    """Two blocks of twelve heads; the vocabulary is odd, so that a weight's rows are cut unevenly."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__(VOCABULARY, width=48, layers=layers, heads=12, kv_heads=12)


class WideLlama(NextToken):
    """With weights large enough that other reads of a checkpoint do not count."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, width=384, layers=1, heads=12, kv_heads=12)
