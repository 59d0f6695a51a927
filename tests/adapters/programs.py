"""Scripts of Hugging Face's `Trainer`, as people write them, and the data that they read."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from raysharded.actors.session.user_session import Session
from raysharded.task import TrainFunction
from tests.training.harness import Outcome, train

VOCABULARY, MICROBATCHES, STEPS, SIZE = 61, 4, 6, 2
"""Microbatches of `SIZE` samples in a step, as `harness.make_job` sets it."""


def texts(count: int = 24, *, first: int = 0) -> list[dict[str, Any]]:
    """Texts of different lengths; the first tokens of some have no label."""
    found = []
    for number in range(first, first + count):
        draw = np.random.default_rng(number)
        ids = draw.integers(1, VOCABULARY, int(draw.integers(4, 10))).tolist()
        found.append({"input_ids": ids, "labels": [-100] * (number % 3) + ids[number % 3 :]})
    return found


def sentences(count: int = 24, *, first: int = 0) -> list[dict[str, Any]]:
    """Texts with a class each, which their tokens decide; and a column that no model takes."""
    return [
        {"input_ids": one["input_ids"], "labels": int(sum(one["input_ids"]) % 3), "source": "made up"}
        for one in texts(count, first=first)
    ]


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A padding collator."""
    longest = max(len(one["input_ids"]) for one in samples)
    assert all("source" not in one for one in samples), "a Trainer removes columns that the model does not take"

    def row(values: list[int], fill: int) -> list[int]:
        return values + [fill] * (longest - len(values))

    labels = [one["labels"] if isinstance(one["labels"], int) else row(one["labels"], -100) for one in samples]
    return {
        "input_ids": torch.tensor([row(one["input_ids"], 0) for one in samples]),
        "attention_mask": torch.tensor([row([1] * len(one["input_ids"]), 0) for one in samples]),
        "labels": torch.tensor(labels),
    }


def _config(**settings: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        **settings,
    )


def causal_lm(dropout: float = 0.1) -> nn.Module:
    """A tiny Llama with the same weights each time, tied embeddings, and dropout in its attention."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(7)
    return LlamaForCausalLM(_config(attention_dropout=dropout, tie_word_embeddings=True))


def classifier(dropout: float = 0.1) -> nn.Module:
    """A tiny Llama that classifies, with three classes."""
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(7)
    return LlamaForSequenceClassification(_config(attention_dropout=dropout, num_labels=3))  # type: ignore[no-untyped-call]


def with_lora(dropout: float = 0.1) -> nn.Module:
    """The language model behind an adapter of low rank."""
    from peft import LoraConfig, get_peft_model

    model = causal_lm(0.0)
    torch.manual_seed(8)
    lora = LoraConfig(
        r=2, lora_alpha=4, lora_dropout=dropout, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    found: nn.Module = get_peft_model(model, lora)
    return found


def translator() -> nn.Module:
    """A tiny T5."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(7)
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = T5Config(**sizes | {"vocab_size": VOCABULARY, "decoder_start_token_id": 0})
    return T5ForConditionalGeneration(config)


def arguments(folder: str, kind: str = "TrainingArguments", **changed: Any) -> Any:
    """Arguments as of a script: warm-up, cosine, clipping, weight decay, a log line for each step."""
    import transformers

    settings: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": STEPS,
        "per_device_train_batch_size": SIZE,
        "gradient_accumulation_steps": MICROBATCHES,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.7,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return getattr(transformers, kind)(**(settings | changed))


class Script:
    """A training function that is a script with a `Trainer`, with places for what a test changes in it."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = causal_lm,
        data: list[dict[str, Any]] | None = None,
        folder: str = "",
        behind: Callable[[Any], None] | None = None,
        given: Callable[[], dict[str, Any]] = dict,
        kind: str = "Trainer",
        **changed: Any,
    ) -> None:
        """`behind`: called with the trainer once it has trained. `given`: makes more arguments of the Trainer. `kind`:
        the name of its class in transformers."""
        self._kind = kind
        self._make, self._data, self._folder = make, data or texts(), folder
        self._behind, self._given, self._changed = behind, given, changed

    def __call__(self, session: Session) -> None:
        import transformers

        from raysharded.adapters.transformers import elastic

        folder = self._folder or tempfile.mkdtemp()
        model = session.build(self._make)
        trainer = elastic(getattr(transformers, self._kind), session)(
            model=model,
            args=arguments(folder, f"{self._kind.replace('Trainer', '')}TrainingArguments", **self._changed),
            train_dataset=self._data,
            **({"data_collator": padded} | self._given()),
        )
        trainer.train()
        if self._behind is not None:
            self._behind(trainer)


@cache
def by_one_worker() -> Outcome:
    """A script with its defaults, undisturbed."""
    return run(1, Script())


def run(workers: int, script: Callable[[Session], None], data: Any = None, **others: Any) -> Outcome:
    """As `harness.train`, with a script."""
    settings: dict[str, Any] = {"microbatches": MICROBATCHES, "steps": STEPS, "data": data or texts()}
    return train(workers, task=TrainFunction(script), **(settings | others))
