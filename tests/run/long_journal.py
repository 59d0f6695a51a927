"""A run's folder with the journal of weeks, made from a short real run, and the cost of all that reads it.

    python -m tests.run.long_journal make FOLDER [--steps 1000000] [--losses 1000] [--signed]
    python -m tests.run.long_journal measure FOLDER

`make` trains with worker processes until a killed one is replaced, and repeats the entries: a step a second, 30 of them
in a segment, a loss and a join each `steps / losses` steps, a checkpoint each 500. Digests are of the samples that
the steps would read, so that the report finds no error. The newest checkpoint on storage is the real one.
`measure` prints CPU seconds and the highest resident memory of each command, and of a driver that resumes the run, up
to its first step. With `--signed` the segments are signed with `KEY`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import raysharded as rs
from raysharded.checkpoint import SigningKey, Storage, open_storage
from raysharded.checkpoint.format.signing import place_of
from raysharded.data.ledger import expected_digests
from raysharded.journal import log
from raysharded.journal.signed_segments import Link, encode_signed, link_after
from raysharded.run import RunStopped
from raysharded.testing.processes import ProcessLauncher, fit
from tests.training.harness import GptTask, samples

KEY = "0123456789abcdef" * 4
NAME = "weeks"
_KILLED_AFTER = 6
_BATCH = rs.BatchConfig(global_batch_size=4, microbatch_size=2)
_CHECKPOINT_EVERY = 500
_STEPS_OF_A_SEGMENT = 30
_LIMIT = 1 << 22
"""The run's number of steps: more than any journal has."""
_PATIENCE_S = 300
Entry = dict[str, Any]


def make(folder: str, *, steps: int, losses: int, key: SigningKey | None = None) -> Storage:
    """Train, and write the journal of `steps` steps with `losses` losses in the place of the real one."""
    pids, kinds, is_enough = dict[int, int](), list[str](), threading.Event()

    def listen(kind: str, fields: Mapping[str, Any]) -> None:
        kinds.append(kind)
        if kind == "worker_ready":
            pids[fields["worker"]] = fields["pid"]
        if kind == "step" and fields["step"] == _KILLED_AFTER and fields["workers"] == 2:
            os.kill(pids[1], signal.SIGKILL)
        if kind == "step" and kinds.count("formed") > 2 and "checkpoint" in kinds:
            is_enough.set()

    run = _trainer(folder, _LIMIT, key).start_with(ProcessLauncher, listen)
    replaced = is_enough.wait(_PATIENCE_S)
    run.stop()
    with contextlib.suppress(RunStopped):
        run.wait()
    assert replaced, f"the killed worker was not replaced within {_PATIENCE_S} s"
    storage = open_storage(f"{folder}/{NAME}")
    entries = list(log.read(storage))
    for segment in log.segment_keys(storage):
        Path(folder, NAME, segment).unlink()
    _write(storage, _repeated(entries, steps, losses), key)
    return storage


def _trainer(folder: str, steps: int, key: SigningKey | None) -> rs.ElasticTrainer:
    if key is not None:
        os.environ["RAYSHARDED_CHECKPOINT_KEY"] = KEY
    return rs.ElasticTrainer(
        task=GptTask(),
        data=samples(),
        batch=_BATCH,
        scaling=rs.ScalingConfig(num_workers=(1, 2)),
        run=rs.RunConfig(
            name=NAME, storage_path=folder, max_steps=steps, checkpoint=rs.CheckpointConfig(every_steps=12)
        ),
    )


