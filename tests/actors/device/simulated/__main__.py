"""Removes each call that orders streams, one at a time, and reports whether the simulated streams show it.

`python -m tests.actors.device.simulated [PART OF A NAME]`: exit status 1 if there is a false alarm, or if fewer than 95
of 100 removals are found of those that the runs reach and that have an effect.
"""

from __future__ import annotations

import sys

from tests.actors.device.simulated.removals import is_reached, removals
from tests.actors.device.simulated.runs import RUNS, findings

ENOUGH = 0.95


def main(part: str) -> int:
    clean = {name: findings(name) for name in RUNS}
    alarms = [f"false alarm in {name}: {problem}" for name, run in clean.items() for problem in run.problems]
    for alarm in alarms:
        _print(alarm)
    chosen = [removal for removal in removals() if part in removal.name]
    reached = expected = caught = 0
    for removal in chosen:
        through = [name for name, run in clean.items() if is_reached(removal, run.callers)]
        known = removal.why_not_found
        found = "" if known else next((name for name in through if findings(name, removal).problems), "")
        reached, caught = reached + bool(through), caught + bool(found)
        expected += bool(through) and not known
        verdict = f"found in {found}" if found else known or "NOT FOUND" if through else "not reached"
        _print(f"{removal.name}: {verdict}")
    _print(f"{len(chosen)} calls, {reached} reached, {expected} with an effect, {caught} removals found")
    return int(bool(alarms) or caught < ENOUGH * expected)


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
