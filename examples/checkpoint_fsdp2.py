"""Plain FSDP2 training that saves in the background and resumes at any number of ranks.

torchrun --nproc-per-node 4 examples/checkpoint_fsdp2.py runs/fsdp2
torchrun --nproc-per-node 3 examples/checkpoint_fsdp2.py runs/fsdp2     # resumes where the first one ended
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from raysharded import checkpoint
from raysharded.errors import NoCheckpoint

STEPS, EVERY = 30, 10


def build(device: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main(folder: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    model = build(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}

    try:
        first = checkpoint.load(folder, state).step
    except NoCheckpoint:  # the first start
        first = 0
    last = first + STEPS
    with checkpoint.AsyncSaver(when_busy="wait") as saver:
        for step in range(first + 1, last + 1):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(32, 16, generator=generator).to(device)
            loss = (model(inputs).squeeze(1) - inputs.sum(1)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % EVERY == 0 or step == last:
                pending = saver.save(f"{folder}/step-{step}", state, step=step, metrics={"loss": loss.item()})
    saved = pending.result()
    if dist.get_rank() == 0:
        print(f"steps {first + 1} to {last} on {dist.get_world_size()} ranks, loss {loss.item():.4f}, {saved.uri}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
