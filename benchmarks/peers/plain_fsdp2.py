"""A plain FSDP2 loop without any protection: what a step costs at the least.

torchrun --standalone --nproc-per-node 4 -m benchmarks.peers.plain_fsdp2 --out LINES --order ORDER --steps 20

It reduces gradients in every round of microbatches; with `--no-sync` once a step, from whole gradients.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from benchmarks.lines import Speaker
from benchmarks.model import Samples, build_model, build_optimizer, shape, shard, train_step


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", required=True)
    arguments.add_argument("--order", required=True)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--shape", type=shape, default=(6, 256, 4), help="layers, width, heads")
    arguments.add_argument("--no-sync", action="store_true")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    speaker, samples = Speaker(options.out, rank=rank, world=world), Samples(options.order)
    speaker.say("start")
    model = shard(build_model(*options.shape))
    optimizer = build_optimizer(model)
    for step in range(1, options.steps + 1):
        done = train_step(model, optimizer, samples, step, rank, world, every_round=not options.no_sync)
        speaker.say("step", step=step, loss=done.loss, samples=done.samples)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
