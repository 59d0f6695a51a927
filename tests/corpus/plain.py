"""A program in plain torch: one process, nothing sharded, the same first weights and the same draws."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_collate

import raysharded as rs
from raysharded.data.access import generators
from raysharded.data.order import sample_ids
from raysharded.ids import derive_seed
from tests.corpus.program import SEED, Program
from tests.forked import in_a_fork

NOISE = 1e-6
"""A tensor's gradient that is never larger than this part of the model's largest is taken to be zero, and rounded: for
example that of a bias of attention's keys, which softmax does not see. An optimizer's result for it is random."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plain:
    """Results by step, and at the end."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    evaluations: tuple[float, ...]
    weights: dict[str, torch.Tensor]
    """Parameters and persistent buffers by name."""
    without_gradient: tuple[str, ...]
    """The parameters whose gradients were noise."""
    kept: dict[str, torch.Tensor] | None
    """The optimizer's state, by the parameter's name and its own; None: optimizers inside have the state."""


def in_plain_torch(program: Program) -> Plain:
    """Train the program in a separate process. Raises the program's error."""
    packed = in_a_fork(_packed, program)
    return Plain(**torch.load(io.BytesIO(packed)))


def _packed(program: Program) -> bytes:
    """As bytes: a tensor that is pickled lives in its process, which ends."""
    packed = io.BytesIO()
    torch.save(asdict(plainly(program)), packed)
    return packed.getvalue()


def plainly(program: Program) -> Plain:
    """Train it here. For a process that does nothing else afterwards."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    task = program.plain or program.task
    model = first_model(task)
    training = _Training(program, task, model)
    for step in range(1, program.steps + 1):
        training.step(step)
    if program.then is not None:
        other = first_model(program.then)
        other.load_state_dict({name.replace("_orig_mod.", ""): kept for name, kept in model.state_dict().items()})
        training = _Training(program, program.then, other, of=training)
        for step in range(program.steps + 1, program.steps + 3):
            training.step(step)
    model = training.model
    return Plain(
        losses=tuple(training.losses),
        norms=tuple(training.norms),
        evaluations=tuple(training.evaluations),
        weights=weights_of(model),
        without_gradient=training.without_gradient(),
        kept=kept_by(training.optimizer, model),
    )


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers; tied ones once."""
    every = dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in every}
    return {**{name: param.detach() for name, param in model.named_parameters()}, **buffers}


def kept_by(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor] | None:
    """The tensors and numbers in its state."""
    held = [one for value in vars(optimizer).values() for one in (value if isinstance(value, tuple) else (value,))]
    if any(isinstance(one, torch.optim.Optimizer) for one in held):
        return None
    names: dict[torch.Tensor, str] = {param: name for name, param in model.named_parameters()}
    return {
        f"{names[param]}.{key}": torch.as_tensor(value).detach()
        for param, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, (torch.Tensor, float, int))
    }


def first_model(task: rs.Task) -> nn.Module:
    """The model with its first weights, and the process as it was before."""
    seed_by(derive_seed(SEED, "initial weights"))
    with _process_kept():
        model = task.build_model()
    if task.init_weights is not None:
        for name, module in reversed(list(model.named_modules())):  # children first, as `model.apply` goes
            number = derive_seed(SEED, "initial weights", name)
            torch.manual_seed(number)
            with torch.no_grad():
                task.init_weights(module, torch.Generator().manual_seed(number))
    return model


@contextlib.contextmanager
def _process_kept() -> Iterator[None]:
    dtype, grad, threads = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(True)


def seed_by(number: int) -> None:
    """Seed all three generators of the process, as for a microbatch of that number."""
    torch.manual_seed(number)
    generators.seed(number, with_torch=False)


def train_mode(model: nn.Module) -> Iterator[nn.Module]:
    """The model in train mode, except for frozen parts of a model in train mode that were built in eval."""
    if model.training:
        for module in model.modules():
            params = list(module.parameters())
            if not module.training and params and not any(param.requires_grad for param in params):
                yield module
    model.train()


