"""Losses that were reported, values that units may return, samples of every form, and runs that change their task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import raysharded as rs
from tests.corpus.builds import Table
from tests.corpus.idioms import Tied
from tests.corpus.language_models import TEXTS
from tests.corpus.model_cases import Lengths
from tests.corpus.program import WIDTH, Block, Fit, Net, Program, Programs, adamw, fitted, vectors
from tests.corpus.torch_models import Encoder, by_first

# -- losses --


def labels_of(batch: torch.Tensor) -> torch.Tensor:
    """Labels of which most do not count: none of some microbatches does."""
    labels = (batch[:, 0].abs() * 50).long() % 3
    return labels.masked_fill(batch[:, 1] < 0.2, -100)


def of_labelled(model: nn.Module, batch: torch.Tensor) -> rs.Loss:
    labels = labels_of(batch)
    total = F.cross_entropy(model(batch), labels, ignore_index=-100, reduction="sum")
    return rs.Loss(total, (labels != -100).sum())


def none_without_labels(model: nn.Module, batch: torch.Tensor) -> rs.Loss:
    loss = of_labelled(model, batch)
    return loss if int(loss.weight) else rs.Loss(torch.zeros(()), 0)


def mean_of_labelled(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch), labels_of(batch), ignore_index=-100)


def summed_in_half(model: nn.Module, batch: torch.Tensor) -> rs.Loss:
    logits, targets = model(batch[:, :-1]), batch[:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return rs.Loss(total, targets.numel())


class Timed(Net):
    """Receives the time as a float, and adds its cosine."""

    def forward(self, x: torch.Tensor, time: torch.Tensor | None = None) -> torch.Tensor:
        assert time is not None
        x = (x + time.cos()[:, None]).to(self.first.weight.dtype)
        return super().forward(x)


def at_times(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch, (batch[:, 0].abs() * 900).round()).float() - 1).square().mean()


class Encoding(Net):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.first(x))
        return y


def by_submodule(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    assert isinstance(model, Net)
    y: torch.Tensor = model.head(model.first(batch))
    return y.square().mean()


def by_method(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    assert isinstance(model, Encoding)
    return model.encode(batch).square().mean()


def with_l2(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    y = model(batch)
    return (y - 1).square().mean() + 0.01 * sum(param.square().sum() for param in model.parameters())


def penalized(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    batch.requires_grad_()
    y = model(batch)
    (slope,) = torch.autograd.grad(y.sum(), batch, create_graph=True)
    return y.square().mean() + (slope.norm(dim=1) - 1).square().mean()


def backward_before(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    model(batch).mean().backward()
    return (model(batch) - 1).square().mean()


def adversarial(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    batch.requires_grad_()
    (slope,) = torch.autograd.grad((model(batch) - 1).square().mean(), batch)
    return (model(batch.detach() + 0.1 * slope.sign()) - 1).square().mean()


def freezing(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    assert isinstance(model, Net)
    model.first.weight.requires_grad_(bool(batch[0, 0] > 0))
    return (model(batch) - 1).square().mean()


def early(model: nn.Module, batch: torch.Tensor) -> Any:
    if not int((labels_of(batch) != -100).sum()):
        return torch.zeros((), requires_grad=True)
    return of_labelled(model, batch)


class Headless(Net):
    """Its head is for the loss to call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class HeadUnit(Fit):
    """The head is a separate unit."""

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model.head(model(batch))  # type: ignore[operator]
        return (y - 1).square().mean()

    def wrap(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, Headless)
        return [*model.blocks, model.head]


def nothing(model: nn.Module, batch: torch.Tensor) -> Any:
    model(batch)


# -- values of units --


@dataclass
class Output:
    """Output of a unit."""

    hidden: torch.Tensor
    mean: torch.Tensor


class Bare:
    """Output of a unit, as a plain class."""

    def __init__(self, hidden: torch.Tensor, mean: torch.Tensor) -> None:
        self.hidden, self.mean = hidden, mean


