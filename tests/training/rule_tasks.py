"""Programs that use the rules of `raysharded.numerics`, and their bits: here, or with an older raysharded.

    PYTHONPATH=<another raysharded> python tests/training/rule_tasks.py FOLDER quick|compiled

trains them in the folder and prints their results as JSON. Of each program only the numbers that its rule decides are
compared. Each is as insensitive to the other rules as it can be: weights that nobody draws, samples that are all the
same, sums that are exact in any order.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import raysharded as rs
from raysharded.testing.processes import fit

WIDTH = 6
Bits = dict[str, Any]


class Line(nn.Module):
    """A weight that is not drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 3 * WIDTH).reshape(3, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class Samples:
    """Integers that differ from sample to sample; or the same ones for all."""

    def __init__(self, num_samples: int, *, alike: bool = False) -> None:
        self._num_samples, self._alike = num_samples, alike

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0 if self._alike else index)
        return torch.randint(-8, 9, (WIDTH,), generator=generator).float()


class _Task(rs.Task):
    """A line that is moved by plain descent, with the same raysharded in every process."""

    lr = 0.125

    def __getstate__(self) -> str:
        return rs.__file__

    def __setstate__(self, made_with: str) -> None:
        if rs.__file__ != made_with:
            raise RuntimeError(f"the run is of {made_with}, and this worker has {rs.__file__}")

    def build_model(self) -> nn.Module:
        return Line()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr)


class Still(_Task):
    """Nothing moves: only the samples read, and the draws at the start, matter."""

    lr = 0.0

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).mean()  # type: ignore[no-any-return]


class Drawn(nn.Module):
    """Blocks whose weights, and a buffer, are drawn by their constructors."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.randn(WIDTH))
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x + self.shift)
        return x


class BuiltWhole(Still):
    def build_model(self) -> nn.Module:
        return Drawn()


def _normal(module: nn.Module, generator: torch.Generator) -> None:
    for param in module.parameters(recurse=False):
        nn.init.normal_(param, generator=generator)


class BuiltByModule(Still):
    """`Still`, drawn a module at a time; the buffer is not drawn."""

    init_weights = staticmethod(_normal)

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2))


class Draws(_Task):
    """Dropout in training, and numbers drawn in an evaluation: how many are kept is exact in any order."""

    lr = 0.0

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        ones = model(batch) * 0 + 1
        kept = (F.dropout(ones.repeat(1, 64), 0.25, training=True) > 0).flatten(1)
        marked = (kept * torch.arange(kept.shape[1])).sum()
        return rs.Loss(ones.sum() + marked, len(batch), {"places": (marked, 1)})

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        return self.loss(model, batch)


class PartlyFrozen(nn.Module):
    """A line, and a frozen part in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.frozen = Line(), nn.Sequential(Line(), nn.Dropout(0.5))
        self.frozen.requires_grad_(False).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x)  # type: ignore[no-any-return]


class Modes(_Task):
    """The modes of the modules, and settings that are left changed, are numbers of the step."""

    lr = 0.0

    def build_model(self) -> nn.Module:
        model = PartlyFrozen()
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(False)
        return model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        torch.set_float32_matmul_precision("high")
        return super().build_optimizer(model)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        settings = {
            "training": model.training,
            "frozen": sum(module.training for module in model.modules()),
            "default dtype": torch.get_default_dtype().itemsize,
            "precision": torch.get_float32_matmul_precision() == "high",
            "inference": torch.is_inference_mode_enabled(),
            "gradients": torch.is_grad_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "filled": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            "autocast": torch.is_autocast_enabled("cpu"),
        }
        computed_in = model(batch.to(torch.bfloat16)).dtype.itemsize
        metrics = {name: (float(value), 1) for name, value in {**settings, "itemsize": computed_in}.items()}
        return rs.Loss(model(batch.to(torch.bfloat16)).float().sum(), len(batch), metrics)

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        return self.loss(model, batch)


