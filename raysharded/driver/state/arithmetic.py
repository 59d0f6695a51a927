"""The bits that workers would compute beside those that the run has so far, and the words where they differ. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raysharded import numerics
from raysharded.driver.state.commands import Record
from raysharded.driver.state.driver_config import DriverConfig
from raysharded.driver.state.state import State
from raysharded.errors import InexactError
from raysharded.ids import WorkerId
from raysharded.protocol.messages import WorkerInfo
from raysharded.quantities import count, listing

KIND = "arithmetic"
"""Of the journal's entry that says from which step on the run has other bits than it would have had."""
BUILD_SEED = "build_seed"
"""Of what a checkpoint, and a driver's first entry of the journal, say of the run."""
Differing = Mapping[str, tuple[str, str]]
"""Name -> (the run's, the other)."""


def lacks(state: State, facts: WorkerInfo) -> Differing:
    """The rules of the run that a worker cannot compute under, of those that the program uses."""
    return _lacking(state.limits, state.numerics, facts.arithmetic.get(numerics.KEY, ""))


def differs(state: State, facts: WorkerInfo) -> Differing:
    """The facts of a worker's machine that are not as the run's, where that matters."""
    if not state.limits.exact or state.arithmetic is None:
        return {}
    return numerics.changes(state.arithmetic, numerics.of_machine(facts.arithmetic))


def fits(state: State, facts: WorkerInfo) -> bool:
    """True if a worker computes the bits that the run has."""
    return not lacks(state, facts) and not differs(state, facts)


def most_common(held: Mapping[WorkerId, WorkerInfo]) -> tuple[dict[str, str], int]:
    """The machine that most of these workers run on, and how many do; of several the one of the first."""
    machines = [numerics.of_machine(held[worker].arithmetic) for worker in sorted(held)]
    counts = Counter(tuple(sorted(machine.items())) for machine in machines)
    (machine, number), *_ = counts.most_common(1)
    return dict(machine), number


def refusal(state: State, held: Mapping[WorkerId, WorkerInfo]) -> InexactError:
    """The error that ends a run whose workers would compute other bits than it has so far."""
    machine, number = most_common(held)
    differing = numerics.changes(state.arithmetic or {}, machine)
    nodes = sorted({facts.node for facts in held.values()})
    who = _who(number, len(state.starting))
    return InexactError(
        f"the run was computed up to step {state.step} with {_values(differing, 0)}, and {who} started with "
        f"{_values(differing, 1)} (on {listing(nodes[:4])}{', ...' if len(nodes) > 4 else ''}): it would have other "
        f"bits from step {state.step + 1} on. {way_out('Run it on what it ran on')}"
    )


def dropped(limits: DriverConfig, numbers: str) -> Differing:
    """The rules of a run that this version does not compute under any more, of those that the program uses."""
    return _lacking(limits, numbers, numerics.listed())


def raised(before: str, after: str) -> Differing:
    """The rules whose number is another one after something was accepted, of those that were refused in part."""
    numbers = {
        name: (str(numerics.number_of(before, name)), str(numerics.number_of(after, name)))
        for name, rule in numerics.RULES.items()
        if rule.refused_in_part
    }
    return {name: pair for name, pair in numbers.items() if pair[0] != pair[1]}


def rules_refusal(step: int, found: Differing) -> InexactError:
    """The error of a driver that is to go on with a run under rules that its version has dropped."""
    return InexactError(
        f"the run was computed up to step {step} under {_values(found, 0)}, and this version of raysharded computes "
        f"under {_values(found, 1)}: it would have other bits from step {step + 1} on. "
        f"{way_out('Use the version of raysharded that it ran with')}"
    )


def way_out(first: str) -> str:
    """The last sentence of a refusal; `first`: how to have the same bits."""
    return (
        f"{first}, or let it go on with other bits, which its report then says: RunConfig(accept_arithmetic=True), or "
        "`raysharded run --accept-arithmetic`."
    )


def entry(from_step: int, differing: Differing, machine: Mapping[str, str], rules: str) -> Record:
    """The journal's entry of what somebody accepted: `machine` and `rules` are the run's from `from_step` on."""
    fields = {
        "step": from_step - 1,
        "from_step": from_step,
        "changes": {name: list(values) for name, values in differing.items()},
        "arithmetic": {**machine, numerics.KEY: numerics.whole(rules)},
    }
    return Record(kind=KIND, fields=fields, durable=True)


def accepted(entries: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The arithmetic that was accepted last: whatever is computed from then on has it, also from an older checkpoint.
    None if none was since the run last began at the start."""
    found: Mapping[str, Any] | None = None
    for entry in entries:
        if entry["kind"] == KIND:
            found = entry["arithmetic"]
        elif entry["kind"] == "started" and int(entry["resumed_after_step"]) == 0:
            found = None
    return found


def rules_on_record(entries: Sequence[Mapping[str, Any]]) -> str | None:
    """Those that the newest driver's steps were computed under, as the journal says; None if there was no driver."""
    starts = [entry for entry in entries if entry["kind"] == "started"]
    return numerics.recorded(starts[-1]) if starts else None


def build_seed_of(about: Mapping[str, Any]) -> int:
    """The seed of the task's constructors that a run's settings, a checkpoint or a driver's first entry give: the run's
    own where they say no other, as those that are older than it."""
    batch = about.get("batch")
    seed = about.get(BUILD_SEED, batch.get("seed", 0) if isinstance(batch, Mapping) else 0)
    return seed if isinstance(seed, int) else 0


def own_build_seed(build_seed: int, about: Mapping[str, Any]) -> dict[str, int]:
    """What is to be written beside a run's settings for `build_seed_of`: nothing where they say the same."""
    return {} if build_seed == build_seed_of(about) else {BUILD_SEED: build_seed}


def _lacking(limits: DriverConfig, run: str, there: str) -> Differing:
    return numerics.lacking(run, there, exact=limits.exact, compiles=limits.compiles)


def _values(differing: Differing, which: int) -> str:
    return ", ".join(f"{name} {values[which]}" for name, values in differing.items())


def _who(number: int, starting: int) -> str:
    if number < starting:
        return f"{number} of {count(starting, 'worker')}"
    return f"all {count(number, 'worker')}" if number > 1 else "its worker"
