"""FSDP2 in Ray Train (its V2) with torch.distributed.checkpoint, as its guides on FSDP2, checkpoints and elastic
training have it. After a failure, or when their number changes, all workers are restarted from the newest checkpoint.

python -m benchmarks.peers.ray_train --out LINES --order ORDER --folder STORAGE --workers 4 [--least 2] [--nodes 2,2]

With `--nodes` each node is a separate raylet with so many slots. On standard input a line `add 2` starts one more, and
`drain 5` gives the newest one notice of its end in so many seconds. With `--notices` the workers react to it as Ray
Train's guide on preemption has it: they save a checkpoint once, and train on.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks.draining import drain
from benchmarks.lines import Speaker
from benchmarks.model import Samples, build_model, build_optimizer, shape, shard, train_step


def train(config: dict[str, Any]) -> None:
    """The training loop of each worker."""
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    speaker = Speaker(config["out"], rank=rank, world=world)
    speaker.say("start")
    model, samples = shard(build_model(*config["shape"])), Samples(config["order"])
    optimizer = build_optimizer(model)
    step = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "step": 0}
            load(state, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            step = state["step"]
    speaker.say("restored", step=step)
    was_noticed = False
    try:
        while step < config["steps"]:
            done = train_step(model, optimizer, samples, step + 1, rank, world)
            step += 1
            speaker.say("step", step=step, loss=done.loss, samples=done.samples)
            is_due = bool(config["every"] and step % config["every"] == 0)
            if config["notices"] and not was_noticed and is_noticed():
                is_due = was_noticed = True
            if is_due:
                with tempfile.TemporaryDirectory() as folder:
                    model_state, optimizer_state = get_state_dict(model, optimizer)
                    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
                    save(state, checkpoint_id=folder)
                    time.sleep(config["save_s"])
                    ray.train.report({"loss": done.loss}, checkpoint=Checkpoint.from_directory(folder))
    except Exception:
        speaker.say("failed", step=step)
        raise


def is_noticed() -> bool:
    """Whether any worker knows that a node will be taken away; the same in all, which call this together."""
    flag = torch.tensor([ray.train.get_preemption_info() is not None], dtype=torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def on_nodes(sizes: list[int], speaker: Speaker, work: Callable[[], object]) -> None:
    """Do this on a head without slots and nodes of these sizes; standard input adds nodes."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})

    newest = [""]

    def add(size: int) -> None:
        node = cluster.add_node(num_cpus=size, include_dashboard=False)
        newest[0] = node.node_id
        speaker.say("node", pids=[node.all_processes["raylet"][0].process.pid])

    def until_done() -> None:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # ends the loop below, and the nodes

    for size in sizes:
        add(size)
    ray.init(address=cluster.address, log_to_driver=False)
    threading.Thread(target=until_done, daemon=True).start()
    for line in sys.stdin:  # in this thread: a node sets signal handlers
        word, _, number = line.partition(" ")
        add(int(number)) if word == "add" else drain(newest[0], int(number))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", required=True)
    arguments.add_argument("--order", required=True)
    arguments.add_argument("--folder", required=True)
    arguments.add_argument("--steps", type=int, default=1_000_000)
    arguments.add_argument("--every", type=int, default=8, help="steps between checkpoints; 0: none")
    arguments.add_argument("--shape", type=shape, default=(6, 256, 4), help="layers, width, heads")
    arguments.add_argument("--workers", type=int, default=4)
    arguments.add_argument("--least", type=int, help="elastic, with so many at the least")
    arguments.add_argument("--nodes", help="slots of each node, such as 2,2")
    arguments.add_argument("--notices", action="store_true", help="a checkpoint when a node will be taken away")
    arguments.add_argument("--save-s", type=float, default=0.0, help="seconds that storage takes for a worker's part")
    options = arguments.parse_args()
    workers: Any = (options.least, options.workers) if options.least else options.workers  # its types know no pairs
    trainer = TorchTrainer(
        train,
        train_loop_config={
            name: getattr(options, name) for name in ("out", "order", "steps", "every", "shape", "notices", "save_s")
        },
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name="train",
            storage_path=options.folder,
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=-1),
        ),
    )
    if options.nodes:
        on_nodes([int(size) for size in options.nodes.split(",")], Speaker(options.out), trainer.fit)
    else:
        ray.init(address="local", num_cpus=options.workers, include_dashboard=False, log_to_driver=False)
        trainer.fit()


if __name__ == "__main__":
    main()
