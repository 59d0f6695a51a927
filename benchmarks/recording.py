"""The driver's cost of recording: processor time per event and journal bytes per step, with and without.

A driver's machine, journal thread and storage, without workers: it receives, as fast as it accepts them, the messages
of 4 workers of a model of 300 parameters. A real driver receives a few events per step. Run: python -m
benchmarks.recording
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from raysharded.checkpoint import open_storage
from raysharded.clock import SystemClock
from raysharded.driver import machine
from raysharded.driver.replay.recorder import Machine, Transcript
from raysharded.driver.state.commands import Record
from raysharded.driver.state.driver_config import DriverConfig
from raysharded.driver.state.events import Event, Ready, WorkerReply
from raysharded.driver.state.state import State
from raysharded.ids import GenerationId, WorkerId
from raysharded.journal.log import Journal
from raysharded.journal.writer import Recorder
from raysharded.layout import StateSpec, TensorSpec
from raysharded.protocol.messages import GenerationReady, Progress, StepReport, WorkerInfo

WORKERS = 4
PHASES = ("wait", "data", "forward", "backward", "agree", "apply", "snapshot", "mirror")


def spec() -> StateSpec:
    """A state of 300 parameters with AdamW's two moments and count."""
    tensors = []
    for number in range(300):
        name = f"blocks.{number // 12}.attention.{number % 12}.weight"
        kinds = ("model", "optim.exp_avg", "optim.exp_avg_sq")
        tensors += [TensorSpec(name=f"{kind}.{name}", dtype="float32", shape=(1024, 256)) for kind in kinds]
        tensors.append(TensorSpec(name=f"optim.step.{name}", dtype="float32", shape=()))
    return StateSpec(tensors=tuple(tensors))


def history(steps: int) -> list[Event]:
    """The events of a run, from the first worker that is ready on."""
    generation, state = GenerationId(1), spec()
    events: list[Event] = []
    for worker in map(WorkerId, range(WORKERS)):
        facts = WorkerInfo(pid=1, node="host", node_id="ab" * 28, arithmetic={"torch": "2.13"}, num_samples=10**6)
        events.append(Ready(worker=worker, facts=facts))
    for worker in map(WorkerId, range(WORKERS)):
        formed = GenerationReady(generation=generation, step=0, spec=state, seconds={}, bytes_received=0, bytes_read=0)
        events.append(WorkerReply(worker=worker, message=formed))
    for step in range(1, steps + 1):
        report = StepReport(
            generation=generation,
            step=step,
            world_size=WORKERS,
            loss=3.0 + 1 / step,
            weight=2048.0,
            metrics={},
            evaluation={},
            gradient_norm=1.0 + 1 / step,
            lr=3e-4 / step,
            read_digest=(step * 2**50 + 12345, step * 2**49 + 6789),
            num_reads=16,
            seconds=dict.fromkeys(PHASES, 0.1 + 1 / (3 * step)),
            finished_at=1.7e9 + step / 3,
        )
        events.append(WorkerReply(worker=WorkerId(0), message=Progress(generation=generation, reports=(report,))))
    return events


def drive(folder: str, steps: int, *, recorded: bool) -> tuple[float, float, int]:
    """(processor seconds of the driver's thread, of all its threads, bytes of the journal)."""
    clock = SystemClock()
    recorder = Recorder(Journal(open_storage(folder), clock, "driver"), clock)
    limits = DriverConfig(
        min_workers=WORKERS,
        max_workers=WORKERS,
        max_steps=2 * steps,
        exact=True,
        mirrors=True,
        save_at_end=True,
        start_timeout_s=60.0,
        replacement_wait_s=0.0,
        max_worker_losses=0,
        task_error_retries=0,
        progress_timeout_s=300.0,
        look_around_s=1e9,
    )
    events = history(steps)
    decide: Machine = Transcript(recorder) if recorded else machine
    began, all_began = time.thread_time(), time.process_time()
    state, commands = decide.begin(State(limits=limits, rendezvous=("host", 1, "keys")), clock.monotonic())
    for event in events:
        state, commands = decide.step(state, event, clock.monotonic())
        for command in commands:
            if isinstance(command, Record):
                recorder.record(command.kind, dict(command.fields), durable=command.durable)
    own_s = time.thread_time() - began
    assert state.step == steps
    recorder.close(60.0)
    size_bytes = sum(path.stat().st_size for path in Path(folder, "journal").iterdir())
    return own_s, time.process_time() - all_began, size_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    for recorded in (False, True):
        found = []
        for _ in range(options.runs):
            with tempfile.TemporaryDirectory() as folder:
                found.append(drive(folder, options.steps, recorded=recorded))
        own_us, all_us = (statistics.median(one[k] for one in found) / options.steps * 1e6 for k in (0, 1))
        size = found[0][2] / options.steps
        print(
            f"{'recorded' if recorded else 'not recorded':>13}: {own_us:.0f} us of the driver's thread per event "
            f"({1e6 / own_us:.0f} events/s), {all_us:.0f} us of all threads, {size:.0f} bytes of journal per step"
        )


if __name__ == "__main__":
    main()
