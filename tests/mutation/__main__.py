"""Try mutants of the engine against a stated set of tests: `python -m tests.mutation [--count 60] [--seed 1]`.

Each is tried in a separate work tree of the current commit, by `TESTS` without `NOT_OF_THE_ENGINE`, until the first
failure: first by the tests of its module, then by all. On two idle cores all end in `LIMIT_S`; on a busy machine the
limit is twice the time that they took without a mutant. A mutant is found if the test that failed fails again alone,
and hung if it had no end twice. Results of this commit are kept in build/mutants and not repeated; printed.txt there
has what the tests printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.mutation.places import Mutant, drawn, of_module, table
from tests.paths import ROOT

TESTS = (
    "tests/training",
    "tests/actors",
    "tests/data",
    "tests/test_numerics.py",
    "tests/test_skips.py",
    "tests/test_decisions.py",
)
NOT_OF_THE_ENGINE = (
    "tests/actors/comm/test_abortable_wait.py",
    "tests/actors/comm/test_members.py",
    "tests/actors/process",
    "tests/data/test_bucketed.py",
    "tests/data/test_pack.py",
    "tests/training/test_changed_weights.py",
    "tests/training/test_checkpoints.py",
    "tests/training/test_leaving.py",
    "tests/training/test_orphans.py",
    "tests/training/test_pause_and_resize.py",
    "tests/training/test_preparation.py",
    "tests/training/test_replay.py",
    "tests/training/test_rules.py",
    "tests/training/test_signed_runs.py",
    "tests/training/test_start_from.py",
    "tests/training/test_task_errors.py",
)
"""Tests of what the driver decides, of waits, of earlier versions and of what others' libraries compute. Without them
the set ends within `LIMIT_S` on two idle cores."""
MARKS = "not long and not ray and not gpu and not s3 and not alone"
LIMIT_S = 240.0
SILENT_S = 120.0
"""Longest time without a test that ends; the longest test takes 33 s on a busy machine."""
TRIES = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60, help="how many mutants")
    parser.add_argument("--seed", type=int, default=1, help="which ones")
    asked = parser.parse_args()
    root = ROOT
    commit = _git(root, "rev-parse", "--short", "HEAD")
    folder = root / "build" / "mutants"
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{commit}.jsonl"
    tree = folder / "tree"
    _git(root, "worktree", "prune")
    if tree.exists():
        shutil.rmtree(tree)
        _git(root, "worktree", "prune")
    _git(root, "worktree", "add", "--detach", str(tree), commit)
    try:
        known = _read(kept)
        if "" not in known:
            began = time.monotonic()
            result = _tried(tree, 4 * LIMIT_S)
            if result != "survived":
                sys.exit(f"without a mutant: {result}")
            _keep(kept, known, "", None, f"{time.monotonic() - began:.0f} s")
        limit_s = max(LIMIT_S, 2 * float(known[""].split()[0]))
        _say(f"without a mutant: {known['']}")
        mutants = drawn(tree, asked.seed, asked.count)
        for number, mutant in enumerate(mutants, 1):
            if mutant.name not in known:
                path = tree / mutant.path
                source = path.read_text(encoding="utf-8")
                path.write_text(mutant.applied(source), encoding="utf-8")
                try:
                    near = [test for test in of_module(mutant.path, tree, TESTS) if not _is_left_out(test)]
                    result = _confirmed(tree, limit_s, *near) if near else "survived"
                    if result == "survived":
                        result = _confirmed(tree, limit_s)
                    _keep(kept, known, mutant.name, mutant, result)
                finally:
                    path.write_text(source, encoding="utf-8")
            _say(f"{number:3} of {len(mutants)}: {mutant.name}: {known[mutant.name]}")
        _say(table([(mutant, known[mutant.name].partition(":")[0]) for mutant in mutants]))
    finally:
        _git(root, "worktree", "remove", "--force", str(tree))


def _is_left_out(test: str) -> bool:
    return any(test == path or test.startswith(f"{path}/") for path in NOT_OF_THE_ENGINE)


def _confirmed(tree: Path, limit_s: float, *tests: str) -> str:
    """The result that a second try confirms. A test that failed is repeated alone: chance finds no mutant."""
    for _ in range(TRIES):
        result = _tried(tree, limit_s, *tests)
        if result == "survived":
            return result
        again = (
            _tried(tree, limit_s, result.partition(": ")[2])
            if result.startswith("found: ")
            else _tried(tree, limit_s, *tests)
        )
        if again != "survived":
            return result
    return "survived"


def _tried(tree: Path, limit_s: float, *tests: str) -> str:
    """`survived`, `found: the first test that failed`, or `hung`, by these tests or by `TESTS`."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "3", "--dist", "worksteal", "-m", MARKS, "--no-header"]
    command += ["-p", "no:cacheprovider", "--tb=short", "-p", "no:randomly", *(tests or TESTS)]
    command += [f"--ignore={path}" for path in NOT_OF_THE_ENGINE]
    environment = {**os.environ, "PYTHONPATH": str(tree), "CI": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with (tree.parent / "printed.txt").open("ab+") as printed:
        start = printed.tell()
        process = subprocess.Popen(  # a separate session: a hanging test is ended with all its workers
            command, cwd=tree, env=environment, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            if not _has_ended(process, printed.fileno(), limit_s):
                return "hung"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(start)
        output = printed.read().decode()
    if process.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return "survived"
    failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return f"found: {failed[0].partition(' ')[2].partition(' - ')[0]}" if failed else f"ended: {output.strip()[-200:]}"


def _has_ended(process: subprocess.Popen[bytes], printed: int, limit_s: float) -> bool:
    """True if a process ends in time: False after `limit_s`, or once it has printed nothing for `SILENT_S`."""
    began = newest = time.monotonic()
    size = 0
    while (now := time.monotonic()) < min(began + limit_s, newest + SILENT_S):
        if (found := os.fstat(printed).st_size) != size:
            size, newest = found, now
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1.0)
            return True
    return False


def _read(path: Path) -> dict[str, str]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {row["name"]: row["result"] for row in map(json.loads, lines)}


def _keep(path: Path, known: dict[str, str], name: str, mutant: Mutant | None, result: str) -> None:
    known[name] = result
    row = {"name": name, "result": result, "at": round(time.time()), "mutant": asdict(mutant) if mutant else None}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
