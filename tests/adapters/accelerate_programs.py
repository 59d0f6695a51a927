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
from raysharded.driver.state.step_watch import LONG_PHASES
from tests.adapters.programs import MICROBATCHES, SIZE, STEPS, classifier, padded, run as run, sentences


def without_source(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator of the script's own."""
    return padded([{name: value for name, value in one.items() if name != "source"} for one in samples])


class Script:
    """A training function that is such a script: classification with accumulation, a schedule and an evaluation."""

    def __init__(
        self, folder: str = "", dropout: float = 0.1, mistake: str = "", schedule: str = "", samples: int = 24
    ) -> None:
        """`mistake`: one of those that `train` makes. `schedule`: where `train` steps it; empty: in the `with`."""
        self._folder, self._make, self._mistake = folder, partial(classifier, dropout), mistake
        self._schedule, self._samples = schedule, samples
        self._skipped = 0

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
        self.train(accelerator, model, sentences(self._samples), getattr(accelerator, "epochs", range))

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
                if self._mistake == "skips a batch" and step == 1 and self._skipped < 9:
                    self._skipped += 1
                    continue
                with nullcontext() if self._mistake == "no accumulate" else accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    if self._mistake == "two losses":
                        accelerator.backward(model(**batch).loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.7)
                    if self._mistake != "an update behind" and (
                        self._mistake != "by a count" or step % MICROBATCHES == 0
                    ):
                        optimizer.step()
                    if not self._schedule:
                        lr_scheduler.step()
                    optimizer.zero_grad()
                if self._mistake == "an update behind":
                    optimizer.step()
                if self._schedule == "behind":
                    lr_scheduler.step()
                if accelerator.sync_gradients:
                    completed_steps += 1
                    if self._mistake == "a schedule of microbatches":
                        accelerator.gather(loss.detach())
                    if self._schedule in ("counted", "with weights"):
                        lr_scheduler.step()
                    if self._schedule == "with weights":
                        with torch.no_grad():
                            for parameter in model.parameters():
                                parameter.clamp_(-0.05, 0.05)
                    if self._mistake == "a break" and completed_steps == 1:
                        return found
            if self._schedule == "of epochs":
                lr_scheduler.step()
            model.eval()
            right, hits, tokens, losses = 0, 0, 0, []
            evaluates = self._mistake != "evaluates on rank 0" or accelerator.is_main_process
            for batch in eval_dataloader if evaluates and self._schedule != "of epochs" else ():
                if hasattr(accelerator, "session"):
                    assert accelerator.session._training.engine.phase in LONG_PHASES
                with torch.no_grad():
                    outputs = model(**batch)
                predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(-1), batch["labels"]))
                right += int((predictions == references).sum())
                hits += int(accelerator.reduce((outputs.logits.argmax(-1) == batch["labels"]).sum()))
                ids = accelerator.pad_across_processes(batch["input_ids"], dim=1)
                tokens += int(accelerator.gather_for_metrics(ids).sum())
                losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(3)))
            counted = (torch.cat(losses).mean().item(), len(torch.cat(losses)), hits, tokens) if losses else ()
            found.append((epoch, right, *counted))
        if self._folder:
            self._write(accelerator, model, f"{completed_steps} {found}\n")
        return found

    def _write(self, accelerator: Any, model: nn.Module, line: str) -> None:
        """Write the model in two ways, and lines into files: each worker one, and rank 0 one."""
        from safetensors.torch import load_file

        whole = accelerator.unwrap_model(model)
        if accelerator.is_main_process:
            whole.save_pretrained(self._folder, save_function=accelerator.save)
        accelerator.save_model(model, f"{self._folder}/saved")
        accelerator.wait_for_everyone()
        assert load_file(f"{self._folder}/saved/model.safetensors").keys() == accelerator.get_state_dict(model).keys()
        append(f"{self._folder}/evaluations", line)
        accelerator.on_main_process(append)(f"{self._folder}/once", line)
        accelerator.end_training()


def append(file: str, line: str) -> None:
    """Append a line to a file."""
    with Path(file).open("a") as opened:
        opened.write(line)
