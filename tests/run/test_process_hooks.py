"""Notices to a script's process: SIGTERM, and the end of its terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raysharded.checkpoint import open_storage
from raysharded.journal.log import read
from raysharded.run.process_hooks import on_notice
from tests.paths import ROOT

TERM, HUP = signal.SIGTERM, signal.SIGHUP


@pytest.mark.parametrize(
    ("came", "interrupts"),
    [
        ([TERM], False),
        ([HUP], False),
        ([HUP, HUP], False),  # of the kernel, and of the shell
        ([TERM, HUP], False),  # of systemd
        ([HUP, TERM], False),
        ([TERM, TERM], True),
        ([HUP, TERM, HUP, TERM], True),
    ],
)
def test_only_a_second_sigterm_interrupts(came: list[signal.Signals], interrupts: bool) -> None:
    noticed: list[int] = []
    before = signal.getsignal(TERM), signal.getsignal(HUP)
    interrupted = False
    try:
        with on_notice(lambda: noticed.append(1), 5.0):
            for number in came:
                signal.raise_signal(number)
    except KeyboardInterrupt:
        interrupted = True
    assert (noticed, interrupted) == ([1], interrupts)
    assert (signal.getsignal(TERM), signal.getsignal(HUP)) == before


def test_an_ignored_sighup_stays_ignored() -> None:
    noticed: list[int] = []
    before = signal.signal(HUP, signal.SIG_IGN)
    try:
        with on_notice(lambda: noticed.append(1), 5.0):
            assert signal.getsignal(HUP) is signal.SIG_IGN
            signal.raise_signal(HUP)
    finally:
        signal.signal(HUP, before)
    assert noticed == []


SCRIPT = """
import sys
from pathlib import Path
import raysharded as rs
from raysharded.testing import processes
from tests.faults.on_fake_nfs import Ramps, Squares

folder = Path(sys.argv[1])
trainer = rs.ElasticTrainer(
    task=Squares(), data=Ramps(), batch=rs.BatchConfig(global_batch_size=4, microbatch_size=1),
    scaling=rs.ScalingConfig(num_workers=1),
    run=rs.RunConfig(name="run", storage_path=str(folder), max_steps=1_000_000),
)

def listen(kind, fields):
    if kind == "step" and fields["step"] == 1:
        print(kind, flush=True)

try:
    processes.fit(trainer, listen)
except rs.RunStopped as error:
    (folder / "told").write_text(f"{error.result.steps} {error}")
"""


@pytest.mark.long
@pytest.mark.procs
def test_the_end_of_the_terminal_ends_a_run_after_one_more_checkpoint(tmp_path: Path) -> None:
    terminal, its = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", sys.executable, "-c", SCRIPT, str(tmp_path)],
        stdin=its,
        stdout=its,
        stderr=its,
        env=environment,
        cwd=ROOT,
    )
    os.close(its)
    try:
        shown = b""
        while b"step\r\n" not in shown:  # printed whole, so that the script does not print into a closed terminal
            shown += os.read(terminal, 4096)
        os.close(terminal)  # the kernel sends SIGHUP to the session's leader and to the foreground group
        process.wait(timeout=120)
    finally:  # after a failure: its child, too
        subprocess.run(["pkill", "-KILL", "-P", str(process.pid)], check=False)
        process.kill()
    step, _, told = (tmp_path / "told").read_text().partition(" ")
    assert f"the next fit() resumes from its checkpoint of step {step}" in told
    kinds = [entry["kind"] for entry in read(open_storage(str(tmp_path / "run")))]
    assert kinds.count("checkpoint") == 1
    assert kinds[-1] == "stopped"
    assert int(step) >= 1
