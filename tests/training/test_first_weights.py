"""The first weights: the same at every number of workers, and none forgotten."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.actors.model.construction import without_memory
from raysharded.actors.model.init_batches import InitCalls, batches_of
from raysharded.actors.model.init_weights import first_build
from raysharded.errors import TaskError
from raysharded.ids import derive_seed
from tests.training.harness import Gpt, TwoBlocksTask


def draw(task: rs.Task, seed: int = 5) -> dict[str, torch.Tensor]:
    drawn: dict[str, torch.Tensor] = {}
    for tensors in first_build(task, seed).tensors():
        assert not drawn.keys() & tensors.keys()
        drawn |= {name: tensor.clone() for name, tensor in tensors.items()}
    return drawn


class ByModule(TwoBlocksTask):
    """Draws its weights one module at a time."""

    def init_weights(self, module: nn.Module, generator: torch.Generator) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1, generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, (nn.LayerNorm, nn.Embedding)):
            module.reset_parameters()
        else:
            for param in module.parameters(recurse=False):
                nn.init.uniform_(param)


def test_without_init_weights_the_constructor_draws_as_it_would_unsharded() -> None:
    torch.manual_seed(derive_seed(5, "initial weights"))
    model = Gpt(2)
    drawn = draw(TwoBlocksTask())
    for name, param in model.named_parameters():
        assert torch.equal(drawn[f"model.{name}"], param.detach())
    assert torch.equal(drawn["buffer.positions"], model.positions)


def test_init_weights_draws_every_module_from_its_own_seed() -> None:
    drawn = draw(ByModule())
    assert {name for name in drawn if name.startswith("model.")} == {f"model.{n}" for n, _ in Gpt(2).named_parameters()}
    generator = torch.Generator().manual_seed(derive_seed(5, "initial weights", "blocks.1.up"))
    expected = nn.init.normal_(torch.empty(64, 16), std=0.1, generator=generator)
    assert torch.equal(drawn["model.blocks.1.up.weight"], expected)
    assert not torch.equal(drawn["model.blocks.0.up.weight"], expected)


class FromOtherGenerators(TwoBlocksTask):
    """Fills a module's parameters with draws of Python's, NumPy's and torch's generators."""

    def init_weights(self, module: nn.Module, generator: torch.Generator) -> None:
        draws = [random.random(), np.random.default_rng(np.random.randint(1 << 30)).random(), torch.rand(()).item()]
        for param in module.parameters(recurse=False):
            param.data.copy_(torch.tensor(draws)[torch.arange(param.numel()) % 3].view_as(param))


def test_every_generator_draws_from_the_seed_of_the_run_and_the_module() -> None:
    drawn, other = draw(FromOtherGenerators()), draw(FromOtherGenerators(), seed=6)
    values = [found[f"model.blocks.{block}.up.bias"][:3] for found, block in ((drawn, 0), (drawn, 1), (other, 0))]
    assert len(torch.cat(values).unique()) == 9
    again = draw(FromOtherGenerators())
    assert all(torch.equal(drawn[name], again[name]) for name in drawn)


@pytest.mark.parametrize("task", [TwoBlocksTask(), ByModule(), FromOtherGenerators()])
def test_the_seed_alone_decides_and_random_state_outside_is_left_alone(task: rs.Task) -> None:
    before = torch.random.get_rng_state()
    first = draw(task)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(12345)
    again = draw(task)
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.blocks.0.up.weight"], draw(task, seed=6)["model.blocks.0.up.weight"])


def test_a_parameter_that_init_weights_forgets_is_named() -> None:
    class Forgetful(TwoBlocksTask):
        def init_weights(self, module: nn.Module, generator: torch.Generator) -> None:
            if not isinstance(module, nn.LayerNorm):
                for param in module.parameters(recurse=False):
                    nn.init.ones_(param)

    with pytest.raises(TaskError, match=r"left 'blocks\.0\.norm_1\.weight' of a LayerNorm without values"):
        draw(Forgetful())


def test_tied_weights_are_drawn_once() -> None:
    drawn = draw(ByModule())
    assert "model.embedding.weight" in drawn
    assert "model.head.weight" not in drawn


class Sharing(nn.Module):
    """Two layers that keep one table, each under a different name."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.linspace(1.0, 2.0, 3)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        for layer in self.layers:
            layer.register_buffer("table", table)


