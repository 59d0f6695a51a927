"""Comparison of the bits that workers would compute with the run's bits so far, and the texts for differences. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raysharded import numerics
from raysharded.display.quantities import count, listing
from raysharded.driver.state.commands import Record
from raysharded.driver.state.driver_config import DriverConfig
from raysharded.driver.state.state import State
from raysharded.errors import InexactError
from raysharded.ids import WorkerId
from raysharded.protocol.messages import WorkerInfo

KIND = "arithmetic"
"""Kind of the journal entry that states from which step on the run has other bits than it would have had."""
BUILD_SEED = "build_seed"
"""Key of the build seed in checkpoints' metadata and in a driver's first journal entry."""
BLOCKS = "blocks"
"""Key of the data's blocks, there too."""
CONTENTS = "data_contents"
"""Key of the digest of the data's contents, in a checkpoint's metadata and in the entry `data`."""
Differing = Mapping[str, tuple[str, str]]
"""Name -> (the run's value, the other value)."""


def lacks(state: State, facts: WorkerInfo) -> Differing:
    """The run's rules that the program uses and the worker cannot compute under."""
    return _lacking(state.limits, state.numerics, facts.arithmetic.get(numerics.KEY, ""))


def differs(state: State, facts: WorkerInfo) -> Differing:
    """Facts of a worker's machine that differ from the run's, where that matters."""
    if not state.limits.exact or state.arithmetic is None:
        return {}
    return numerics.changes(state.arithmetic, numerics.of_machine(facts.arithmetic))


def fits(state: State, facts: WorkerInfo) -> bool:
    """True if a worker computes the bits that the run has."""
    return not lacks(state, facts) and not differs(state, facts)


def most_common(held: Mapping[WorkerId, WorkerInfo]) -> tuple[dict[str, str], int]:
    """The machine that most of these workers run on, and their number; in a tie the first worker's machine."""
    machines = [numerics.of_machine(held[worker].arithmetic) for worker in sorted(held)]
    counts = Counter(tuple(sorted(machine.items())) for machine in machines)
    (machine, number), *_ = counts.most_common(1)
    return dict(machine), number


def refusal(state: State, held: Mapping[WorkerId, WorkerInfo]) -> InexactError:
    """Error that ends a run whose workers would compute other bits than it has so far."""
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
    """The run's rules that the program uses and this version no longer computes under."""
    return _lacking(limits, numbers, numerics.listed())


def raised(before: str, after: str) -> Differing:
    """Partly refused rules whose number changed after something was accepted."""
    numbers = {
        name: (str(numerics.number_of(before, name)), str(numerics.number_of(after, name)))
        for name, rule in numerics.RULES.items()
        if rule.refused_in_part
    }
    return {name: pair for name, pair in numbers.items() if pair[0] != pair[1]}


def rules_refusal(step: int, found: Differing) -> InexactError:
    """Error of a driver that is to resume a run under rules that its version has dropped."""
    return InexactError(
        f"the run was computed up to step {step} under {_values(found, 0)}, and this version of raysharded computes "
        f"under {_values(found, 1)}: it would have other bits from step {step + 1} on. "
        f"{way_out('Use the version of raysharded that it ran with')}"
    )


def way_out(first: str) -> str:
    """Last sentence of a refusal; `first`: how to get the same bits."""
    return (
        f"{first}, or let it go on with other bits, which its report then says: RunConfig(accept_arithmetic=True), or "
        "`raysharded run --accept-arithmetic`."
    )


def entry(from_step: int, differing: Differing, machine: Mapping[str, str], rules: str) -> Record:
    """Journal entry of an accepted change: `machine` and `rules` are the run's from `from_step` on."""
    fields = {
        "step": from_step - 1,
        "from_step": from_step,
        "changes": {name: list(values) for name, values in differing.items()},
        "arithmetic": {**machine, numerics.KEY: numerics.whole(rules)},
    }
    return Record(kind=KIND, fields=fields, durable=True)


