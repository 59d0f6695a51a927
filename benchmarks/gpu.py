"""One GPU: raysharded, exact and fast, compared with a plain FSDP2 loop on a Llama-like model of about 1B parameters in
bf16 with activation checkpointing, compiled and not; and the cost of snapshots and checkpoints during training.

The plain loop runs with and without torch's deterministic algorithms, which exact reduction needs: so their cost is
known apart from its own.

World size 1: nothing is communicated. Without a GPU there is one line that states this. `python -m benchmarks.gpu
--cpu`
runs the same code with a tiny model on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.utils.checkpoint import checkpoint

import raysharded as rs
from benchmarks.effort import Effort
from benchmarks.result import ROOT, Line, alternate, ratios
from raysharded.actors.device.cuda import EXACT_SETTINGS
from raysharded.config import BatchConfig

NAME = "gpu"
PLAIN = "plain FSDP2 loop"
DETERMINISTIC = "plain FSDP2 loop, deterministic algorithms"
_WARM_UP_STEPS = 4
_PEAK_FLOPS = {
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "4090": 165e12,
}
"""Peak rate of dense bf16 according to the manufacturer, by a part of the device's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of the model and its batch."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    length: int
    batch: int
    """Sequences of a step."""
    microbatch: int
    steps: int
    cpu: bool = False


ONE_BILLION = Sizes(
    width=2048,
    layers=16,
    heads=32,
    kv_heads=8,
    hidden=8192,
    vocabulary=32_768,
    length=2048,
    batch=16,
    microbatch=4,
    steps=16,
)
TINY = Sizes(
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    hidden=64,
    vocabulary=64,
    length=16,
    batch=4,
    microbatch=2,
    steps=8,
    cpu=True,
)


class Block(nn.Module):
    """Attention with fewer heads for keys and values, rotary positions, SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.width // sizes.heads
        width, kv = sizes.width, sizes.kv_heads * self.head_dim
        self.attention_norm, self.feed_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, kv, bias=False), nn.Linear(width, kv, bias=False)
        self.gate, self.up = (nn.Linear(width, sizes.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        normed = self.attention_norm(x)
        q, k, v = (w(normed).view(batch, length, -1, self.head_dim).transpose(1, 2) for w in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(x.shape))
        normed = self.feed_norm(x)
        y: torch.Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return y


def rotated(x: torch.Tensor) -> torch.Tensor:
    """With rotary position embedding; [batch, heads, length, head_dim]."""
    half, length = x.shape[-1] // 2, x.shape[-2]
    frequencies = 10_000 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(length, device=x.device)[:, None] * frequencies
    cos, sin, (a, b) = angles.cos(), angles.sin(), x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).type_as(x)


class Llama(nn.Module):
    """Token ids [batch, length] to logits."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Tokens:
    """Sample `i` is drawn from `i`."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng(index).integers(0, self.sizes.vocabulary, self.sizes.length + 1)


class NextToken(rs.Task):
    """The task that both sides train."""

    max_grad_norm = 1.0

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def build_model(self) -> nn.Module:
        return Llama(self.sizes)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not self.sizes.cpu)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        logits, targets = model(batch[:, :-1]), batch[:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return rs.Loss(total, targets.numel())


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """One run."""

    step_s: float
    snapshot_s: float = 0.0
    """Time of a step's snapshot, from the step's spans."""


def run(effort: Effort) -> list[Line]:
    """All lines, or one with the reason that there are none."""
    if not torch.cuda.is_available():
        note = "there is no GPU here"
        return [
            Line(benchmark=NAME, what="tokens per second", subject="raysharded", unit="tokens/s", values=[], note=note)
        ]
    return measured(ONE_BILLION, rounds=effort.pick(quick=1, hour=2, full=5))


def measured(sizes: Sizes, rounds: int) -> list[Line]:
    """Compiled and not."""
    return [line for compiled in (False, True) for line in _measured(sizes, rounds, compiled=compiled)]


def _measured(sizes: Sizes, rounds: int, *, compiled: bool) -> list[Line]:
    subjects: dict[str, Callable[[], Ran]] = {
        PLAIN: lambda: Ran(step_s=plain(sizes, compiled=compiled)),
        DETERMINISTIC: lambda: Ran(step_s=plain(sizes, compiled=compiled, deterministic=True)),
        "raysharded, exact": lambda: ours(sizes, "exact", compiled=compiled),
        "raysharded, fast": lambda: ours(sizes, "fast", compiled=compiled),
        "raysharded, exact, a checkpoint every 4 steps": lambda: ours(sizes, "exact", compiled=compiled, every=4),
    }
    found = alternate(subjects, rounds)
    tokens, flops = sizes.batch * sizes.length, flops_of_step(sizes)
    peak = peak_flops(sizes)
    where = f"{parameters(sizes) / 1e9:.2f}B parameters, {'compiled' if compiled else 'not compiled'}, 1 worker"
    lines = []
    for name, runs in found.items():
        seconds = [one.step_s for one in runs]
        ratio = None if name == PLAIN else ratios(seconds, [one.step_s for one in found[PLAIN]])
        against = "" if ratio is None else "times the plain loop's step"
        rate = [tokens / one for one in seconds]
        lines.append(_line(f"tokens per second, {where}", name, "tokens/s", rate, ratio=ratio, against=against))
        if peak:
            lines.append(_line(f"MFU, {where}", name, "%", [100 * flops / one / peak for one in seconds]))
        if name not in (PLAIN, DETERMINISTIC):
            lines.append(_line(f"snapshot of a step, {where}", name, "s", [one.snapshot_s for one in runs]))
    return sorted(lines, key=lambda line: line.what)


def ours(sizes: Sizes, reduction: Any, *, compiled: bool, every: int | None = None) -> Ran:
    """One run of raysharded."""
    times: list[float] = []
    snapshots: list[float] = []

    def listen(kind: str, fields: dict[str, Any]) -> None:
        if kind == "step":
            times.append(time.perf_counter())
            snapshots.append(fields["seconds"].get("snapshot", 0.0))

    engine = rs.EngineConfig(
        reduction=reduction, param_dtype="bfloat16", activation_checkpointing=True, compile=compiled
    )
    with tempfile.TemporaryDirectory() as folder:
        rs.ElasticTrainer(
            task=NextToken(sizes),
            data=Tokens(sizes),
            batch=BatchConfig(global_batch_size=sizes.batch, microbatch_size=sizes.microbatch, seed=0),
            scaling=rs.ScalingConfig(num_workers=1, use_gpu=not sizes.cpu),
            run=rs.RunConfig(
                name=f"gpu-{time.time_ns()}",
                storage_path=folder,
                max_steps=sizes.steps,
                checkpoint=rs.CheckpointConfig(every_steps=every, at_end=False),
            ),
            engine=engine,
        ).fit(listen)
    gaps = [b - a for a, b in pairwise(times)][_WARM_UP_STEPS - 1 :]
    return Ran(step_s=statistics.mean(gaps), snapshot_s=statistics.median(snapshots[_WARM_UP_STEPS:]))


def plain(sizes: Sizes, *, compiled: bool, deterministic: bool = False) -> float:
    """Mean seconds per step of a plain loop, in a separate process."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--loop", json.dumps(asdict(sizes)), *["--compile"] * compiled]
    command += ["--deterministic"] * deterministic
    around = os.environ | (EXACT_SETTINGS if deterministic else {})
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=around)
    times: list[float] = json.loads(done.stdout.splitlines()[-1])
    return statistics.mean([b - a for a, b in pairwise(times)][_WARM_UP_STEPS - 1 :])


