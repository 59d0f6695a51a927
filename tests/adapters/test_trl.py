"""TRL's `SFTTrainer` and `DPOTrainer` in a session: losses of the plain ones, bits of one worker after losses."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import pytest

from raysharded.actors.session.user_session import Session
from raysharded.data.loader import MicrobatchLoader
from tests.adapters.plain import losses_of
from tests.adapters.programs import MICROBATCHES, SIZE, STEPS, VOCABULARY, causal_lm, run, texts, with_lora
from tests.training.harness import make_job

pytestmark = [pytest.mark.procs, pytest.mark.long, pytest.mark.usefixtures("server_with_trl")]

SAMPLES = 24
"""The run reads numbers: the trainer makes the samples of them, which it has tokenized itself."""


def tokenizer() -> Any:
    """A tokenizer of whole words: w3, w4, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{number}": number for number in range(3, VOCABULARY)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="right"
    )


def written(first: int = 0) -> list[str]:
    return [" ".join(f"w{max(3, token)}" for token in one["input_ids"]) for one in texts(SAMPLES, first=first)]


def dataset(kind: str) -> Any:
    """A dataset for `SFTTrainer` or `DPOTrainer`."""
    from datasets import Dataset

    if kind == "SFT":
        return Dataset.from_dict({"text": written()})
    return Dataset.from_dict({"prompt": written(), "chosen": written(50), "rejected": written(90)})


class Script:
    """A training function that is a script with a trainer of TRL."""

    def __init__(self, kind: str, *, lora: bool) -> None:
        self._kind, self._make = kind, partial(with_lora if lora else causal_lm, 0.0)

    def __call__(self, session: Session) -> None:
        import trl

        from raysharded.adapters.transformers import elastic

        kind = elastic(getattr(trl, f"{self._kind}Trainer"), session)
        self._trainer(kind, session.build(self._make), dataset(self._kind)).train()

    def plain(self) -> Any:
        """The plain trainer, which has trained on the run's samples in their order, each step as one batch."""
        import trl

        loader = MicrobatchLoader(list(range(SAMPLES)), make_job("", microbatches=MICROBATCHES).batch)
        keys = [(step, index) for step in range(1, STEPS + 1) for index in range(MICROBATCHES)]
        ordered = dataset(self._kind).select([sample for key in keys for sample in loader.load(*key).samples])
        in_order = {"train_sampling_strategy": "sequential"}
        trainer = self._trainer(getattr(trl, f"{self._kind}Trainer"), self._make(), ordered, **in_order)
        trainer.train()
        return trainer

    def _trainer(self, kind: Any, model: Any, data: Any, **changed: Any) -> Any:
        import trl

        settings: dict[str, Any] = {
            "output_dir": tempfile.mkdtemp(),
            "max_steps": STEPS,
            "per_device_train_batch_size": SIZE,
            "gradient_accumulation_steps": MICROBATCHES,
            "learning_rate": 1e-2,
            "warmup_steps": 2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
        }
        args = getattr(trl, f"{self._kind}Config")(**(settings | changed))
        reference = {"ref_model": causal_lm(0.0)} if self._kind == "DPO" else {}
        return kind(model=model, args=args, train_dataset=data, processing_class=tokenizer(), **reference)


@pytest.mark.parametrize(("kind", "lora"), [("SFT", False), ("SFT", True), ("DPO", False)])
def test_losses_are_those_of_the_plain_trainer_and_bits_those_of_one_worker(kind: str, lora: bool) -> None:
    script = Script(kind, lora=lora)
    wanted = losses_of(script.plain())
    found = run(3, script, range(SAMPLES), kills=[(1, 3, "backward"), (2, STEPS, "apply")])
    assert found.losses == pytest.approx(wanted, abs=1e-5)
    assert found.bits == run(1, script, range(SAMPLES)).bits