class _Training:
    """The training of one task; `of`: the one before, whose optimizer state is kept where the names are the same."""

    def __init__(self, program: Program, task: rs.Task, model: nn.Module, of: _Training | None = None) -> None:
        self.program, self.task, self.model = program, task, model
        self.largest: dict[str, float] = {} if of is None else of.largest
        """Parameter -> its largest gradient."""
        self.in_eval = list(train_mode(model))
        self.optimizer = task.build_optimizer(model)
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.losses: list[float] = [] if of is None else of.losses
        self.norms: list[float] = [] if of is None else of.norms
        self.evaluations: list[float] = [] if of is None else of.evaluations
        if of is not None and type(of.optimizer) is type(self.optimizer):
            names = {name.replace("_orig_mod.", ""): param for name, param in of.model.named_parameters()}
            for name, param in model.named_parameters():
                if param.requires_grad and names[name] in of.optimizer.state:
                    self.optimizer.state[param] = of.optimizer.state[names[name]]

    def step(self, step: int) -> None:
        program, params = self.program, dict(self.model.named_parameters())
        size = program.microbatch_size
        positions = np.arange((step - 1) * size * program.microbatches, step * size * program.microbatches)
        ids = sample_ids(SEED, positions, len(program.data)).tolist()
        self.model.train()
        for module in self.in_eval:
            module.eval()
        gradients: list[dict[str, torch.Tensor]] = []
        sums: list[tuple[float, float]] = []
        for index in range(program.microbatches):
            loss = self._loss("train", step, index, ids[index * size : (index + 1) * size])
            self.model.zero_grad(set_to_none=True)
            if loss.total.requires_grad or float(loss.weight):  # else nothing is to be learned from it
                loss.total.backward()
            gradients.append({name: param.grad for name, param in params.items() if param.grad is not None})
            sums.append((float(loss.total.detach().double()), float(loss.weight)))
        weight = sum(of for _, of in sums)
        self.losses.append(sum(total for total, _ in sums) / weight)
        self._apply(step, params, gradients, weight)
        self._evaluate(step)

    def _loss(self, purpose: str, step: int, index: int, ids: Sequence[int]) -> rs.Loss:
        data = self.program.data if purpose == "train" else self.program.evaluation.data  # type: ignore[union-attr]
        batch = default_collate([data[place] for place in ids])
        seed_by(derive_seed(SEED, purpose, step, index))
        value = (self.task.loss if purpose == "train" else self.task.evaluate)(self.model, batch)
        if isinstance(value, rs.Loss):
            return value
        return rs.Loss(value.reshape(()) * len(ids), float(len(ids)))

    def _apply(
        self, step: int, params: dict[str, nn.Parameter], gradients: list[dict[str, torch.Tensor]], weight: float
    ) -> None:
        found = {name: summed(name, params[name], gradients) for name in {n: 0 for each in gradients for n in each}}
        for name, gradient in found.items():
            self.largest[name] = max(self.largest.get(name, 0.0), float(gradient.double().abs().max()))
        norm = float(sum((one.double() / weight).square().sum() for one in found.values())) ** 0.5
        self.norms.append(norm)
        scale, limit = 1 / weight, self.task.max_grad_norm
        if limit is not None:
            scale *= min(1.0, limit / (norm + 1e-6))
        self.model.zero_grad(set_to_none=True)
        for name, gradient in found.items():
            params[name].grad = (gradient * scale).to(params[name].dtype)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            now = rate * float(self.task.lr_scale(step))
            group["lr"] = torch.tensor(now) if isinstance(group["lr"], torch.Tensor) else now
        self.optimizer.step()

    def without_gradient(self) -> tuple[str, ...]:
        limit = NOISE * max(self.largest.values(), default=0.0)
        return tuple(name for name, largest in self.largest.items() if largest <= limit)

    def _evaluate(self, step: int) -> None:
        evaluation = self.program.evaluation
        if evaluation is None or step % evaluation.every_steps:
            return
        self.model.eval()
        size, sums = self.program.microbatch_size, []
        number = evaluation.num_samples or len(evaluation.data)
        with torch.no_grad():
            for index, start in enumerate(range(0, number, size)):
                loss = self._loss("evaluate", step, index, range(start, min(start + size, number)))
                sums.append((float(loss.total), float(loss.weight)))
        self.evaluations.append(sum(total for total, _ in sums) / sum(weight for _, weight in sums))


def summed(name: str, param: torch.Tensor, gradients: Sequence[dict[str, Any]]) -> torch.Tensor:
    """A parameter's gradient over the microbatches, pair by pair, in float32 at least; what has none counts as zero."""
    dtype = torch.promote_types(param.dtype, torch.float32)
    level = [(each[name] if name in each else torch.zeros_like(param)).to(dtype) for each in gradients]
    while len(level) > 1:
        pairs = [one + other for one, other in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[2 * len(pairs) :]
    return level[0]
