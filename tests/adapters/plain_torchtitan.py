"""torchtitan's `Trainer` without raysharded: `python -m tests.adapters.plain_torchtitan FOLDER STEPS [gpu]`.

It runs on one of two ranks, on a CPU, or with `gpu` on a GPU. It writes the losses that it logs into `plain.json`
there, and the time of each into `times.json`. Its first weights are those of a model on one rank.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import distribute_tensor

from tests.adapters.titan_programs import FOLDER, SEED, complete_torch, config_of, stand_in_for_a_device


def main(folder: Path, steps: int, *, on_gpu: bool) -> None:
    if on_gpu:
        complete_torch()
    else:
        stand_in_for_a_device()
    sys.path.append(str(FOLDER))
    from torchtitan.trainer import Trainer

    config = config_of(folder, steps, validates=False)
    trainer: Any = Trainer(config)
    (model,) = trainer.model_parts
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
    torch.manual_seed(SEED)
    whole: Any = config.model_spec.model.build()
    with torch.no_grad():
        whole.init_weights(buffer_device=None)
        values = dict(whole.named_parameters())
        for name, own in model.named_parameters():
            value = values[name.replace("_checkpoint_wrapped_module.", "")]
            own.copy_(distribute_tensor(value.detach(), own.device_mesh, own.placements))
    losses: list[float] = []
    times: list[float] = []

    def log(*given: Any, **_: Any) -> None:
        losses.append(given[1])
        times.append(time.perf_counter())

    trainer.metrics_processor.log = log
    trainer.train()
    if torch.distributed.get_rank() == 0:
        (folder / "plain.json").write_text(json.dumps(losses))
        (folder / "times.json").write_text(json.dumps(times))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), on_gpu="gpu" in sys.argv[3:])
