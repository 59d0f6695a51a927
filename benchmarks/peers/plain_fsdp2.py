"""A plain FSDP2 loop under torchrun with the same training and the native reduce-scatter.

torchrun --nproc-per-node 4 -m benchmarks.peers.plain_fsdp2 --out LINES [--parameters 50M] [--no-sync]
"""

from __future__ import annotations

import argparse
from itertools import count
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import default_collate

from benchmarks.lines import Speaker
from benchmarks.workload import BATCH, SHAPES, RandomBytes, task
from raysharded.data.order import positions_of_microbatch, sample_ids


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--out", required=True)
    arguments.add_argument("--parameters", choices=sorted(SHAPES), default="5M")
    arguments.add_argument("--no-sync", action="store_true", help="reduce once a step, from whole gradients")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    work, data = task(options.parameters), RandomBytes()
    model = work.build_model()
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = work.build_optimizer(model)
    rounds = BATCH.num_microbatches // world_size
    speaker = Speaker(options.out, rank=rank, world=world_size)
    for step in count(1):
        total, samples = 0.0, list[int]()
        for round_index in range(rounds):
            positions = positions_of_microbatch(
                step, round_index * world_size + rank, BATCH.global_batch_size, BATCH.microbatch_size
            )
            ids = sample_ids(BATCH.seed, positions, len(data)).tolist()
            samples += ids
            batch = default_collate([data[i] for i in ids])
            if options.no_sync:
                cast(FSDPModule, model).set_requires_gradient_sync(round_index == rounds - 1)
            loss = work.loss(model, batch)
            mean = loss.total / loss.weight / rounds
            mean.backward()
            total += float(mean.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = work.lr * work.lr_scale(step)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        speaker.say("step", step=step, loss=total, samples=samples)


if __name__ == "__main__":
    main()
