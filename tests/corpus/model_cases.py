"""Models that were reported: odd shapes and dtypes, parts that are not always used, cases that must be refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.nn.utils import parametrizations

import raysharded as rs
from tests.corpus.idioms import Tied, next_of
from tests.corpus.language_models import _LLAMA, TEXTS
from tests.corpus.program import WIDTH, Block, Fit, Net, Program, Programs, fitted, momentum, pictures, vectors
from tests.corpus.stock import Stock, tokens_lost
from tests.corpus.torch_models import Adapted, Encoder, Headed, by_first


class Conditional(Block):
    """Uses a parameter for some microbatches alone, selected by the first number of its input."""

    def __init__(self, above: float) -> None:
        super().__init__(dropout=0.0)
        self.above, self.extra = above, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * self.extra if float(x.detach().mean()) > self.above else y


class Conditionals(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Conditional(0.0), Conditional(0.2), Conditional(1e9)])


class AdaptedTied(Tied):
    """Its embedding, which is its head, is frozen; adapters are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.linear = Adapted(block.linear)  # type: ignore[arg-type]


def half_frozen() -> nn.Module:
    model = Net()
    for place, param in enumerate(model.parameters()):
        param.requires_grad_(place % 2 == 0)
    return model


class Odd(nn.Module):
    """Parameters of shapes that no number of workers divides."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((1,), (1, 8), (2, 3, 8), (8, 97))
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(shape) * 0.3) for shape in shapes])
        self.into = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, row, cube, wide = self.parts
        y: torch.Tensor = torch.tanh(self.into(x) * row + cube.sum((0, 1))) @ wide * one
        return y


class Scaled(Net):
    """Scales by a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale.exp()


def in_float64() -> nn.Module:
    return Net().double()


def in_bfloat16() -> nn.Module:
    return Net().bfloat16()


class Padded(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(67, 8, **settings), nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.embedding(tokens).mean(1))
        return y


class Seeing(nn.Module):
    """A convolution and a norm."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), norm(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))
        return y


def channels_last() -> nn.Module:
    model: nn.Module = Seeing(partial(nn.GroupNorm, 2))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in torch's types


def twice(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    one, other = model(batch), model(batch)
    return (one - 1).square().mean() + (one - other).square().mean()


class Universal(nn.Module):
    """One block three times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block()]), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.blocks[0](x)
        y: torch.Tensor = self.head(x)
        return y


class Dropped(Net):
    """Leaves blocks out by chance."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            if float(torch.rand(())) < 0.6:
                x = block(x)
        y: torch.Tensor = self.head(x)
        return y


class InChunks(Tied):
    """Computes its own loss, the head in chunks of the text."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        chunks = zip(x.split(4, 1), tokens[:, 1:].split(4, 1), strict=True)
        return torch.stack(
            [F.cross_entropy(self.head(part).flatten(0, 1), of.flatten(), reduction="sum") for part, of in chunks]
        ).sum()


def own_loss(model: nn.Module, batch: torch.Tensor) -> rs.Loss:
    return rs.Loss(model(batch), batch[:, 1:].numel())


class Taught(nn.Module):
    """A student beside a frozen teacher in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Net(), Net(blocks=1)
        self.teacher.requires_grad_(False).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            expected = self.teacher(x)
        y: torch.Tensor = self.student(x) - expected
        return y


class Routed(nn.Module):
    """Experts that the data chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.router = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)]), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for place, expert in enumerate(self.experts):
            at = (chosen == place).nonzero()[:, 0]
            if len(at):
                out = out.index_add(0, at, expert(x[at]))
        return x + out * shares[:, None]


def with_l2(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    y = model(batch)
    return (y - 1).square().mean() + 0.01 * sum(param.square().sum() for param in model.parameters())


class Staged(nn.Module):
    """Stages of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block()])])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            for block in stage:  # type: ignore[attr-defined]  # a ModuleList
                x = block(x)
        return x


class Fused(torch.autograd.Function):
    """Adds to the weight's gradient itself, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.held = held
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        (param,) = ctx.held
        of_weight = gradient.T @ x
        if param.grad is not None:
            param.grad += of_weight
            of_weight = torch.zeros_like(of_weight)
        return gradient @ weight, of_weight, None


class FusedBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x) + Fused.apply(x, self.linear.weight, [self.linear.weight])  # type: ignore[no-untyped-call]
        return y


