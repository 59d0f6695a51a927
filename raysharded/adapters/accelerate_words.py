"""Sentences of a session about its loop, in the words of a script that has an `Accelerator`."""

from __future__ import annotations

_WITH = "`with accelerator.accumulate(model):`"

WORDS = (
    (
        r"(step \d+ ended without )optimizer\.step\(\):.*",
        (
            rf"\1optimizer.step(): in {_WITH} call it for each microbatch, or `if accelerator.sync_gradients:`, and "
            r"not by a count of the script, as `if step % n == 0:`. It works at the step's last microbatch alone."
        ),
    ),
    (
        r"optimizer\.step\(\) came before the loop over step\.microbatches\(\) has ended\..*",
        (
            "optimizer.step() came before the step's last microbatch: call that of the optimizer which "
            "accelerator.prepare has returned."
        ),
    ),
    (
        r"iterate over session\.steps\(\) without break or return",
        (
            "the loop over accelerator.epochs(num_epochs) trains until then. A script that leaves it by `break`, as at "
            "max_train_steps, needs that number in RunConfig(max_steps=...)"
        ),
    ),
    (r"session\.shard\(collate=\.\.\.\)", "collate_fn of the training data's DataLoader"),
    (r"session\.shard\(model, optimizer, scheduler=scheduler\)", "accelerator.prepare(..., scheduler)"),
    (r"session\.shard\(\.\.\., name=object\)", "accelerator.register_for_checkpointing(object), before prepare"),
    (r"session\.shard(\(model, optimizer\))?", "accelerator.prepare"),
    (r"session\.steps\(\)", "accelerator.epochs(num_epochs)"),
    (r"`with step:`", _WITH),
    (r"\bstep\.backward\(loss\)", "accelerator.backward(loss)"),
    (r"\bstep\.clip_grad_norm_", "accelerator.clip_grad_norm_"),
    (r"\bstep\.microbatches\(\)", "the training data"),
)
"""(pattern, replacement), in this order."""
