"""The findings of a benchmark: lines of measured values, the ratio of each pair, and the goals.

A file of results is JSON, `{"format": 1, "lines": [...]}`; each line carries the commit, the versions and the machine
of its measurement.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.effort import Effort

T = TypeVar("T")

FORMAT = 1
ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("torch", "ray", "numpy", "fsspec", "boto3")
_WRITTEN = (":!benchmarks/results", ":!docs/benchmarks*")  # the harness writes these: they make no other commit
NOT_SEEN = "not seen"
"""Note of a line whose event a subject never showed while it was watched."""
_STEAL = 7
"""Column of the stolen time in /proc/stat's first line, after the word `cpu`."""
_ASKED = re.compile(r"(at most|at least|under|over|exactly) (\d+(?:\.\d+)?)(?=$|[ :;,%])")


@dataclass(frozen=True, slots=True)
class Measured:
    """Values of one thing, at least one."""

    values: list[float]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("nothing was measured: a line without values has no median; add a note with the reason")

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def min(self) -> float:
        return min(self.values)

    @property
    def max(self) -> float:
        return max(self.values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One figure of one subject."""

    benchmark: str
    """A name of `benchmarks.__main__.NAMES`."""
    what: str
    """The measured quantity: the same words for every subject, as they become one row of a table."""
    subject: str
    """The measured program: `raysharded`, `Ray Train`, `torchrun FSDP2`, ..."""
    unit: str
    """`s`, `MB/s`, `bytes`, `steps`, ...; empty for a plain number."""
    values: list[float]
    """Values of every round, in order; empty where it was not measured, and `note` has the reason."""
    ratio: list[float] | None = None
    """The ratio of each pair, as `against` describes it."""
    against: str = ""
    """Description of the ratio, such as `over torchrun FSDP2`."""
    asked: str | None = None
    """The goal: `at most 1.05`, `at least 8`, `under 0.5 s`, `over 2`, `exactly 0`, and more words if need be. It holds
    for the median of `ratio`, or of `values` where there is no ratio; `exactly` holds for every value."""
    note: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)
    """See `machine`; `write` fills it in."""

    def __post_init__(self) -> None:
        if self.asked is not None and not _ASKED.match(self.asked):
            raise ValueError(f"asked {self.asked!r}: begin with 'at most', 'at least', 'under', 'over' or 'exactly' X")
        if not self.values and not self.note:
            raise ValueError(f"{self.benchmark}, {self.what}, {self.subject}: no values, and no note with the reason")

    @property
    def judged(self) -> list[float]:
        """The values that the goal applies to."""
        return self.values if self.ratio is None else self.ratio

    @property
    def met(self) -> bool | None:
        """True if the goal is met; None without a goal, or without a measurement."""
        if self.asked is None or not self.judged:
            return None
        found = _ASKED.match(self.asked)
        assert found is not None
        word, bound, median = found[1], float(found[2]), Measured(self.judged).median
        if word == "exactly":
            return all(value == bound for value in self.judged)
        return {
            "at most": median <= bound,
            "at least": median >= bound,
            "under": median < bound,
            "over": median > bound,
        }[word]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """`ours` over `theirs`, pair by pair; they were measured alternately, so there are as many of each."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def alternate(subjects: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """The results of each subject, round by round: A B A B ..., so that both meet the same state of the machine."""
    found: dict[str, list[T]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, subject in subjects.items():
            found[name].append(subject())
    return found


def machine(effort: Effort = Effort.FULL, *, peers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The conditions of a run: collect them before the run, as the machine's load is part of them.

    `peers`: versions of the peers that have separate environments, such as `{"torchft": "0.2.0"}`.
    """
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": versions | dict(peers or {}),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "load_before": [round(one, 2) for one in os.getloadavg()],
        "effort": effort,
    }


class Taken:
    """The share of the cores' time that the host of this virtual machine gives to others, from now on."""

    def __init__(self) -> None:
        self._before = _cpu_times()

    def percent(self) -> float:
        """The share since this object was made."""
        spent = [now - then for now, then in zip(_cpu_times(), self._before, strict=True)]
        return round(100 * spent[_STEAL] / max(1, sum(spent)), 1)


def _cpu_times() -> list[int]:
    """Times of all cores, in clock ticks since boot; zeros where there is no /proc/stat."""
    try:
        first = Path("/proc/stat").read_text().partition("\n")[0]
    except OSError:
        return [0] * (_STEAL + 1)
    return [int(ticks) for ticks in first.split()[1 : _STEAL + 2]]


def write(path: str | Path, lines: Sequence[Line], about: Mapping[str, Any] | None = None) -> None:
    """Write a file of results. `about`: the conditions from `machine` before the run; lines with conditions keep
    theirs."""
    about = machine() if about is None else about
    filled = [line if line.machine else replace(line, machine=about) for line in lines]
    text = json.dumps({"format": FORMAT, "lines": [asdict(line) for line in filled]}, indent=1)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text + "\n")


def read(path: str | Path) -> list[Line]:
    """The lines of a file that `write` wrote."""
    found = json.loads(Path(path).read_text())
    if found.get("format") != FORMAT:
        raise ValueError(f"{path} has format {found.get('format')}, and this reads {FORMAT}: measure anew")
    return [Line(**line) for line in found["lines"]]


def _commit() -> str:
    """The commit of the working tree, with a `+` if files differ from it; `unknown` outside of git."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + "+" * bool(_git("status", "--porcelain", "--untracked-files=no", "--", ".", *_WRITTEN))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()