class Numbers(_Task):
    """Masked losses, clipping, a schedule, metrics and AdamW; gradients are integers, and so exact in any order."""

    max_grad_norm = 0.7

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)

    def lr_scale(self, step: int) -> float:
        return rs.warmup_cosine(step, warmup_steps=2, total_steps=10)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        counts, uneven = batch[:, 0] > -6, (batch.double() * 0.1).sin()  # no gradient is taken of these
        total = (model(batch) * counts[:, None]).sum() + uneven.sum()
        return rs.Loss(total, counts.sum(), {"mean": (uneven.sum(), uneven.numel()), "largest": (batch.max(), 1)})


class Plain(_Task):
    """Numbers that are not tensors and that float32 does not have, and rates in float32."""

    def lr_scale(self, step: int) -> float:
        return np.float32(0.1 * step)  # type: ignore[return-value]  # as schedules that NumPy made give them

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        metrics: dict[str, Any] = {
            "large": (123456789, 1),
            "tenth": (0.1, 1.0),
            "numpy": (np.float64(0.7), np.int64(3)),
        }
        return rs.Loss(model(batch).sum(), 2**24 + 1, metrics)


class Reduced(_Task):
    """Gradients whose sum depends on the order of addition."""

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch / 3) ** 3).mean()  # type: ignore[no-any-return]


class Parts(nn.Module):
    """Weights of which one is used by some microbatches, and one by none."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.now_and_then, self.never = Line(), Line(), Line()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.often(x)
        return y + self.now_and_then(x) if x[0, 0] > 0 else y


class Unused(_Task):
    """Weight decay and moments distinguish a gradient of zeros from none."""

    def build_model(self) -> nn.Module:
        return Parts()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).sum()  # type: ignore[no-any-return]


class Deep(nn.Module):
    """Drawn blocks with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(2)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Everything(Numbers):
    """All rules at once, as in a real program."""

    def build_model(self) -> nn.Module:
        return Deep()

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        total = (model(batch / 8) ** 2).sum()
        return rs.Loss(total, len(batch), {"largest": (batch.max(), 1)})

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        return self.loss(model, batch)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A task with its settings, and the numbers that its rules decide."""

    rules: tuple[str, ...]
    task: rs.Task
    compared: tuple[str, ...]
    """Fields of the journal's steps; `fingerprint`: of the final state."""
    workers: int = 2
    steps: int = 2
    microbatches: int = 5
    samples: int = 37
    alike: bool = False
    evaluates: bool = False
    engine: Mapping[str, Any] = field(default_factory=dict)


