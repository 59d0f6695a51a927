"""Methods of a framework's trainer that a session replaces: a subclass that overrides one is refused by its name.

Its override would not be called, and nothing would show it. Loads no framework.
"""

from __future__ import annotations

from collections.abc import Mapping

from raysharded.errors import ConfigError

_COMPUTED = "the session computes a step's microbatches"
_READ = "the run reads the samples, in its own order"
_CLIPPED = "the session clips the exact norm of the whole gradient"
_SHARDED = "the session shards the model over the workers"

HUGGING_FACE: Mapping[str, str] = {
    "training_step": f"{_COMPUTED}. Change the loss in compute_loss, and what is around a step in a callback.",
    "get_batch_samples": f"{_READ}. Change the samples in the dataset or the collator.",
    "get_train_dataloader": f"{_READ}. Give ElasticTrainer(data=...) the samples, and data_collator= the collator.",
    "_get_dataloader": f"{_READ}. Give ElasticTrainer(data=...) the samples, and data_collator= the collator.",
    "_get_train_sampler": f"{_READ}. Give ElasticTrainer(data=...) data in which a sample of weight 2 is there twice.",
    "set_initial_training_values": "the steps are those of RunConfig(max_steps=...). Set it there.",
    "_prepare_for_training": f"{_SHARDED}. Override create_optimizer or create_scheduler, or use a callback.",
    "_clip_grad_norm": f"{_CLIPPED}. Set max_grad_norm.",
    "_get_grad_norm": f"{_CLIPPED}. Read the norm from the log.",
    "save_model": "rank 0 writes the whole model. Override _save, or write further files behind train().",
}
"""Method of a `Trainer` -> what takes its place, and the way out."""
TORCHTITAN: Mapping[str, str] = {
    "train_step": f"{_COMPUTED}. Change the loss in the configuration's loss, or write the loop with session.steps().",
    "forward_backward_step": f"{_COMPUTED}. Override post_dataloading_process, or write the loop with session.steps().",
    "pp_forward_backward_step": f"{_COMPUTED}. Write the loop with session.steps().",
    "batch_generator": f"{_READ}. Change the samples in the dataloader's configuration.",
    "init_distributed": f"{_SHARDED}. Leave it out.",
}
"""As `HUGGING_FACE`, for torchtitan's `Trainer`."""
_BASES = ("transformers.trainer.Trainer", "torchtitan.trainer.Trainer")
_OFFLOAD = frozenset({"training_step"})  # it offloads activations
_UNCHANGED: Mapping[str, frozenset[str]] = {
    "trl.trainer.dpo_trainer.DPOTrainer": _OFFLOAD,
    "trl.trainer.kto_trainer.KTOTrainer": _OFFLOAD | {"_get_train_sampler"},  # for transformers before 5.2
    "trl.trainer.reward_trainer.RewardTrainer": _OFFLOAD,
    "trl.trainer.sft_trainer.SFTTrainer": _OFFLOAD,
}
"""Overrides of TRL 1.16 without which a session computes the same."""


def require_own_methods(trainer: type, replaced: Mapping[str, str]) -> None:
    """Raise ConfigError if a class between this one and the framework's `Trainer` overrides a replaced method."""
    for kind in trainer.__mro__:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in _BASES:
            return
        if name.startswith("transformers."):  # Seq2SeqTrainer
            continue
        found = next((one for one in replaced if one in vars(kind) and one not in _UNCHANGED.get(name, ())), None)
        if found is not None:
            through = "" if kind is trainer else f", of which {trainer.__name__} is a subclass"
            raise ConfigError(
                f"{kind.__name__}.{found} would not be called in a session{through}: {replaced[found]}{_of_trl(name)}"
            )


def _of_trl(name: str) -> str:
    return " Of TRL's trainers a session has SFTTrainer and DPOTrainer." if name.startswith("trl.") else ""