def accepted(entries: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The arithmetic accepted last; None if none was accepted since the run last began at the start.

    It holds for all later computation, also from an older checkpoint.
    """
    found: Mapping[str, Any] | None = None
    for entry in entries:
        if entry["kind"] == KIND:
            found = entry["arithmetic"]
        elif entry["kind"] == "started" and int(entry["resumed_after_step"]) == 0:
            found = None
    return found


def rules_on_record(entries: Sequence[Mapping[str, Any]]) -> str | None:
    """Rules of the newest driver's steps, according to the journal; None if there was no driver."""
    starts = [entry for entry in entries if entry["kind"] == "started"]
    return numerics.recorded(starts[-1]) if starts else None


def build_seed_of(about: Mapping[str, Any]) -> int:
    """Seed of the task's constructors in a run's settings, a checkpoint or a driver's first entry.

    Records that are older than this key have none; the run's own seed counts then.
    """
    batch = about.get("batch")
    seed = about.get(BUILD_SEED, batch.get("seed", 0) if isinstance(batch, Mapping) else 0)
    return seed if isinstance(seed, int) else 0


def own_build_seed(build_seed: int, about: Mapping[str, Any]) -> dict[str, int]:
    """Entry to add to a run's settings for `build_seed_of`; empty if the settings already give this seed."""
    return {} if build_seed == build_seed_of(about) else {BUILD_SEED: build_seed}


def blocks_of(about: Mapping[str, Any]) -> tuple[int, int]:
    """(samples per block, samples per step) of a checkpoint or a driver's first entry; (1, 1) if it has none."""
    found = about.get(BLOCKS)
    if isinstance(found, Sequence) and len(found) == 2 and all(isinstance(one, int) and one for one in found):
        return found[0], found[1]
    return 1, 1


def own_blocks(blocks: tuple[int, int]) -> dict[str, list[int]]:
    """Entry to add to a run's settings for `blocks_of`; empty for data without blocks."""
    return {BLOCKS: list(blocks)} if blocks[0] != 1 else {}


def contents_of(about: Mapping[str, Any]) -> str:
    """Digest of the data's contents in a checkpoint; empty if it has none."""
    found = about.get(CONTENTS)
    return found if isinstance(found, str) else ""


def own_contents(contents: str) -> dict[str, str]:
    """Entry to add to a run's settings for `contents_of`; empty for data without one."""
    return {CONTENTS: contents} if contents else {}


def has_other_contents(state: State, facts: WorkerInfo) -> bool:
    """Whether a worker's data have other contents than the run's, where both are known."""
    pairs = zip(_parts_of(state.contents), _parts_of(facts.contents), strict=True)
    return any("" not in pair and pair[0] != pair[1] for pair in pairs)


def contents_with(contents: str, facts: WorkerInfo) -> str:
    """The digests of the run's contents, and of a worker's data those that the run has no record of."""
    mine, theirs = _parts_of(contents), _parts_of(facts.contents)
    about, stores = (own or other for own, other in zip(mine, theirs, strict=True))
    return f"{about}+{stores}" if stores else about


def _parts_of(contents: str) -> tuple[str, str]:
    """The two digests in `WorkerInfo.contents`. Runs that began with an earlier version have no second one."""
    about, _, stores = contents.partition("+")
    return about, stores


def has_other_blocks(state: State, facts: WorkerInfo) -> bool:
    """Whether a worker's data have other blocks than the run's, which has an order that depends on them."""
    return (
        state.num_samples is not None
        and numerics.number_of(state.numerics, "order") > 1
        and facts.samples_per_block != state.blocks[0]
    )


def blocks_with(state: State, facts: WorkerInfo) -> tuple[int, int]:
    """The run's blocks once a worker with these facts is admitted: its data's, if the run has just begun."""
    known = state.num_samples is not None
    return state.blocks if known else begun_blocks(state.blocks, facts, state.limits.global_batch_size)


def begun_blocks(recorded: tuple[int, int], facts: WorkerInfo, global_batch_size: int) -> tuple[int, int]:
    """The recorded blocks of a run; without a record it has just begun, with the blocks of this worker's data."""
    if recorded[0] != 1 or facts.samples_per_block == 1:
        return recorded
    return facts.samples_per_block, global_batch_size


def data_entry(facts: WorkerInfo) -> dict[str, Any]:
    """Fields of the journal's entry about a run's data."""
    blocks = {"samples_per_block": facts.samples_per_block} if facts.samples_per_block != 1 else {}
    mixture = {"mixture": json.loads(facts.mixture)} if facts.mixture else {}
    return {"num_samples": facts.num_samples, **blocks, **mixture, **own_contents(facts.contents)}


def _lacking(limits: DriverConfig, run: str, there: str) -> Differing:
    return numerics.lacking(run, there, exact=limits.exact, compiles=limits.compiles)


def _values(differing: Differing, which: int) -> str:
    return ", ".join(f"{name} {values[which]}" for name, values in differing.items())


def _who(number: int, starting: int) -> str:
    if number < starting:
        return f"{number} of {count(starting, 'worker')}"
    return f"all {count(number, 'worker')}" if number > 1 else "its worker"
