"""Floating-point inputs that mixed precision rounds: the cast ones, and the notice about inputs that are not
activations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.actors.guards.inputs import arguments, rounded, tensors_in, vocabulary_remark
from raysharded.clock import SystemClock
from raysharded.data.store.layout import Kind
from raysharded.data.store.writer import StoreWriter
from raysharded.errors import ConfigError
from raysharded.journal.log import Journal
from raysharded.run.local import LocalRun
from tests.cases import tried_each_time
from tests.test_config import trainer
from tests.training.harness import SEQUENCE, VOCABULARY, Outcome, SmallTask, log_into, train

TIMES = (914.0, 3.0, 257.0)


class Steps:
    """Pixels, and a time step that bfloat16 does not have."""

    def __init__(self, *, as_integers: bool = False) -> None:
        self._as_integers = as_integers

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time = torch.tensor(TIMES[index % 3])
        pixels = torch.arange(4.0) + index
        return {"x": pixels, "t": time.long() if self._as_integers else time}


class Block(nn.Module):
    """Takes a table in float32, and reports the dtype that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.01, 0.01, 16).reshape(4, 4))

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + x @ self.weight.T, table.sum().float()


class Net(nn.Module):
    """Reports the largest time and the sum of a table as they arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 0.01))
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        table = torch.tensor([0.1, 0.3])
        x = x.to(self.scale.dtype) * self.scale
        for block in self.blocks:
            x, seen = block(x, table=table)
        return x, t.float().max(), seen


class Diffusion(rs.Task):
    def build_model(self) -> nn.Module:
        return Net()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> rs.Loss:
        y, time, table = model(batch["x"], t=batch["t"])
        return rs.Loss(y.float().square().sum(), len(y), {"time": (time, 1), "table": (table, 1)})


def trained(workers: int, cast: Any, *, as_integers: bool = False, **settings: Any) -> Outcome:
    engine = rs.EngineConfig(param_dtype="bfloat16", cast_inputs=cast, **settings.pop("engine", {}))
    made = Steps(as_integers=as_integers)
    data = [made[index] for index in range(len(made))]
    return train(workers, task=Diffusion(), data=data, microbatches=3, steps=2, engine=engine, **settings)


def remarks(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if "param_dtype casts all" in line]


TABLE = "Block.forward gets 'table', of shape (2,), rounded to bfloat16, "
TIME = "Net.forward gets 't', of shape (2,), rounded to bfloat16, "


@pytest.mark.procs
def test_times_and_tables_are_rounded_by_default_with_one_notice_each(tmp_path: Path) -> None:
    outcome = trained(1, "all", prepare=partial(log_into, f"{tmp_path}/one"))
    assert max(numbers["metrics"]["time"] for numbers in outcome.numbers) <= 912
    said = sorted(remarks(tmp_path / "one"))
    assert [line.startswith(start) for line, start in zip(said, (TABLE, TIME), strict=True)] == [True, True]
    assert "arrives as 912" in said[1] or "arrives as 256" in said[1]
    assert "pass it as integers" in said[1]
    assert 'EngineConfig(cast_inputs="units")' in said[1]
    assert 'EngineConfig(cast_inputs="none")' in said[0]
    log = partial(log_into, f"{tmp_path}/two")
    assert trained(2, "all", kills=[(1, 2, "backward")], prepare=log).bits == outcome.bits
    assert len(remarks(tmp_path / "two")) == 2


@pytest.mark.procs
@pytest.mark.parametrize(
    ("cast", "as_integers", "said"),
    tried_each_time(
        [("units", False, [TABLE]), ("none", False, [])],
        [("all", True, [TABLE]), ("units", False, [TABLE]), ("none", False, [])],
    ),
)
def test_the_ways_out_let_times_arrive_as_they_were_given(
    cast: Any, as_integers: bool, said: list[str], tmp_path: Path
) -> None:
    outcome = trained(2, cast, as_integers=as_integers, prepare=partial(log_into, f"{tmp_path}/log"))
    assert any(numbers["metrics"]["time"] > 256 for numbers in outcome.numbers)
    table = outcome.numbers[0]["metrics"]["table"]
    assert (table == pytest.approx(0.4, rel=1e-7)) == (cast == "none")
    assert [line[: len(TABLE)] for line in remarks(tmp_path / "log")] == said
    if cast == "units":
        assert trained(1, cast, as_integers=as_integers).bits == outcome.bits


@pytest.mark.long
@pytest.mark.procs
@pytest.mark.parametrize(("cast", "as_integers"), [("all", True), ("none", False)])
def test_inputs_that_are_not_rounded_give_the_same_bits_at_two_sizes(cast: Any, as_integers: bool) -> None:
    assert trained(1, cast, as_integers=as_integers).bits == trained(2, cast, as_integers=as_integers).bits


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (torch.tensor([[914.0], [3.0]]), (914.0, 912.0)),
        (torch.tensor([1.0, 257.0]), (257.0, 256.0)),
        (torch.tensor([0.1]), (0.1, 0.10009765625)),
        (torch.tensor([0.5, 2.0]), None),
        (torch.arange(256.0).reshape(1, 16, 16), None),
        (torch.rand(3, 16, 16) * 300, None),
        (torch.rand(4, 4), None),
        (torch.tensor([914]), None),
        (torch.tensor([914.0]).bfloat16(), None),
        (torch.tensor([914.0], requires_grad=True), None),
        (torch.tensor([float("inf"), float("nan"), 1.0]), None),
        (torch.empty(0), None),
    ],
    ids=[
        "times", "one dimension", "fraction", "exact", "pixels", "images", "activations", "integers", "cast already",
        "of a gradient", "infinite", "empty",
    ],
)  # fmt: skip
def test_what_is_no_activation_and_changes_is_found(value: torch.Tensor, found: tuple[float, float] | None) -> None:
    assert rounded(value, torch.bfloat16) == (found if found is None else pytest.approx(found))


@dataclass
class Conditions:
    """As some models bundle their arguments."""

    t: torch.Tensor


def test_arguments_are_named_where_they_are_nested() -> None:
    def forward(x: torch.Tensor, cond: Any = None, **more: Any) -> None: ...

    value = torch.zeros(1)
    named = arguments(forward, (value,), {"cond": [Conditions(value), {"s": value}], "extra": value})
    paths = [path for name, argument in named.items() for path, _ in tensors_in(name, argument)]
    assert paths == ["x", "cond[0].t", "cond[1]['s']", "more['extra']"]
    assert [*arguments(forward, (), {"x": 1, "y": 2}), *arguments(partial(forward), (1,), {})] == ["x", "more", "x"]


def test_the_setting_is_recorded_and_a_run_that_is_older_counts_as_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = trainer(engine=rs.EngineConfig(param_dtype="bfloat16", cast_inputs="none"))
    settings = made.spec().settings()
    assert settings["cast_inputs"] == "none"
    run = LocalRun(made.spec())
    del settings["cast_inputs"]
    Journal(run._storage, SystemClock(), "before").append("started", settings, durable=True)
    with pytest.raises(ConfigError, match=r"started with cast_inputs='all' and is resumed with 'none'"):
        run.drive()


def test_a_model_without_an_embedding_for_some_tokens_is_named_before_training(tmp_path: Path) -> None:
    kind = Kind(tokenizer="bytes", vocab_size=257)
    with StoreWriter(f"{tmp_path}/store", kind, 1 << 20) as writer:
        writer.write(np.random.default_rng(0).integers(0, VOCABULARY, 5000, dtype=np.uint32))
    data = rs.TokenDataset(tmp_path / "store", seq_len=SEQUENCE)
    outcome = train(1, task=SmallTask(), data=data, steps=1, microbatches=2)
    remarks = [text for fields in outcome.of("step") for text in fields.get("remarks", ())]
    sentence = (
        f"the vocabulary of the data has 257 tokens, and the model's largest embedding {VOCABULARY} rows: a token from "
        f"{VOCABULARY} on would raise IndexError. Give the model 257 rows, or the data the model's tokenizer."
    )
    assert sentence in remarks
    mixture = rs.Mixture({"a": data, "b": data}, {"a": 1, "b": 1})
    assert vocabulary_remark(mixture, nn.Embedding(256, 2))
    assert not vocabulary_remark(mixture, nn.Embedding(257, 2))
    assert not vocabulary_remark(mixture, nn.Linear(2, 2))
    assert not vocabulary_remark([1, 2], nn.Embedding(2, 2))
