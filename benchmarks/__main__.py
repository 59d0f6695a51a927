"""raysharded beside what people would use instead.

python -m benchmarks NAME [--quick] [--out FOLDER]   measure, and write FOLDER/NAME.json; NAME may be `all`
python -m benchmarks page [--out FOLDER]             write docs/benchmarks.md and its plots from FOLDER/*.json

FOLDER is benchmarks/results, which is committed; with --quick it is build/benchmarks, as few rounds make no figures.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.result import ROOT, Line, Measured, Taken, machine, write

NAMES = {
    "recovery": "benchmarks.recovery",
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
"""Name -> the module whose `run(quick=...)` returns the lines; in the order in which `all` runs them, and the page has
them."""
RESULTS = ROOT / "benchmarks" / "results"
QUICK_RESULTS = ROOT / "build" / "benchmarks"


def measure(name: str, out: Path, *, quick: bool) -> None:
    """One benchmark, in this process."""
    about, began, taken = machine(quick=quick), time.monotonic(), Taken()
    found: list[Line] = importlib.import_module(NAMES[name]).run(quick=quick)
    taken_percent = taken.percent()
    lines = [replace(one, machine={**(one.machine or about), "taken_percent": taken_percent}) for one in found]
    write(out / f"{name}.json", lines)
    for line in lines:
        print(shown(line), flush=True)
    print(f"{name}: {len(lines)} lines in {time.monotonic() - began:.0f} s -> {out / name}.json", flush=True)


def measure_all(out: Path, *, quick: bool) -> int:
    """Every benchmark in a process of its own; one that fails does not keep the others from running."""
    failed = []
    for name in NAMES:
        command = [sys.executable, "-m", "benchmarks", name, "--out", str(out), *["--quick"] * quick]
        if subprocess.run(command, check=False, cwd=ROOT).returncode != 0:
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
    parser.add_argument("--quick", action="store_true", help="the same code with fewer rounds, in minutes")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out: Path = options.out or (QUICK_RESULTS if options.quick else RESULTS)
    if options.name == "page":
        from benchmarks import page

        page.write_page(out, ROOT / "docs", list(NAMES))
        return 0
    if options.name == "all":
        return measure_all(out, quick=options.quick)
    measure(options.name, out, quick=options.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
