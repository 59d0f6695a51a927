"""A script of Hugging Face's `Accelerator`, as people write them; with the plain one, or with one in a session."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raysharded.actors.session.user_session import Session
from tests.adapters.programs import MICROBATCHES, SIZE, STEPS, classifier, padded, run as run, sentences


def without_source(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator of the script's own."""
    return padded([{name: value for name, value in one.items() if name != "source"} for one in samples])


class Script:
    """A training function that is such a script: classification with accumulation, a schedule and an evaluation."""

    def __init__(self, folder: str = "", dropout: float = 0.1, mistake: str = "") -> None:
        """`mistake`: one of those that `train` makes."""
        self._folder, self._make, self._mistake = folder, partial(classifier, dropout), mistake

    def __call__(self, session: Session) -> None:
        from accelerate import Accelerator

        from raysharded.adapters.accelerate import elastic

        kind = Accelerator if self._mistake == "a plain Accelerator" else elastic(Accelerator, session)
        accelerator: Any = kind(gradient_accumulation_steps=MICROBATCHES, cpu=True)
        model = session.build(self._make)
        if self._mistake == "another model":
            model = self._make()
        if self._mistake == "moves the model":
            model.to(accelerator.device)
        self.train(accelerator, model, sentences(), getattr(accelerator, "epochs", range))

    def train(self, accelerator: Any, model: nn.Module, data: Any, epochs: Any = range, shuffle: bool = True) -> Any:
        """The script's lines."""
        from torch.utils.data import DataLoader
        from transformers import get_scheduler

        train_dataloader: Any = DataLoader(data, batch_size=SIZE, shuffle=shuffle, collate_fn=without_source)
        held_out: Any = sentences(7, first=100)
        eval_dataloader: Any = DataLoader(held_out, batch_size=3, collate_fn=without_source)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        horizon = STEPS * (MICROBATCHES if self._mistake == "a schedule of microbatches" else 1)
        lr_scheduler: Any = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=horizon)
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
            model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
        )
        completed_steps = 0
        num_epochs = math.ceil(STEPS * MICROBATCHES / len(train_dataloader))
        found: list[Any] = []
        for epoch in epochs(num_epochs):
            model.train()
            for step, batch in enumerate(train_dataloader):
                with nullcontext() if self._mistake == "no accumulate" else accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.7)
                    if self._mistake != "by a count" or step % MICROBATCHES == 0:
                        optimizer.step()
                    lr_scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    completed_steps += 1
                    if self._mistake == "a break" and completed_steps == 1:
                        return found
            model.eval()
            right, losses = 0, []
            evaluates = self._mistake != "evaluates on rank 0" or accelerator.is_main_process
            for batch in eval_dataloader if evaluates else ():
                with torch.no_grad():
                    outputs = model(**batch)
                predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(-1), batch["labels"]))
                right += int((predictions == references).sum())
                losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(3)))
            found.append((epoch, right, torch.cat(losses).mean().item(), len(torch.cat(losses))) if losses else ())
        if self._folder:
            whole = accelerator.unwrap_model(model)
            if accelerator.is_main_process:
                whole.save_pretrained(self._folder, save_function=accelerator.save)
            with Path(self._folder, "evaluations").open("a") as file:
                file.write(f"{completed_steps} {found}\n")
        return found
