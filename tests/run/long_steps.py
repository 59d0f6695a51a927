"""Many real steps with kills: what grows, and whether the bits stay.

    python -m tests.run.long_steps FOLDER [--steps 100000] [--kill-every 1000] [--sample-every 250]

A tiny model is trained with two worker processes, of which the younger one is killed every so many steps, and once
without any kill. Driver and workers note their memory and descriptors every `--sample-every` steps. Printed are slopes
by regression over the last half of the steps, and whether all steps and the last state are equal to the undisturbed
run's. It may be ended and started again with the same folder: both runs continue, and samples are added. An elder
worker lives from the newest start on, so its slope is of that time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import raysharded as rs
from raysharded.checkpoint import open_storage
from raysharded.journal import log
from raysharded.report import load
from raysharded.testing.processes import fit
from tests.run.heap_growth import Rows, Tiny, in_use

_SKIPPED = ("at", "generation", "workers", "seconds")
"""Fields of a step with the time and place of its computation."""
_FIELDS = ("rss_kb", "descriptors", "threads")


class Struck:
    """A listener of the disturbed run: it kills, and writes samples down."""

    def __init__(self, notes: Path, kill_every: int, sample_every: int) -> None:
        self._notes, self._kill_every, self._sample_every = notes, kill_every, sample_every
        self._pids: dict[int, int] = {}
        self._members: Sequence[int] = ()
        self._due = 0

    def __call__(self, kind: str, fields: Mapping[str, Any]) -> None:
        match kind:
            case "worker_ready":
                self._pids[fields["worker"]] = fields["pid"]
            case "generation":
                self._members = fields["members"]
            case "step":
                self._step(fields["step"])

    def _step(self, step: int) -> None:
        if not self._due:  # between two checkpoints
            self._due = (step // self._kill_every + 1) * self._kill_every + self._kill_every // 3
        if step % self._sample_every == 0:
            elder = self._pids[min(self._members)]
            note: dict[str, Any] = {
                "step": step,
                "driver": sample(os.getpid()),
                "elder": {"pid": elder, **sample(elder)},
            }
            note["driver"]["heap"] = in_use()
            with self._notes.open("a", encoding="ascii") as file:
                file.write(json.dumps(note) + "\n")
        if step >= self._due and len(self._members) > 1:
            self._due = 0
            os.kill(self._pids[max(self._members)], signal.SIGKILL)


def sample(pid: int) -> dict[str, int]:
    """A process's resident memory in kB, and its numbers of descriptors and threads."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return {
        "rss_kb": int(status.partition("VmRSS:")[2].split()[0]),
        "threads": int(status.partition("Threads:")[2].split()[0]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
    }


def trainer(folder: str, name: str, steps: int) -> rs.ElasticTrainer:
    rows = Rows()
    Path(folder, f"{name}-heap").mkdir(exist_ok=True)
    return rs.ElasticTrainer(
        task=Tiny(f"{folder}/{name}-heap"),
        data=[rows[index] for index in range(len(rows))],
        batch=rs.BatchConfig(global_batch_size=2, microbatch_size=1),
        scaling=rs.ScalingConfig(num_workers=(1, 2)),
        run=rs.RunConfig(
            name=name,
            storage_path=folder,
            max_steps=steps,
            checkpoint=rs.CheckpointConfig(every_steps=500, keep_last=2),
        ),
    )


def steps_of(folder: str, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each step with what was computed in it, as often as it was."""
    for entry in log.read(open_storage(f"{folder}/{name}")):
        if entry["kind"] == "step":
            yield entry["step"], {key: value for key, value in entry.items() if key not in _SKIPPED}


def slopes(notes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Growth per 100,000 steps over the last half of the steps, of the driver and of the elder worker."""
    last = [note for note in notes if 2 * note["step"] > notes[-1]["step"]]
    elder = [note for note in last if note["elder"]["pid"] == last[-1]["elder"]["pid"]]
    for who, some, fields in (("driver", last, (*_FIELDS, "heap")), ("elder", elder, _FIELDS)):
        steps = [note["step"] for note in some]
        for field in fields:
            slope = float(np.polyfit(steps, [note[who][field] for note in some], 1)[0])
            growth = f"{slope * 100_000:+.1f} per 100,000 steps"
            yield f"{who} {field}: {growth} ({len(some)} samples, now {some[-1][who][field]})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--kill-every", type=int, default=1_000)
    parser.add_argument("--sample-every", type=int, default=250)
    asked = parser.parse_args()
    folder: str = asked.folder
    Path(folder).mkdir(parents=True, exist_ok=True)
    notes = Path(folder, "samples.jsonl")
    found = fit(trainer(folder, "struck", asked.steps), Struck(notes, asked.kill_every, asked.sample_every))
    plain = fit(trainer(folder, "plain", asked.steps))
    should, differing, again = dict(steps_of(folder, "plain")), 0, 0
    seen = set[int]()
    for step, numbers in steps_of(folder, "struck"):
        differing += numbers != should[step]
        again += step in seen
        seen.add(step)
    summary = load(f"{folder}/struck").summary
    losses = sum(event.what == "lost" for event in summary.worker_events)
    print(*slopes([json.loads(line) for line in notes.read_text(encoding="ascii").splitlines()]), sep="\n")
    are_equal = not differing and seen == should.keys() and found.fingerprint == plain.fingerprint
    print(f"{len(seen)} steps, {losses} losses, {summary.starts} starts, {again} steps computed again, ", end="")
    print(f"bits {'equal' if are_equal else 'DIFFERENT'}: {differing} steps differ; {found.fingerprint}")
    return 0 if are_equal and losses else 1


if __name__ == "__main__":
    raise SystemExit(main())