def test_a_buffer_that_several_modules_share_is_drawn_under_each_of_its_names() -> None:
    class Shared(TwoBlocksTask):
        def build_model(self) -> nn.Module:
            return Sharing()

    drawn = draw(Shared())
    assert {name for name in drawn if name.startswith("buffer.")} == {"buffer.layers.0.table", "buffer.layers.1.table"}


class Deep(nn.Module):
    """Blocks whose last layers are set when the block is given, one with more parameters, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual() for _ in range(2)])
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.head.weight


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.down = nn.Linear(8, 8)


class AsApplied(rs.Task):
    """`init_weights` in the usual form for `nn.Module.apply`."""

    def __init__(self, how: str = "in place") -> None:
        self._how = how

    def build_model(self) -> nn.Module:
        return Deep()

    def init_weights(self, module: nn.Module, generator: torch.Generator) -> None:
        match module:
            case Residual():
                if self._how == "in place":
                    nn.init.zeros_(module.down.weight)
                elif self._how == "data":
                    module.down.weight.data.zero_()
                else:
                    module.down.weight = nn.Parameter(torch.zeros(8, 8))
            case nn.MultiheadAttention():
                module._reset_parameters()
            case nn.Linear():
                module.reset_parameters()
                nn.init.constant_(module.bias, 1.0)
            case Deep():
                for block in module.blocks:
                    nn.init.normal_(block.get_parameter("inner.1.bias"))
                nn.init.ones_(module.head.weight)


@pytest.mark.parametrize("how", ["in place", "data", "another parameter"])
def test_weights_that_are_set_when_another_module_is_given_are_as_nn_module_apply_leaves_them(how: str) -> None:
    drawn = draw(AsApplied(how))
    names = {name for name, _ in Deep().named_parameters()}
    assert {f"model.{name}" for name in names} == drawn.keys()
    assert not drawn["model.blocks.0.down.weight"].any()
    assert not drawn["model.blocks.1.down.weight"].any()
    assert torch.equal(drawn["model.blocks.0.down.bias"], torch.ones(8))
    assert drawn["model.blocks.0.inner.1.weight"].any()
    assert not drawn["model.attention.out_proj.bias"].any()
    assert torch.equal(drawn["model.head.weight"], torch.ones(8, 8))
    first, second = (drawn[f"model.blocks.{n}.inner.1.bias"] for n in (0, 1))
    assert not torch.equal(first, second)  # drawn in one call, one after the other
    again = draw(AsApplied("in place"))
    assert all(torch.equal(drawn[name], again[name]) for name in drawn)


def test_a_module_that_is_not_set_by_another_is_drawn_alone() -> None:
    class Plain(AsApplied):
        def init_weights(self, module: nn.Module, generator: torch.Generator) -> None:
            if isinstance(module, (nn.Linear, nn.MultiheadAttention)) and not isinstance(module, AsApplied):
                for param in module.parameters(recurse=False):
                    nn.init.normal_(param)

    model = Deep()
    calls = InitCalls(Plain(), Plain().init_weights, 5)
    batches = list(batches_of(without_memory(model), calls))
    assert [len(batch) for batch in batches] == [1] * len(batches)
    assert [name for batch in batches for name, _ in batch] == [
        *(f"blocks.{n}.{name}" for n in (0, 1) for name in ("inner.0", "inner.1", "down")),
        *("attention", "attention.out_proj", "head", "tied"),
    ]


def test_what_init_weights_raises_names_the_module() -> None:
    class Raises(AsApplied):
        def init_weights(self, module: nn.Module, generator: torch.Generator) -> None:
            module.reset_parameters()  # type: ignore[operator]  # some have none

    with pytest.raises(
        TaskError, match=r"Raises.init_weights for 'attention', a MultiheadAttention, raised AttributeError"
    ):
        draw(Raises())