def loop(sizes: Sizes, *, compiled: bool, deterministic: bool) -> list[float]:
    """The times when each step was done: a plain FSDP2 loop with the same settings, as torch's own examples have it."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # as in a worker
        torch.backends.cudnn.benchmark = False
    device = torch.device("cpu" if sizes.cpu else "cuda")
    dist.init_process_group("gloo" if sizes.cpu else "nccl", store=HashStore(), rank=0, world_size=1)
    task, data = NextToken(sizes), Tokens(sizes)
    model = task.build_model().to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (1,))
    assert isinstance(model, Llama)
    for block in model.blocks:
        inner = torch.compile(block.forward) if compiled else block.forward
        block.forward = _checkpointed(inner)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = task.build_optimizer(model)
    times, index = [], 0
    for _ in range(sizes.steps):
        for _ in range(sizes.batch // sizes.microbatch):
            batch = torch.from_numpy(np.stack([data[index + i] for i in range(sizes.microbatch)])).to(device)
            index += sizes.microbatch
            loss = task.loss(model, batch)
            (loss.total / loss.weight / (sizes.batch // sizes.microbatch)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if not sizes.cpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter())
    dist.destroy_process_group()
    return times


def _checkpointed(forward: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def again(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(forward, x, use_reentrant=False)
        return found

    return again


def parameters(sizes: Sizes) -> int:
    """The number of the model's parameters."""
    with torch.device("meta"):
        return sum(p.numel() for p in Llama(sizes).parameters())


def flops_of_step(sizes: Sizes) -> float:
    """Operations of the model, forward and backward, without recomputation: 6 per parameter and token, but for the
    embedding, and attention (Chowdhery et al., "PaLM", 2022, appendix B; half of it, as it is causal)."""
    dense = parameters(sizes) - sizes.vocabulary * sizes.width
    return sizes.batch * sizes.length * (6.0 * dense + 6.0 * sizes.layers * sizes.width * sizes.length)


def peak_flops(sizes: Sizes) -> float | None:
    """Peak rate of the device, if its name is known."""
    name = "" if sizes.cpu else torch.cuda.get_device_name()
    return next((flops for part, flops in _PEAK_FLOPS.items() if part in name), None)


def _line(what: str, subject: str, unit: str, values: list[float], **more: Any) -> Line:
    return Line(benchmark=NAME, what=what, subject=subject, unit=unit, values=values, **more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="try this code with a tiny model on the CPU")
    parser.add_argument("--loop", help="run the plain loop with these sizes; print when each step was done")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    options = parser.parse_args()
    if options.loop:
        chosen = {
            "sizes": Sizes(**json.loads(options.loop)),
            "compiled": options.compile,
            "deterministic": options.deterministic,
        }
        print(json.dumps(loop(**chosen)))
        return
    from benchmarks.__main__ import shown

    for line in measured(TINY, rounds=1) if options.cpu else run(Effort.QUICK):
        print(shown(line), flush=True)


if __name__ == "__main__":
    main()