class Returning(Block):
    """Returns a function's value for a hidden state."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(super().forward(x))


def as_nested(x: torch.Tensor) -> Any:
    return {"hidden": (x, [x.mean(-1)])}


def as_dataclass(x: torch.Tensor) -> Any:
    return Output(x, x.mean(-1))


def as_object(x: torch.Tensor) -> Any:
    return Bare(x, x.mean(-1))


def as_view(x: torch.Tensor) -> Any:
    return x.view(-1, WIDTH)


def from_nested(out: Any) -> torch.Tensor:
    (hidden, (mean,)) = out["hidden"]
    y: torch.Tensor = hidden + mean[:, None]
    return y


def from_object(out: Any) -> torch.Tensor:
    y: torch.Tensor = out.hidden + out.mean[:, None]
    return y


def from_view(out: Any) -> torch.Tensor:
    out += 1
    return out


class Taking(Net):
    """Continues with a function's value for its blocks' outputs."""

    def __init__(self, make: Callable[[torch.Tensor], Any], take: Callable[[Any], torch.Tensor]) -> None:
        super().__init__(partial(Returning, make))
        self.take = take

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.take(block(x))
        y: torch.Tensor = self.head(x)
        return y


class Keeping(Block):
    """Keeps a tensor from inside."""

    kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.norm(x)
        return super().forward(x)


class Caching(Net):
    """Continues with the tensor that its first block has kept."""

    def __init__(self) -> None:
        super().__init__(Keeping)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        first = self.blocks[0]
        assert isinstance(first, Keeping)
        assert first.kept is not None
        return y + first.kept[:, :3]


# -- samples --


class Samples:
    """Made of the vectors, one at a time."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return len(vectors())

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Stream:
    """One sample after the other."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from vectors()


def none_at_seven(index: int) -> Any:
    return None if index % 7 == 3 else vectors()[index]


def nested(index: int) -> Any:
    vector = vectors()[index]
    return {"pair": (vector.numpy(), np.float32(index)), "label": index % 3, "half": np.zeros(2, np.float64)}


def of_nested(model: nn.Module, batch: Any) -> torch.Tensor:
    x, number = batch["pair"]
    return F.cross_entropy(model(x + number[:, None] / 100), batch["label"]) + batch["half"].sum().float()


# -- other tasks later --


def partly(*names: str) -> nn.Module:
    """Layers of these names are frozen."""
    model = Net()
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


def compiled_by_hand() -> nn.Module:
    model = Net()
    for place, block in enumerate(model.blocks):
        model.blocks[place] = torch.compile(block)  # type: ignore[assignment]
    return model


def in_float64() -> nn.Module:
    return Net().double()


def in_either(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    assert isinstance(model, Net)
    y = model(batch.to(model.first.weight.dtype))
    return (y - 1).square().mean()


def momentum_of_all(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def in_groups(rate: float, first: int, model: nn.Module) -> torch.optim.Optimizer:
    groups = [[p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]]
    return torch.optim.AdamW([{"params": groups[first]}, {"params": groups[1 - first]}], lr=rate)


def _going_on(task: Fit, then: Fit) -> Callable[[], Program]:
    return lambda: Program(task=task, then=then, data=vectors(), steps=2)


def _of(measure: Any, make: Callable[[], nn.Module] = Net, data: Any = None, **others: Any) -> Callable[[], Program]:
    return lambda: fitted(make, measure=measure, data=data or vectors(), **others)


def _made() -> Iterator[tuple[str, Callable[[], Program]]]:
    half = rs.EngineConfig(param_dtype="bfloat16")
    timed = rs.EngineConfig(param_dtype="bfloat16", cast_inputs="units")
    yield "weightless", _of(of_labelled)
    yield "weightless_without_graph", _of(none_without_labels)
    yield "early_return", _of(early)
    yield "head_in_loss_as_unit", lambda: Program(task=HeadUnit(Headless), data=vectors())
    yield "mean_over_nothing", _of(mean_of_labelled)
    yield "half_precision_loss", _of(summed_in_half, Tied, TEXTS, engine=half, tolerance=0.05)
    yield "times_as_floats", _of(at_times, Timed, engine=timed, tolerance=0.05)
    yield "submodule_in_loss", _of(by_submodule)
    yield "method_in_loss", _of(by_method, Encoding)
    yield "l2_in_loss", _of(with_l2)
    yield "gradient_penalty", _of(penalized)
    yield "two_backwards", _of(backward_before)
    yield "adversarial", _of(adversarial)
    yield "frozen_in_loss", _of(freezing)
    yield "no_loss", _of(nothing)
    yield "outputs_nested", lambda: fitted(partial(Taking, as_nested, from_nested))
    yield "outputs_dataclass", lambda: fitted(partial(Taking, as_dataclass, from_object))
    yield "outputs_cached", lambda: fitted(Caching)
    yield "outputs_object", lambda: fitted(partial(Taking, as_object, from_object))
    yield "output_view_changed", lambda: fitted(partial(Taking, as_view, from_view))
    yield "none_samples", lambda: fitted(Net, data=Samples(none_at_seven))
    yield "stream", lambda: fitted(Net, data=Stream())
    yield "dict_of_splits", lambda: fitted(Net, data={"train": vectors(), "test": vectors()})
    yield "ragged", lambda: fitted(Encoder, measure=by_first, data=Lengths())
    yield "lengths", lambda: fitted(Encoder, measure=by_first, data=Lengths(), microbatch_size=1)
    yield "nested_samples", lambda: fitted(Net, measure=of_nested, data=Samples(nested))


PROGRAMS: Programs = {
    **dict(_made()),
    "goes_on_thawed": _going_on(Fit(partial(partly, "first")), Fit(Net)),
    "goes_on_frozen": _going_on(Fit(Net), Fit(partial(partly, "first"))),
    "goes_on_in_float64": _going_on(
        Fit(Net, measure=in_either, optimize=momentum_of_all),
        Fit(in_float64, measure=in_either, optimize=momentum_of_all),
    ),
    "goes_on_with_sgd": _going_on(Fit(Net, optimize=adamw), Fit(Net, optimize=momentum_of_all)),
    "goes_on_with_groups": _going_on(
        Fit(Net, optimize=partial(in_groups, 0.01, 0)), Fit(Net, optimize=partial(in_groups, 0.005, 1))
    ),
    "goes_on_uncompiled": _going_on(Fit(compiled_by_hand), Fit(Net)),
    "goes_on_with_tables": _going_on(Fit(Table), Fit(Table)),
}
