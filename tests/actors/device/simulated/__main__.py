"""Removes each call that orders streams, one at a time, and reports whether the simulated streams show it.

`python -m tests.actors.device.simulated [PART OF A NAME]`. Exit status 1: there is a false alarm; or fewer than 95 of
100 removals are found, of those that the runs reach and that have an effect; or a call is not reached, and not in
`NOT_REACHED`.
"""

from __future__ import annotations

import sys

from tests.actors.device.simulated.removals import Removal, is_reached, newly_unreached, removals
from tests.actors.device.simulated.runs import RUNS, findings

ENOUGH = 0.95


def main(part: str) -> int:
    clean = {name: findings(name) for name in RUNS}
    alarms = [f"false alarm in {name}: {problem}" for name, run in clean.items() for problem in run.problems]
    for alarm in alarms:
        _print(alarm)
    chosen = [removal for removal in removals() if part in removal.name]
    unreached, excused, caught, expected = list[Removal](), list[Removal](), 0, 0
    for removal in chosen:
        through = [name for name, run in clean.items() if is_reached(removal, run.callers)]
        if not through:
            unreached.append(removal)
        elif removal.why_not_found:
            excused.append(removal)
        else:
            found = next((name for name in through if findings(name, removal).problems), "")
            expected, caught = expected + 1, caught + bool(found)
            _print(f"{removal.name}: {f'found in {found}' if found else 'NOT FOUND'}")
    for removal in excused:
        _print(f"{removal.name}: without an effect: {removal.why_not_found}")
    for removal in unreached:
        _print(f"{removal.name}: not reached")
    new = newly_unreached(unreached)
    for key in new:
        _print(f"not reached, and not in NOT_REACHED: {key}")
    reached = len(chosen) - len(unreached)
    _print(
        f"{caught} removals found, of {expected} with an effect, {reached} that are reached, and {len(chosen)} calls; "
        f"{len(alarms)} false alarms in {len(RUNS)} runs"
    )
    return int(bool(alarms or new) or caught < ENOUGH * expected)


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
