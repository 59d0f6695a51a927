"""Try the corpus of programs: `python -m tests.corpus [--rows NAME ...] [--kinds KIND ...] [--tenth] [--short]
[--varied ...]`.

Prints a line for each row: equal at every size and equal to plain torch, or refused; in capitals if the result differs
from the row. Results of unchanged code are kept in build/corpus and not repeated. Exit status 1: some result differs
from its row.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in the workers

from tests import forked
from tests.corpus.programs import NEED_TRANSFORMERS, program_of
from tests.corpus.rows import KINDS, ROWS, Row
from tests.corpus.variants import VARIANTS, VARIED
from tests.corpus.verdicts import Verdict, verdict, verdict_varied
from tests.paths import ROOT

Trial = tuple[str, str, Callable[[], Verdict]]
"""(kind, name, function that tries it)"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=sorted(ROWS), metavar="NAME", help="these alone")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, metavar="KIND", help="those of these kinds")
    parser.add_argument("--tenth", action="store_true", help="those that are tried each time")
    parser.add_argument("--short", action="store_true", help="in two runs where three are usual")
    parser.add_argument("--varied", nargs="*", choices=sorted(VARIANTS), metavar="VARIANT", help="a tenth otherwise")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "corpus", help="where results are kept")
    asked = parser.parse_args()
    rows = [
        row
        for row in ROWS.values()
        if (not asked.rows or row.name in asked.rows)
        and (not asked.kinds or row.kind in asked.kinds)
        and (not asked.tenth or row.tenth)
        and (asked.varied is None or row.name in VARIED)
    ]
    if any(row.name in NEED_TRANSFORMERS for row in rows):
        forked.PRELOADED.append("tests.corpus.preloaded")
    trials = _usual(rows, asked.short) if asked.varied is None else _varied(rows, asked.varied or list(VARIANTS))
    kept: Path = asked.folder / f"{_code()}{'-short' * asked.short}.jsonl"
    kept.parent.mkdir(parents=True, exist_ok=True)
    known = {one.row: one for one in map(_read, kept.read_text().splitlines())} if kept.exists() else {}
    tried, wrong = 0, 0
    for kind, name, trial in trials:
        began = time.monotonic()
        found = known.get(name) or trial()
        if name not in known:
            with kept.open("a") as file:
                file.write(json.dumps(asdict(found)) + "\n")
        tried, wrong = tried + 1, wrong + (not found.is_right)
        print(f"{kind:16} {name:28} {found.outcome:12} {time.monotonic() - began:6.1f} s  {found.why}", flush=True)
    print(f"{tried} rows, {wrong} not as they say")
    sys.exit(1 if wrong else 0)


def _usual(rows: Sequence[Row], is_short: bool) -> Iterator[Trial]:
    for row in rows:
        yield row.kind, row.name, partial(_tried, row, is_short)


def _tried(row: Row, is_short: bool) -> Verdict:
    return verdict(row, program_of(row.name), is_short=is_short)


def _varied(rows: Sequence[Row], variants: Sequence[str]) -> Iterator[Trial]:
    for row in rows:
        program = program_of(row.name)
        for variant in variants:
            name = f"{row.name}, {variant}"
            if VARIANTS[variant].applies(program):
                yield row.kind, name, partial(verdict_varied, name, VARIANTS[variant], program)


def _read(line: str) -> Verdict:
    return Verdict(**json.loads(line))


def _code() -> str:
    """A name of the code: the commit, and a digest of the differences from it; without git, another one each time."""
    if not (ROOT / ".git").exists():
        return f"{time.time_ns()}"
    changed = _git("diff", "HEAD", "--", "raysharded", "tests/corpus", "tests/training/harness.py")
    new = [
        ROOT / name for name in _git("ls-files", "--others", "--exclude-standard", "raysharded", "tests/corpus").split()
    ]
    text = changed + "".join(path.read_text() for path in new)
    digest = f"-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}" if text else ""
    return _git("rev-parse", "--short", "HEAD").strip() + digest


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