def _repeated(real: list[Entry], steps: int, losses: int) -> Iterator[Entry]:
    """The real entries up to the first step, then each step, loss, join and checkpoint with its own number and time."""
    at = next(index for index, entry in enumerate(real) if entry["kind"] == "step")
    for entry in real[:at]:
        yield entry | ({"max_steps": _LIMIT} if "max_steps" in entry else {})
    kinds = {kind: [entry for entry in real if entry["kind"] == kind] for kind in {entry["kind"] for entry in real}}
    began, every = float(real[at]["at"]), max(2, steps // losses if losses else steps + 1)
    numbers, generation = np.arange(1, steps + 1), 1
    for rows, words in expected_digests(numbers, _BATCH, len(samples()), 0):
        for step, low, high in zip(numbers[rows].tolist(), words[0].tolist(), words[1].tolist(), strict=True):
            step_at = began + step
            new: Entry = {"step": step, "at": step_at, "digest": [f"{low:016x}", f"{high:016x}"]}
            yield kinds["step"][step % 4] | new | {"generation": generation, "workers": 2}
            if step % every == 0:
                yield from _loss(kinds, step, generation, step_at)
                generation += 2
            if step % _CHECKPOINT_EVERY == 0:
                prefix = f"checkpoints/step-{step:010d}-g{generation:06d}_{real[0]['driver']}"
                yield kinds["checkpoint"][0] | {"step": step, "at": step_at + 0.5, "prefix": prefix}


def _loss(kinds: Mapping[str, list[Entry]], step: int, generation: int, at: float) -> Iterator[Entry]:
    """The entries of a loss after `step` and of the worker that replaces the lost one."""
    lost, new = (generation + 1) // 2, (generation + 1) // 2 + 1
    yield kinds["worker_lost"][0] | {"worker": lost, "step": step, "at": at + 0.1}
    yield kinds["generation"][1] | {"generation": generation + 1, "step": step, "at": at + 0.11}
    yield kinds["formed"][1] | {"generation": generation + 1, "at": at + 0.2}
    yield kinds["recovery"][0] | {"lost": [lost], "resumed_after_step": step, "at": at + 0.3}
    yield kinds["worker_ready"][2] | {"worker": new, "at": at + 0.4}
    yield kinds["generation"][2] | {"generation": generation + 2, "members": [0, new], "step": step, "at": at + 0.45}
    yield kinds["formed"][2] | {"generation": generation + 2, "at": at + 0.48}


def _write(storage: Storage, entries: Iterator[Entry], key: SigningKey | None) -> None:
    number, link, lines, head = 0, Link(), list[str](), {"kind": "segment", "writer": "weeks"}

    def put() -> None:
        nonlocal number, link
        number += 1
        if key is None:
            data = "\n".join([json.dumps(head, separators=(",", ":")), *lines, ""]).encode()
        else:
            data = encode_signed(head, lines, key, place_of(storage.url, log.segment_key(number)), link)
            link = link_after(data)
        storage.write(log.segment_key(number), [data])
        lines.clear()

    for entry in entries:
        lines.append(json.dumps(entry, separators=(",", ":")))
        if len(lines) == _STEPS_OF_A_SEGMENT or entry["kind"] in ("worker_lost", "generation"):
            put()
    put()


def resume(folder: str, *, signed: bool) -> tuple[float, float]:
    """CPU seconds and highest MB of a driver that resumes the run, from the call of `fit` to its first step."""
    began = _cpu_s(resource.RUSAGE_SELF)
    found: list[tuple[float, float]] = []
    stepped = threading.Event()

    def listen(kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "step" and not stepped.is_set():
            found.append((_cpu_s(resource.RUSAGE_SELF) - began, _peak_mb()))
            stepped.set()
            os.kill(os.getpid(), signal.SIGTERM)

    key = SigningKey(KEY.encode()) if signed else None
    with contextlib.suppress(RunStopped):
        fit(_trainer(folder, _LIMIT, key), listen)
    return found[0]


def _cpu_s(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def _peak_mb() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def measure(folder: str, *, signed: bool) -> None:
    """Print the cost of each command on the run, and of its resumption."""
    url = f"{folder}/{NAME}"
    commands = {
        "status": ["status", url],
        "report": ["report", url],
        "report --json": ["report", url, "--json"],
        "report --html": ["report", url, "--html", f"{folder}/report.html"],
        "checkpoint ls": ["checkpoint", "ls", url],
    }
    print(f"{'what':<16} {'CPU s':>8} {'MB':>7} {'exit':>5} {'bytes said':>11}")
    environment = {**os.environ, **({"RAYSHARDED_CHECKPOINT_KEY": KEY} if signed else {})}
    for name, words in commands.items():
        _report(name, [sys.executable, "-m", "raysharded", *words], environment)
    again = [sys.executable, "-m", "tests.run.long_journal", "resume", folder, *(["--signed"] if signed else [])]
    _report("resume, all", again, environment)


def _report(name: str, command: list[str], environment: Mapping[str, str]) -> None:
    before = _cpu_s(resource.RUSAGE_CHILDREN)
    wrapped = [sys.executable, "-c", _WRAP, *command]
    ran = subprocess.run(wrapped, env=dict(environment), capture_output=True, check=False)
    cpu_s = _cpu_s(resource.RUSAGE_CHILDREN) - before
    *_, last = ran.stderr.decode().splitlines()
    print(f"{name:<16} {cpu_s:>8.2f} {int(last) / 1024:>7.0f} {ran.returncode:>5} {len(ran.stdout):>11,}", flush=True)
    if name.startswith("resume"):
        print(ran.stdout.decode().strip(), ran.stderr.decode()[:-1], sep="\n")


_WRAP = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], check=False).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "measure", "resume"))
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--losses", type=int, default=1_000)
    parser.add_argument("--signed", action="store_true")
    asked = parser.parse_args()
    match asked.what:
        case "make":
            key = SigningKey(KEY.encode()) if asked.signed else None
            make(asked.folder, steps=asked.steps, losses=asked.losses, key=key)
        case "measure":
            measure(asked.folder, signed=asked.signed)
        case _:
            cpu_s, peak_mb = resume(asked.folder, signed=asked.signed)
            print(f"resume: {cpu_s:.2f} s of CPU to its first step, at most {peak_mb:.0f} MB")


if __name__ == "__main__":
    main()
