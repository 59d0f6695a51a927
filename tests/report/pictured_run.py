"""The run of docs/images, recorded anew by `python -m tests.report.pictured_run`: a byte-level GPT on four processes,
which are killed now and then. Takes two minutes on two cores, and replaces journals/pictured.jsonl."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import raysharded as rs
from raysharded.data.pack import pack
from raysharded.demo.model import VOCABULARY, ByteGPT
from raysharded.demo.run import standard_library_sources
from raysharded.testing.processes import ProcessLauncher

JOURNAL = Path(__file__).parent / "journals" / "pictured.jsonl"
STEPS = 60
SEQ_LEN = 128
KILLS: Mapping[int, int] = {4: 1, 12: 1, 30: 2}
"""Step after which workers are killed -> how many."""


class WithAccuracy(ByteGPT):
    """Also counts the bytes that were predicted."""

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        logits, targets = model(batch[:, :-1]), batch[:, 1:]
        total = F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1), reduction="sum")
        right = (logits.argmax(-1) == targets).sum()
        return rs.Loss(total, targets.numel(), metrics={"accuracy": (right, targets.numel())})


def record(folder: Path) -> bytes:
    """Train; returns the journal."""
    sources = standard_library_sources()
    for name, files in (("data", sources[::8]), ("held-out", sources[4::80])):
        pack(files, str(folder / name), input_format="text")
    trainer = rs.ElasticTrainer(
        task=WithAccuracy(layers=4, seq_len=SEQ_LEN, warmup_steps=STEPS // 8, total_steps=STEPS),
        data=rs.TokenDataset(str(folder / "data"), seq_len=SEQ_LEN),
        batch=rs.BatchConfig(global_batch_size=16, microbatch_size=2, seed=0),
        scaling=rs.ScalingConfig(num_workers=(2, 4)),
        evaluation=rs.EvalConfig(
            data=rs.TokenDataset(str(folder / "held-out"), seq_len=SEQ_LEN), every_steps=5, num_samples=32
        ),
        run=rs.RunConfig(
            name="gpt-bytes",
            storage_path=str(folder / "runs"),
            max_steps=STEPS,
            checkpoint=rs.CheckpointConfig(every_steps=20),
        ),
    )
    due = dict(KILLS)

    def listen(kind: str, entry: Mapping[str, Any]) -> None:
        if kind == "step" and entry["step"] >= min(due, default=STEPS + 1) and len(run.status().workers) == 4:
            status = run.status()
            for worker in status.workers[1 : 1 + due.pop(min(due))]:
                os.kill(status.pids[worker], signal.SIGKILL)

    run = trainer.start_with(ProcessLauncher, listen)
    run.wait()
    segments = sorted((folder / "runs" / "gpt-bytes" / "journal").glob("*.jsonl"))
    lines = [line for segment in segments for line in segment.read_bytes().splitlines(keepends=True)]
    return b"".join(line for line in lines if b'"kind":"segment"' not in line)


if __name__ == "__main__":
    from tests.report import pictured_run  # its task is pickled by the name of this module

    with tempfile.TemporaryDirectory() as name:
        JOURNAL.write_bytes(pictured_run.record(Path(name)))
