"""Replica groups of one worker with torchft, as its `train_ddp.py` has it. Every group holds the whole model. A
lighthouse decides in every step which groups take part. A group that comes back gets the weights from another.

TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 torchrun --standalone --nproc-per-node 1 --max-restarts 100 \
    -m benchmarks.peers.torchft_replicas --group 0 --groups 4 --out LINES --order ORDER

A group's samples follow from its number, as with torchft's own sampler: while a group is away nobody reads its share.
"""

from __future__ import annotations

import argparse
import time
from datetime import timedelta
from typing import Any

import torch
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from benchmarks.lines import Follower, Speaker
from benchmarks.model import (
    MAX_GRAD_NORM,
    NUM_MICROBATCHES,
    Samples,
    build_model,
    build_optimizer,
    compute,
    learning_rate,
)


def wait_for_others(path: str, groups: int) -> None:
    """Until every group has started once: the first of a run would otherwise begin without the others."""
    follower, seen = Follower(path), set[int]()
    while len(seen) < groups:
        seen |= {event.rank for event in follower.read() if event.event == "start"}
        time.sleep(0.05)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", required=True)
    arguments.add_argument("--order", required=True)
    arguments.add_argument("--steps", type=int, default=1_000_000)
    arguments.add_argument("--group", type=int, required=True)
    arguments.add_argument("--groups", type=int, default=4)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    speaker, samples = Speaker(options.out, rank=options.group), Samples(options.order)
    inner = build_optimizer(model := build_model())

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])
        speaker.say("restored", step=manager.current_step())

    manager = Manager(
        pg=ProcessGroupGloo(),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"group_{options.group}",
        timeout=timedelta(seconds=30),
    )
    speaker.say("start")
    wait_for_others(options.out, options.groups)
    replica, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    own = list(range(options.group, NUM_MICROBATCHES, options.groups))
    while (step := manager.current_step() + 1) <= options.steps:
        optimizer.zero_grad()  # queries the lighthouse for the groups that take part
        scale = 1 / len(own)  # torchft takes the mean over the groups
        with replica.no_sync():
            first = compute(replica, samples, step, own[:-1], scale=scale)
        last = compute(replica, samples, step, own[-1:], scale=scale)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        for group in inner.param_groups:
            group["lr"] = learning_rate(step)
        if manager.errored() is not None:
            speaker.say("failed", step=step - 1)
        optimizer.step()  # or leaves the step out, if the all-reduce failed
        if manager.current_step() == step and manager.is_participating():
            speaker.rank, speaker.world = manager.participating_rank() or 0, manager.num_participants()
            loss = (first.loss * len(first.samples) + last.loss * len(last.samples)) / (
                len(first.samples) + len(last.samples)
            )
            speaker.say("step", step=step, loss=loss, samples=first.samples + last.samples)
    manager.shutdown()


if __name__ == "__main__":
    main()