class Quantized(nn.Module):
    """A frozen weight of int8, its scale, and adapters."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randint(-127, 128, (WIDTH, WIDTH), dtype=torch.int8)
        self.weight, self.scale = nn.Parameter(weight, requires_grad=False), nn.Parameter(torch.full((1,), 0.01), False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x @ (self.weight.float() * self.scale) + self.up(self.down(x))
        return y.tanh()


def documents(model: nn.Module, batch: torch.Tensor) -> rs.Loss:
    """Two documents in each text."""
    length = batch.shape[1] - 1
    places = torch.cat([torch.arange(4), torch.arange(length - 4)]).expand(len(batch), -1)
    logits = model(input_ids=batch[:, :-1], position_ids=places).logits
    return tokens_lost(logits, batch[:, 1:])


def hooked() -> nn.Module:
    model = Net()
    model.first.register_forward_hook(lambda _, __, output: output * 0.5)
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: (args[0] + 0.1,))
        block.register_full_backward_hook(damped)
    return model


def damped(module: nn.Module, into: Any, out: Any) -> Any:
    return tuple(gradient if gradient is None else gradient * 0.9 for gradient in into)


def put_in_eval() -> nn.Module:
    model = Headed(nn.Sequential(Block(dropout=0.5), Block(dropout=0.5)))
    model.backbone.requires_grad_(False).eval()
    return model


def left_in_eval() -> nn.Module:
    model = Headed(nn.Sequential(Block(dropout=0.5), Block(dropout=0.5)))
    model.backbone.eval()
    return model


def evaluated() -> Program:
    return fitted(Net, evaluation=rs.EvalConfig(data=vectors(), every_steps=1, num_samples=5))


class Decoding(Fit):
    """Continues each text alone, and is right if it gives the next token."""

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        tokens = batch[:, :4]
        for _ in range(3):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
        right = (tokens[:, 4:] == batch[:, 4:7]).sum()
        return rs.Loss(3 * len(batch) - right.float(), 3 * len(batch))


def decoding() -> Program:
    evaluation = rs.EvalConfig(data=TEXTS, every_steps=2, num_samples=4)
    return Program(task=Decoding(Tied, measure=next_of), data=TEXTS, evaluation=evaluation)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


def spectral() -> nn.Module:
    model = Net()
    parametrizations.spectral_norm(model.first)
    return model


def packed() -> Program:
    return Program(task=Stock("LlamaForCausalLM", _LLAMA, documents), data=TEXTS)


def bfloat16() -> Program:
    return fitted(in_bfloat16, data=vectors(WIDTH, torch.bfloat16), tolerance=0.02)


class Lengths:
    """Texts of four lengths."""

    def __len__(self) -> int:
        return len(TEXTS)

    def __getitem__(self, index: int) -> torch.Tensor:
        return TEXTS[index][: 8 + index % 4]


def compiled() -> Program:
    """Without what is otherwise than in plain torch: draws of dropout, and rounding that AdamW makes large."""
    return Program(
        task=Fit(partial(Encoder, dropout=0.0), measure=by_first, optimize=momentum),
        data=Lengths(),
        microbatch_size=1,
        engine=rs.EngineConfig(compile=True),
        tolerance=1e-4,
    )


def _of(make: Callable[[], nn.Module], measure: Any = None, data: Any = None, **others: Any) -> Callable[[], Program]:
    given = {**({"measure": measure} if measure else {}), **({"data": data} if data else {})}
    return lambda: fitted(make, **given, **others)


SMALL = pictures(3, 6)
PROGRAMS: Programs = {
    "conditional": _of(Conditionals),
    "lora_tied_frozen": _of(AdaptedTied, next_of, TEXTS),
    "half_frozen": _of(half_frozen),
    "odd_shapes": _of(Odd),
    "scalar": _of(Scaled),
    "float64": _of(in_float64, data=vectors(WIDTH, torch.float64)),
    "bfloat16": bfloat16,
    "padding_idx": _of(partial(Padded, padding_idx=5), by_first, TEXTS),
    "conv_group_norm": _of(partial(Seeing, partial(nn.GroupNorm, 2)), data=SMALL),
    "batch_norm_without_statistics": _of(
        partial(Seeing, partial(nn.BatchNorm2d, track_running_stats=False)), data=SMALL
    ),
    "r_drop": _of(Net, twice, whole=True),
    "universal": _of(Universal, whole=True),
    "layerdrop_whole": _of(Dropped, whole=True),
    "head_in_loss": _of(InChunks, own_loss, TEXTS),
    "teacher": _of(Taught),
    "experts_by_data": _of(partial(Net, Routed)),
    "l2_whole": _of(Net, with_l2, whole=True),
    "nested_lists": _of(Staged),
    "grad_added_by_backward": _of(partial(Net, FusedBlock)),
    "quantized_beside_lora": _of(partial(Net, Quantized)),
    "packed": packed,
    "module_hooks": _of(hooked),
    "eval_backbone": _of(put_in_eval),
    "eval_trainable": _of(left_in_eval),
    "evaluated": evaluated,
    "generates": decoding,
    "max_norm": _of(partial(Padded, max_norm=1.0), by_first, TEXTS),
    "instance_norm": _of(partial(Seeing, partial(nn.InstanceNorm2d, track_running_stats=True)), data=SMALL),
    "spectral_norm": _of(spectral),
    "complex": _of(Complex),
    "sparse_embedding": _of(partial(Padded, sparse=True), by_first, TEXTS),
    "channels_last": _of(channels_last, data=SMALL),
    "compiled_lengths": compiled,
}
