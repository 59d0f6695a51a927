"""Record frozen histories, and show differences: `python -m tests.driver.histories --help`."""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, settings, strategies as st

import raysharded
from tests.driver.canonical import Value
from tests.driver.frozen import (
    FOLDER,
    SHARD,
    Digests,
    History,
    Moment,
    digests_of,
    from_json,
    moments_of,
    num_shards,
    read_digests,
    read_drawn,
    read_history,
    to_json,
    write_digests,
    write_drawn,
)
from tests.driver.schedules import Schedule, controlled, deciding, left_alone, schedules, well_controlled
from tests.driver.shown import cut, head, lines, value_text, view_text
from tests.paths import ROOT

KINDS: Mapping[str, tuple[float, st.SearchStrategy[Schedule]]] = {
    "schedules": (0.45, schedules()),
    "left_alone": (0.15, left_alone()),
    "deciding": (0.15, deciding()),
    "controlled": (0.2, controlled()),
    "well_controlled": (0.05, well_controlled()),
}
"""Kind -> its share, and its strategy."""
MORE = 1.02
"""Factor of the number of histories that are drawn: those that fail today are left out."""
CHUNK = 100
T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.driver.histories", description=__doc__)
    commands = parser.add_subparsers(required=True)
    record = commands.add_parser("record", help="draw histories, and record what the driver makes of them today")
    record.add_argument("--number", type=int, default=10 * SHARD, help=f"a multiple of {SHARD}")
    record.add_argument("--digests-only", action="store_true", help="keep the drawn values that there are")
    record.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    record.set_defaults(run=_record)
    compare = commands.add_parser("compare", help="run a history with another commit's driver, and show what differs")
    compare.add_argument("history", type=int)
    compare.add_argument("commit", nargs="?", help="by default the newest one that recorded histories")
    compare.add_argument("--own-tests", action="store_true", help="with that commit's simulation, too")
    compare.set_defaults(run=_compare)
    show = commands.add_parser("show", help="print what the driver makes of a history today")
    show.add_argument("history", type=int)
    show.set_defaults(run=_show)
    views = commands.add_parser("views", help="the same as JSON lines, of the history on the standard input")
    views.set_defaults(run=_views)
    logging.disable(logging.CRITICAL)  # the logs of the simulated workers
    arguments = parser.parse_args()
    arguments.run(arguments)


# -- record --


def _record(arguments: argparse.Namespace) -> None:
    with ProcessPoolExecutor(arguments.processes) as pool:
        if arguments.digests_only:
            _renew(pool)
        else:
            _record_anew(pool, arguments.number)
    print(f"{_seconds():.0f} CPU seconds")


