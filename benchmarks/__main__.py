"""raysharded compared with its alternatives.

- Measure, and write FOLDER/NAME.json: `python -m benchmarks NAME [--effort quick|hour|full] [--out FOLDER]`
- Write benchmarks.md and its plots from these: `python -m benchmarks page [--effort quick|hour|full] [--out FOLDER]`

NAME may be `all`. With full effort FOLDER is benchmarks/results and the page docs/benchmarks.md, which are committed;
otherwise build/benchmarks/EFFORT has both.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.effort import Effort
from benchmarks.result import ROOT, Line, Measured, Taken, machine, write

NAMES = {
    "recovery": "benchmarks.recovery",
    "stops": "benchmarks.stops",
    "nodes": "benchmarks.nodes",
    "resizes": "benchmarks.resizes",
    "steps": "benchmarks.steps",
    "steps-large": "benchmarks.steps_large",
    "goodput": "benchmarks.goodput",
    "checkpoints": "benchmarks.checkpoints",
    "scale": "benchmarks.scale",
    "report": "benchmarks.report",
    "gpu": "benchmarks.gpu",
}
"""Name -> the module whose `run(effort)` returns the lines; in the order in which `all` runs them, and the page has
them."""
RESULTS = ROOT / "benchmarks" / "results"
OTHER_RESULTS = ROOT / "build" / "benchmarks"


def measure(name: str, out: Path, effort: Effort) -> None:
    """One benchmark, in this process."""
    about, began, taken = machine(effort), time.monotonic(), Taken()
    found: list[Line] = importlib.import_module(NAMES[name]).run(effort)
    taken_percent = taken.percent()
    lines = [replace(one, machine={**(one.machine or about), "taken_percent": taken_percent}) for one in found]
    write(out / f"{name}.json", lines)
    for line in lines:
        print(shown(line), flush=True)
    print(f"{name}: {len(lines)} lines in {time.monotonic() - began:.0f} s -> {out / name}.json", flush=True)


def measure_all(out: Path, effort: Effort) -> int:
    """Run every benchmark in a separate process; one that fails does not keep the others from running."""
    failed = []
    for name in NAMES:
        command = [sys.executable, "-m", "benchmarks", name, "--effort", effort, "--out", str(out)]
        with subprocess.Popen(command, cwd=ROOT) as process:
            try:
                returned = process.wait()
            except BaseException:
                process.terminate()  # it ends whom it has started
                raise
        if returned != 0:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


def shown(line: Line) -> str:
    """A line for people."""
    if not line.values:
        return f"{line.what}, {line.subject}: {line.note}"
    found = Measured(line.values)
    text = f"{line.what}, {line.subject}: {found.median:.4g} {line.unit}".rstrip()
    text += f" ({found.min:.4g} to {found.max:.4g}; {len(line.values)})" if len(line.values) > 1 else ""
    if line.ratio:
        text += f", {Measured(line.ratio).median:.3f} {line.against}"
    if line.met is not None:
        text += f"; asked {line.asked}: {'yes' if line.met else 'NO'}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*NAMES, "all", "page"])
    parser.add_argument("--effort", type=Effort, choices=list(Effort), default=Effort.HOUR)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # sessions end their processes then, too
    effort: Effort = options.effort
    out: Path = options.out or (RESULTS if effort is Effort.FULL else OTHER_RESULTS / effort)
    if options.name == "page":
        from benchmarks import page

        docs = ROOT / "docs" if effort is Effort.FULL else out
        page.write_page(out, docs, list(NAMES))
        print(docs / "benchmarks.md")
        return 0
    if options.name == "all":
        return measure_all(out, effort)
    measure(options.name, out, effort)
    return 0


if __name__ == "__main__":
    sys.exit(main())
