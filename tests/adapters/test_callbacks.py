"""Callbacks of a Hugging Face `Trainer` when workers change: who shows, and what is called again."""

from __future__ import annotations

import os
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from raysharded import numerics
from tests.adapters.programs import STEPS, Script, by_one_worker, run
from tests.cases import tried_each_time
from tests.training.harness import Outcome

pytestmark = pytest.mark.procs


class Tracker:
    """In place of the module `wandb`: a run that is to be begun before anything is logged."""

    def __init__(self, folder: str) -> None:
        self._folder, self.run = folder, None
        self.config: dict[str, Any] = {}

    def init(self, **_: Any) -> None:
        assert self.run is None
        self.run = SimpleNamespace(summary={}, _label=lambda **_: None)  # type: ignore[assignment]
        self._note("init")

    def log(self, numbers: dict[str, Any]) -> None:
        assert self.run is not None
        if "train/loss" in numbers:
            self._note(f"log {numbers['train/global_step']}")

    def _note(self, line: str) -> None:
        with Path(self._folder, "tracked").open("a") as file:
            file.write(f"{os.getpid()} {line}\n")


def shown(folder: str) -> dict[str, Any]:
    """A tracker, a custom progress bar, and a callback that notes when the training begins."""
    from transformers import ProgressCallback, TrainerCallback
    from transformers.integrations.integration_utils import WandbCallback

    class Bar(ProgressCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.begun = 1 + getattr(self, "begun", 0)
            super().on_train_begin(args, state, control, **others)  # type: ignore[no-untyped-call]

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            super().on_step_end(args, state, control, **others)  # type: ignore[no-untyped-call]
            assert self.begun == 1
            assert (self.training_bar is not None) == state.is_world_process_zero
            if self.training_bar is not None:
                with Path(folder, "bars").open("a") as file:
                    file.write(f"{os.getpid()} {self.training_bar.n}\n")

    class Own(TrainerCallback):
        begun = 0
        _initialized = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.begun, self._initialized = self.begun + 1, True

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            assert (self.begun, self._initialized) == (1, True)

    tracker: Any = WandbCallback()  # type: ignore[no-untyped-call]
    tracker._wandb = Tracker(folder)
    return {"callbacks": [tracker, Bar(), Own()]}


def test_a_worker_that_becomes_rank_0_shows_and_tracks_from_there(tmp_path: Path) -> None:
    script = Script(given=partial(shown, str(tmp_path)), disable_tqdm=False)
    assert run(2, script, kills=[(0, 3, "forward")]).bits == by_one_worker().bits
    lines = [line.split() for line in (tmp_path / "tracked").read_text().splitlines()]
    inits, logs = [line for line in lines if line[1] == "init"], [line for line in lines if line[1] == "log"]
    assert len({line[0] for line in inits}) == len(inits) == 2
    assert [int(line[2]) for line in logs] == list(range(1, STEPS + 1))
    assert [line[0] for line in logs] == [inits[0][0]] * 2 + [inits[1][0]] * (STEPS - 2)
    bars = [line.split() for line in (tmp_path / "bars").read_text().splitlines()]
    assert [(pid, int(number)) for pid, number in bars] == [(line[0], int(line[2])) for line in logs]


def test_a_worker_that_is_rank_0_no_more_closes_its_bar_and_begins_it_again_when_it_is(tmp_path: Path) -> None:
    from transformers import TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl

    from raysharded.adapters.hf_loop import Loop

    handler: Any = CallbackHandler
    tracker, bar, _ = shown(str(tmp_path))["callbacks"]
    state, control = TrainerState(max_steps=STEPS), TrainerControl()
    session: Any = SimpleNamespace(rank=0, batch=SimpleNamespace(global_batch_size=4))
    trainer = SimpleNamespace(
        args=TrainingArguments(str(tmp_path), report_to="none", use_cpu=True),
        callback_handler=handler([DefaultFlowCallback(), tracker, bar], torch.nn.Linear(1, 1), None, None, None),
        state=state,
        control=control,
        session=session,
        train_dataset=[{"id": 0}] * 24,
    )
    loop = Loop(trainer)
    trainer.callback_handler.callbacks.insert(0, loop)
    trainer.callback_handler.on_train_begin(trainer.args, state, control)
    seen = []
    for rank in (0, 1, 1, 0, 2, 0):
        session.rank = rank
        loop._show_rank(state)
        seen.append((state.is_world_process_zero, bar.training_bar is not None))
        state.global_step += 1
        trainer.callback_handler.on_step_end(trainer.args, state, control)
    assert seen == [(rank == 0, rank == 0) for rank in (0, 1, 1, 0, 2, 0)]
    assert (tmp_path / "tracked").read_text().count("init") == 1


def annealed() -> dict[str, Any]:
    """A factor of the loss that callbacks set, by the epoch, and by what they draw as an epoch and a step begin."""
    from transformers import TrainerCallback

    class Annealed(TrainerCallback):
        by_epoch = by_step = 1.0

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.by_epoch = 1.0 + 0.5 * int(state.epoch) + float(torch.rand(()))

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.by_step = 1.0 + state.global_step + float(torch.rand(3)[2])

    factor = Annealed()

    def loss_of(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
        logits, wanted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        total = F.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum")
        return total * factor.by_epoch * factor.by_step / num_items_in_batch

    return {"callbacks": [factor], "compute_loss_func": loss_of}


@cache
def annealed_by_one_worker() -> Outcome:
    return run(1, Script(given=annealed))


REDONE = [[(1, 3, "snapshot")], [(1, 3, "snapshot"), (2, 5, "apply")], [(1, 2, "backward"), (2, 5, "apply")]]


@pytest.mark.parametrize(
    "kills",
    tried_each_time(REDONE[:1], REDONE),
    ids=["behind an epoch", "behind an epoch and in one", "within one"],
)
def test_what_callbacks_set_and_draw_as_a_step_begins_is_the_same_when_it_is_done_again(
    kills: list[tuple[int, int, str]],
) -> None:
    assert run(1 + len(kills), Script(given=annealed), kills=kills).bits == annealed_by_one_worker().bits


def test_a_run_that_began_before_events_were_seeded_draws_what_its_loop_left(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(given=annealed, max_steps=2)
    newest = run(1, script, steps=2).bits
    older = numerics.newest().replace("draws 3", "draws 2")
    monkeypatch.setattr(numerics, "newest", lambda: older)
    assert run(1, script, steps=2).bits == run(1, script, steps=2).bits != newest
