"""docs/quickstart.md, command by command, with fewer steps."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from tests.cli.test_commands import invoke, succeed
from tests.docs.blocks import blocks, commands, page
from tests.ray.leftovers import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.clusters, pytest.mark.usefixtures("cluster")]

STEPS, MORE_STEPS = 24, 26


def test_the_first_ten_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quickstart = page("quickstart.md")
    (script,) = blocks(quickstart, "python")
    script = script.replace("max_steps=300", f"max_steps={STEPS}")
    slow = script.replace("        a, b = divmod", "        __import__('time').sleep(0.005)\n        a, b = divmod")
    assert slow != script
    (tmp_path / "train.py").write_text(slow)  # so that a worker is killed before the last step on any machine
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shown = list(commands(quickstart))
    train, *later = shown[shown.index("python train.py") :]
    kill, status, report, page_of_it, undisturbed, longer, ls, verify = (shlex.split(line)[1:] for line in later)

    process = subprocess.Popen(
        [sys.executable, *train.split()[1:]],
        env={**os.environ, "RAY_ADDRESS": str(ray.get_runtime_context().gcs_address)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: is_at_work(status), "the run began", 180.0)
        assert "worker 1, process" in succeed(*kill)
        gone = invoke(*kill)
        assert (gone.exit_code, "has exited" in gone.stderr) == (1, True)
        out, errors = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    assert re.match(r"on the Ray at \S+, as RAY_ADDRESS says: starting 3 workers\n", errors)
    (fingerprint,) = re.findall(r"^\w{32}$", out, re.MULTILINE)

    (tmp_path / "train.py").write_text(script)
    assert "finished" in succeed(*status)
    assert "was lost" in succeed(*report)
    found = json.loads(succeed(*report, "--json"))
    assert (found["ok"], found["steps"], found["samples_lost"]) == (True, STEPS, 0)
    assert len(found["recoveries"]) >= 1
    succeed(*page_of_it)
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert f"undisturbed: {STEPS} steps, fingerprint {fingerprint}" in succeed(*undisturbed)
    longer[longer.index("run.max_steps=400")] = f"run.max_steps={MORE_STEPS}"
    assert f"first: {MORE_STEPS} steps" in succeed(*longer)
    assert str(MORE_STEPS) in succeed(*ls)
    succeed(*verify)


def is_at_work(status: list[str]) -> bool:
    """True if all three workers train, and the run is not at its end."""
    told = invoke(*status, "--json")
    if told.exit_code != 0:  # it has not begun
        return False
    found = json.loads(told.stdout)
    return found["workers"] == 3 and 1 <= (found["step"] or 0) < STEPS - 10
