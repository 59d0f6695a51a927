"""FSDP2 under torchrun with checkpoints by torch.distributed.checkpoint, as torch's guides on fault tolerance have it:
torchrun restarts all processes after a failure, and each loads the newest checkpoint.

torchrun --standalone --nproc-per-node 4 --max-restarts 100 \\
    -m benchmarks.peers.torchrun_dcp --out LINES --order ORDER --folder CHECKPOINTS
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

from benchmarks.lines import Speaker
from benchmarks.model import Samples, build_model, build_optimizer, shard, train_step


def newest(folder: Path) -> int:
    """The step of the newest checkpoint that was finished (its metadata is written last), or 0."""
    return max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, step: int) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save_checkpoint({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / str(step))


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, step: int) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    load_checkpoint(state, checkpoint_id=folder / str(step))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--out", required=True)
    arguments.add_argument("--order", required=True)
    arguments.add_argument("--folder", type=Path, required=True)
    arguments.add_argument("--steps", type=int, default=1_000_000)
    arguments.add_argument("--every", type=int, default=8, help="steps between checkpoints; 0: none")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    speaker = Speaker(options.out)
    speaker.say("start")
    dist.init_process_group("gloo")
    rank, world = speaker.rank, speaker.world = dist.get_rank(), dist.get_world_size()
    model, samples = shard(build_model()), Samples(options.order)
    optimizer = build_optimizer(model)
    step = newest(options.folder)
    if step:
        load(model, optimizer, options.folder, step)
    speaker.say("restored", step=step)
    try:
        while step < options.steps:
            done = train_step(model, optimizer, samples, step + 1, rank, world)
            step += 1
            speaker.say("step", step=step, loss=done.loss, samples=done.samples)
            if options.every and step % options.every == 0:
                save(model, optimizer, options.folder, step)
    except Exception:
        speaker.say("failed", step=step)
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
