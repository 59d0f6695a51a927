"""Processor seconds of commands, with all that they started: `clock.py run NAME COMMAND ...`, `clock.py table`.

Lines of figures are added to `build/clock.jsonl`; tests add those that needed a second try (`tests/second_tries.py`).
Python's standard library alone: it runs before anything is installed. Linux only.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "build" / "clock.jsonl"
LEFT_WITHIN_S = 10.0
_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> int:
    """The command's exit status; 2 for invalid arguments."""
    match arguments:
        case ["run", name, *command] if command:
            return run(name, command)
        case ["table"]:
            sys.stdout.write(table([json.loads(line) for line in FILE.read_text().splitlines()]))
            return 0
        case _:
            sys.stderr.write(f"usage: {__doc__}")
            return 2


def run(name: str, command: list[str]) -> int:
    """Run the command, reap its orphans too, and add a line of what all of them took."""
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:  # see prctl(2): orphans become our children
        sys.stderr.write("clock: orphans are not counted here\n")
    began = time.monotonic()
    load_before = os.getloadavg()[0]
    child = subprocess.Popen(command)
    status = _reap(child.pid)
    wall_s = time.monotonic() - began
    left = _reap_orphans(LEFT_WITHIN_S)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    line = {
        "part": name,
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "wall_s": round(wall_s, 1),
        "load": [round(load_before, 1), round(os.getloadavg()[0], 1)],
        "status": status,
        "processes_left": left,
    }
    FILE.parent.mkdir(parents=True, exist_ok=True)
    with FILE.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return status


def _reap(main_pid: int) -> int:
    """Wait for every child until `main_pid` ends; its exit status as a shell has it."""
    while True:
        try:
            pid, status = os.wait()
        except InterruptedError:
            continue
        if pid == main_pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _reap_orphans(within_s: float) -> int:
    """Wait so long for the remaining processes of the command to end; the number of those that did not."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 0
        if pid == 0:
            if time.monotonic() > deadline:
                children = Path(f"/proc/self/task/{os.getpid()}/children")
                return len(children.read_text().split())
            time.sleep(0.05)


def table(lines: list[dict[str, Any]]) -> str:
    """The parts with their sum, and the tests that needed a second try."""
    parts = [line for line in lines if "part" in line]
    tries = [line for line in lines if "second_try" in line]
    rows = [("part", "CPU s", "wall s", "load", "exit", "left")]
    rows += [
        (
            line["part"],
            f"{line['cpu_s']:.0f}",
            f"{line['wall_s']:.0f}",
            " to ".join(map(str, line["load"])),
            str(line["status"]),
            str(line["processes_left"]),
        )
        for line in parts
    ]
    total = (sum(line["cpu_s"] for line in parts), sum(line["wall_s"] for line in parts))
    rows.append(("all", f"{total[0]:.0f}", f"{total[1]:.0f}", "", "", ""))
    text = _aligned(rows)
    if tries:
        rows = [("second try of", "first try, s", "ended with")]
        rows += [(line["second_try"], f"{line['seconds']:.1f}", line["error"]) for line in tries]
        text += "\n" + _aligned(rows)
    return text + ("" if tries else "no test needed a second try\n")


def _aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