_STATE = ("gradient_norm", "fingerprint")
PROGRAMS: dict[str, Program] = {
    "weights built whole": Program(rules=("build",), task=BuiltWhole(), compared=("fingerprint",), steps=1, workers=1),
    "weights built by module": Program(
        rules=("build",), task=BuiltByModule(), compared=("fingerprint",), steps=1, workers=1
    ),
    "dropout": Program(
        rules=("draws",), task=Draws(), compared=("metrics", "evaluation"), alike=True, evaluates=True, workers=1
    ),
    "modes of modules": Program(
        rules=("modes",),
        task=Modes(),
        compared=("metrics", "evaluation"),
        workers=1,
        steps=1,
        alike=True,
        evaluates=True,
        engine={"param_dtype": "bfloat16"},
    ),
    "clipping, masks and metrics": Program(
        rules=("numbers",),
        task=Numbers(),
        compared=("loss", "weight", "gradient_norm", "lr", "metrics", "fingerprint"),
        steps=3,
        samples=10,
    ),
    "numbers of Python": Program(
        rules=("numbers",),
        task=Plain(),
        compared=("loss", "weight", "gradient_norm", "lr", "metrics", "fingerprint"),
        workers=1,
    ),
    "two epochs": Program(rules=("order",), task=Still(), compared=("digest", "reads"), steps=5),
    "two epochs, fast": Program(
        rules=("order",), task=Still(), compared=("digest", "reads"), workers=1, steps=5, engine={"reduction": "fast"}
    ),
    "the tree of 2 workers": Program(rules=("reduce",), task=Reduced(), compared=_STATE),
    "the tree of 3 workers": Program(rules=("reduce",), task=Reduced(), compared=_STATE, workers=3),
    "the tree, added locally": Program(
        rules=("reduce",), task=Reduced(), compared=_STATE, workers=3, engine={"accumulation": "local"}
    ),
    "parameters left out": Program(rules=("unused",), task=Unused(), compared=_STATE, steps=3),
    "parameters left out, alone": Program(rules=("unused",), task=Unused(), compared=_STATE, workers=1, samples=200),
}
SOME = {name: PROGRAMS[name] for name in ("parameters left out, alone",)}
"""Programs that have, together with `RESUMED`, all rules but that of compiled blocks."""
COMPILED: dict[str, Program] = {
    "compiled blocks": Program(
        rules=("compile",), task=Everything(), compared=("loss", *_STATE), workers=1, engine={"compile": True}
    )
}
"""Programs that need a compiler, and its time."""
RESUMED = Program(
    rules=("build", "draws", "modes", "numbers", "order", "reduce"),
    task=Everything(),
    compared=("loss", "weight", "gradient_norm", "lr", "digest", "metrics", "evaluation", "fingerprint"),
    steps=2,
    evaluates=True,
)
"""The program that is resumed."""
STOPPED_AFTER = 1


def trainer_of(name: str, program: Program, folder: str, *, steps: int | None = None, **run: Any) -> rs.ElasticTrainer:
    made = Samples(program.samples, alike=program.alike)
    data = [made[index] for index in range(len(made))]  # which a thread of the worker reads
    return rs.ElasticTrainer(
        task=program.task,
        data=data,
        batch=rs.BatchConfig(global_batch_size=2 * program.microbatches, microbatch_size=2, seed=11),
        scaling=rs.ScalingConfig(num_workers=program.workers),
        run=rs.RunConfig(name=name, storage_path=folder, max_steps=steps or program.steps, **run),
        engine=rs.EngineConfig(**program.engine),
        evaluation=rs.EvalConfig(data=data, every_steps=1, num_samples=5) if program.evaluates else None,
    )


def bits_of(trainer: rs.ElasticTrainer, compared: Sequence[str]) -> Bits:
    """The numbers of a program that is trained to its end: name -> by step, as JSON has it."""
    steps: dict[int, Mapping[str, Any]] = {}

    def listen(kind: str, fields: dict[str, Any]) -> None:
        if kind == "step":
            steps[fields["step"]] = dict(fields)

    result = fit(trainer, listen)
    found: Bits = {
        name: {str(step): fields.get(name) for step, fields in sorted(steps.items())}
        for name in compared
        if name != "fingerprint"
    }
    if "fingerprint" in compared:
        found["fingerprint"] = result.fingerprint
    plain: Bits = json.loads(json.dumps(found))
    return plain


def slug(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")


def all_bits(programs: Mapping[str, Program], folder: str) -> Iterator[tuple[str, Bits]]:
    for name, program in programs.items():
        yield name, bits_of(trainer_of(slug(name), program, folder), program.compared)


def main(folder: str, which: str) -> None:
    found: dict[str, Any] = {"version": rs.__version__, "from": rs.__file__}
    if which == "compiled":
        found["bits"] = dict(all_bits(COMPILED, folder))
    else:
        found["bits"] = dict(all_bits(SOME if which == "some" else PROGRAMS, folder))
        found["to its end"] = bits_of(trainer_of("to-its-end", RESUMED, folder), RESUMED.compared)
        found["stopped"] = bits_of(trainer_of("stopped", RESUMED, folder, steps=STOPPED_AFTER), RESUMED.compared)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