def _seconds() -> float:
    """Processor seconds of this process and of those that it started."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _record_anew(pool: ProcessPoolExecutor, number: int) -> None:
    num = number // SHARD
    if num < 1 or number % SHARD:
        sys.exit(f"--number {number}: give a multiple of {SHARD}")
    wanted = {kind: round(share * number) for kind, (share, _) in KINDS.items()}
    candidates = [
        History(number=0, kind=kind, schedule=schedule)
        for kind, drawn in zip(KINDS, pool.map(_draw, KINDS, wanted.values()), strict=True)
        for schedule in drawn
    ]
    print(f"{len(candidates)} drawn")
    done: dict[str, list[tuple[History, Digests]]] = {kind: [] for kind in KINDS}
    for history, digests in zip(candidates, _digests(pool, candidates), strict=True):
        if isinstance(digests, str):
            print(f"left out: {digests}")
        elif len(done[history.kind]) < wanted[history.kind]:
            done[history.kind].append((history, digests))
    for shard in range(num):
        mixed = list(enumerate(_mixed([every[shard::num] for every in done.values()]), shard * SHARD))
        write_drawn(shard, [replace(history, number=place) for place, (history, _) in mixed])
        write_digests(shard, [replace(digests, history=place) for place, (_, digests) in mixed])
    size = sum(path.stat().st_size for path in FOLDER.iterdir())
    print(f"{sum(map(len, done.values()))} recorded, {size / 1e6:.1f} MB")


def _mixed(parts: Sequence[Sequence[T]]) -> list[T]:
    """All of them; each part is spread evenly over the whole."""
    placed = [
        ((place + 0.5) / len(part), number, one) for number, part in enumerate(parts) for place, one in enumerate(part)
    ]
    return [one for _, _, one in sorted(placed, key=lambda one: one[:2])]


def _draw(kind: str, number: int) -> list[Schedule]:
    """Different histories, some more than `number`, each drawn alone: in one batch most repeat parts of earlier
    ones."""
    found: dict[Schedule, None] = {}
    wanted = int(number * MORE) + 1

    @settings(
        max_examples=wanted,
        backend="hypothesis-urandom",
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(KINDS[kind][1])
    def take(schedule: Schedule) -> None:
        found[schedule] = None

    while len(found) < wanted:
        take()
    return list(found)[:wanted]


def _digests(pool: ProcessPoolExecutor, histories: Sequence[History]) -> Iterator[Digests | str]:
    """Digests of each history; or the reason that it fails."""
    chunks = [histories[first : first + CHUNK] for first in range(0, len(histories), CHUNK)]
    since, done = time.monotonic(), 0
    for chunk in pool.map(_digests_of_chunk, chunks):
        yield from chunk
        done += len(chunk)
        if done % (20 * CHUNK) == 0:
            print(f"{done} of {len(histories)} after {time.monotonic() - since:.0f} s", flush=True)


def _digests_of_chunk(histories: Sequence[History]) -> list[Digests | str]:
    logging.disable(logging.CRITICAL)
    return [_digests_or_error(history) for history in histories]


def _digests_or_error(history: History) -> Digests | str:
    try:
        return digests_of(history)
    except RuntimeError as error:
        return str(error)


def _renew(pool: ProcessPoolExecutor) -> None:
    differing: list[History] = []
    for shard in range(num_shards()):
        histories, before, now = read_drawn(shard), read_digests(shard), list[Digests]()
        for digests in _digests(pool, histories):
            if isinstance(digests, str):
                sys.exit(f"{digests}\nNothing more is recorded: a history that fails tells nothing.")
            now.append(digests)
        differs = [history for history, was, one in zip(histories, before, now, strict=True) if was != one]
        differing += differs
        if differs:
            write_digests(shard, now)
        print(f"shard {shard}: {len(differs)} of {len(histories)} histories differ from what was recorded", flush=True)
    print(f"{len(differing)} of {num_shards() * SHARD} histories differ from what was recorded before")
    if differing:
        for line in _compared(differing[0], _recorded_in()):
            print(line)


# -- compare --


def _compare(arguments: argparse.Namespace) -> None:
    history = read_history(arguments.history)
    for line in _compared(history, arguments.commit or _recorded_in(), own_tests=arguments.own_tests):
        print(line)


def _recorded_in() -> str:
    """The newest commit that recorded histories."""
    found = _git("log", "-1", "--format=%h", "--", str(FOLDER.relative_to(ROOT))).decode().strip()
    return found or sys.exit(f"no commit has changed {FOLDER.relative_to(ROOT)} yet: name one")


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, stdout=subprocess.PIPE).stdout


def _compared(history: History, commit: str, *, own_tests: bool = False) -> Iterator[str]:
    """The first event that differs, side by side."""
    before, with_tests = _moments_in(commit, history, own_tests=own_tests)
    now = moments_of(history)
    yield f"history {history.number} ({history.kind}): {commit} with {with_tests}, and the working tree"
    pairs = list(zip_longest(before, now))
    first = next((number for number, (old, new) in enumerate(pairs) if _text(old) != _text(new)), None)
    if first is None:
        yield f"all {len(now)} events are the same"
        if not own_tests:
            yield "If they are not as recorded, the simulation in tests/driver has changed: see with --own-tests."
        return
    yield f"event {first + 1} is the first of {len(before)} in {commit}, of {len(now)} today, that differs; before it:"
    for number in range(max(0, first - 3), first):
        yield from map(cut, lines(number + 1, now[number]))
    yield "-" * 40
    yield from _side_by_side(first + 1, *pairs[first], commit)


def _text(moment: Moment | None) -> str:
    return "" if moment is None else moment.text()


def _side_by_side(number: int, old: Moment | None, new: Moment | None, commit: str) -> Iterator[str]:
    width = max(len(commit), len("today")) + 2
    then, today = f"{commit:<{width}}", f"{'today':<{width}}"
    if old is None or new is None or head(number, old) != head(number, new):
        yield then + (head(number, old) if old else "it is over")
        yield today + (head(number, new) if new else "it is over")
    else:
        yield head(number, old)
    ordered = [[view_text(command) for command in moment.commands] if moment else [] for moment in (old, new)]
    if ordered[0] == ordered[1]:
        yield from (f"    orders {command}" for command in ordered[0])
    else:
        yield from (f"    {then}orders {command}" for command in ordered[0] or ["nothing"])
        yield from (f"    {today}orders {command}" for command in ordered[1] or ["nothing"])
    for path in sorted((old.changes if old else {}).keys() | (new.changes if new else {}).keys()):
        was, is_ = (moment.changes.get(path, "(as before)") if moment else "(as before)" for moment in (old, new))
        if repr(was) == repr(is_):
            yield cut(f"    knows  {path}: {value_text(was)}")
        else:
            texts = zip((then, today), _around(was, is_), strict=True)
            yield from (f"    {side}knows  {path}: {text}" for side, text in texts)


def _around(was: Value, is_: Value) -> tuple[str, str]:
    """Two values, where they begin to differ."""
    texts = value_text(was), value_text(is_)
    same = next((place for place, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), 0)
    skip = max(0, same - 60)
    one, other = (cut(f"...{text[skip:]}" if skip else text) for text in texts)
    return one, other


def _moments_in(commit: str, history: History, *, own_tests: bool) -> tuple[list[Moment], str]:
    """Moments with the package of another commit, and today's tests; with its own tests if these do not match."""
    why = ""
    for whose in ("its own tests",) if own_tests else ("today's tests", "its own tests"):
        with tempfile.TemporaryDirectory() as folder:
            _unpack(commit, Path(folder), own_tests=whose == "its own tests")
            done = subprocess.run(
                [sys.executable, "-m", "tests.driver.histories", "views"],
                check=False,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": folder},
                input=json.dumps(to_json(history)).encode(),
                capture_output=True,
            )
        if done.returncode == 0:
            told = [json.loads(line) for line in done.stdout.splitlines()]
            if not told[0].startswith(os.path.realpath(folder)):
                sys.exit(f"raysharded was imported from {told[0]}, not from {commit}")
            return [_moment(one) for one in told[1:]], whose
        why += f"\nwith {whose}:\n{done.stderr.decode()}"
    sys.exit(f"the history could not be run with {commit}{why}")


def _unpack(commit: str, folder: Path, *, own_tests: bool) -> None:
    tests = [name for name in ("tests/driver", "tests/paths.py") if own_tests and _git("ls-tree", commit, name)]
    theirs = _git("archive", commit, "raysharded", *tests)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=theirs, check=True)
    if not own_tests:
        (folder / "tests").mkdir()
        ours = [str(ROOT / "tests" / name) for name in ("driver", "paths.py")]
        subprocess.run(["cp", "-r", *ours, str(folder / "tests")], check=True)


def _moment(told: dict[str, Any]) -> Moment:
    views = {"event": tuple(told["event"]), "commands": tuple(tuple(one) for one in told["commands"])}
    return Moment(**{**told, **views})


# -- show --


def _show(arguments: argparse.Namespace) -> None:
    history = read_history(arguments.history)
    print(json.dumps(to_json(history)))
    for number, moment in enumerate(moments_of(history), 1):
        for line in lines(number, moment):
            print(line)


def _views(arguments: argparse.Namespace) -> None:
    print(json.dumps(os.path.realpath(raysharded.__file__)))
    for moment in moments_of(from_json(json.load(sys.stdin))):
        print(json.dumps(asdict(moment)))


if __name__ == "__main__":
    main()
