"""A small model and its optimizer, alone or sharded, with a state that is the same at every layout."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Net(nn.Module):
    """Dimensions that no number of ranks divides."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.up = nn.Linear(10, 14)
        self.down = nn.Linear(14, 10)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 13, bias=False)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = self.norm(x + self.down(torch.relu(self.up(x))))
        logits: torch.Tensor = self.head(x)
        return logits


def make(*, seed: int = 0, tied: bool = False, mesh: DeviceMesh | None = None) -> Net:
    torch.manual_seed(seed)
    model = Net(tied=tied)
    if mesh is not None:
        shard(model, mesh)
    return model


def shard(model: Net, mesh: DeviceMesh) -> None:
    """Flat or hybrid by the mesh's dimensions, or over tensor parallelism where one is called "tensor"."""
    data = mesh
    if "tensor" in (mesh.mesh_dim_names or ()):
        parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        data = mesh["data"]
    fully_shard([model.up, model.down], mesh=data)
    fully_shard(model, mesh=data)


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.AdamW:
    """Two groups; the second without weight decay."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=lr)


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """With gradients that are all alike, so that every layout takes the same step."""
    for number, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, 0.01 * (number + 1))
    optimizer.step()
    optimizer.zero_grad()


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of both, whole: as a rank alone would have them."""
    return {name: _whole(tensor) for name, tensor in _tensors(model, optimizer)}


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    names: dict[torch.Tensor, str] = {param: name for name, param in model.named_parameters()}
    yield from model.state_dict().items()
    for param, values in optimizer.state.items():
        yield from ((f"{names[param]}.{key}", value) for key, value in values.items())


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
    return whole
