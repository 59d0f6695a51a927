"""The named rules by which bits are computed, and the numbers of each that this version computes under. Pure.

A run keeps the rules that it began with, as one text: "build 1, compile 1, draws 1, ...". A rule that the text does not
name has the number 1: so it is of runs and workers that are older than these rules. Whoever changes a bit that training
computes, or the order of samples, adds a number to the rule that says it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

KEY = "numerics"
"""Of what workers compare: in `Facts.arithmetic`, and in what a checkpoint keeps of it."""
_FIRST = (1,)
Numbers: TypeAlias = Mapping[str, tuple[int, ...]]
"""Rule -> its numbers, ascending."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: what it covers, and the numbers under which this version computes."""

    covers: str
    listed: tuple[int, ...] = _FIRST
    """Ascending; a new run takes the last. One that is left out is dropped: runs under it are refused."""
    refused_in_part: bool = False
    """True if the numbers before the last are computed for the programs alone that it makes no difference to: workers
    refuse the others, which are found by trying, and go on under the last number once that is accepted."""
    in_fast_mode: bool = False
    """True if `EngineConfig(reduction="fast")` keeps it, too: that promises the same samples, and not the same bits."""


RULES: dict[str, Rule] = {
    "build": Rule(
        "the first weights and persistent buffers, drawn from the run's seed, whole or a module at a time, and cut "
        "afterwards; and what constructors draw and keep beside them: anew in each build (1), or once, from a seed, in "
        "the build that gives the first weights (2)",
        listed=(1, 2),
        refused_in_part=True,
    ),
    "compile": Rule(
        "which blocks `EngineConfig(compile=True)` compiles, and for which shapes: each by itself (1: for dynamic "
        "shapes from a second one on, and none after eight, as each worker came to them)",
        listed=(2,),
    ),
    "draws": Rule(
        "the state of the process's generators in a loss, in its backward and in an evaluation, from the seed, the "
        "step and the microbatch: of torch's alone (1), or of NumPy's and Python's own, too (2)",
        listed=(1, 2),
    ),
    "modes": Rule(
        "training or evaluation mode of the modules in each forward, torch's deterministic algorithms and other "
        "settings of the process, and the dtypes of mixed precision: all modules train in train mode, and settings "
        "that `build_model` changed stay (1), or frozen parts that it left in eval keep that, and settings are put "
        "back (2)",
        (1, 2),
    ),
    "numbers": Rule(
        "the step's loss and metrics from those of its microbatches, the gradient's norm, clipping and scaling, the "
        "learning rate, and what the optimizer is given",
        (1, 2),
    ),
    "order": Rule("which sample is at which position, and which positions a microbatch has", in_fast_mode=True),
    "reduce": Rule("the tree along which the gradients of the microbatches are added, and the dtype of the sums"),
    "unused": Rule(
        "what the gradient of a parameter is that some microbatches of a step do not use, or none of them",
        (1, 2),
    ),
}
"""By name; changed in tests alone."""


def parse(text: str) -> dict[str, tuple[int, ...]]:
    """The rules that a text names, with their numbers. Raises ValueError for what `text_of` does not write."""
    found: dict[str, tuple[int, ...]] = {}
    for part in text.split(", ") if text else ():
        name, *numbers = part.split(" ")
        if not name or not numbers or name in found or not all(n.isascii() and n.isdigit() for n in numbers):
            raise ValueError(f'{text!r} is no text of rules: {part!r} is not a new name and its numbers, as "order 1"')
        found[name] = tuple(sorted(map(int, numbers)))
    return found


def text_of(numbers: Numbers) -> str:
    """The rules as one text, by name.

    Law: parse(text_of(n)) == n for sorted numbers.
    """
    return ", ".join(f"{name} {' '.join(map(str, of))}" for name, of in sorted(numbers.items()))


def listed() -> str:
    """All that this version computes under: what a worker says of itself."""
    return text_of({name: rule.listed for name, rule in RULES.items()})


def newest() -> str:
    """The rules of a new run."""
    return text_of({name: rule.listed[-1:] for name, rule in RULES.items()})


def whole(text: str) -> str:
    """The same run's rules with all that this version knows: those that the text does not name are at 1."""
    return text_of({**dict.fromkeys(RULES, _FIRST), **parse(text)})


def number_of(text: str, name: str) -> int:
    """The number of a rule under which a run computes that has this text."""
    return parse(text).get(name, _FIRST)[-1]


def is_used(name: str, *, exact: bool, compiles: bool) -> bool:
    """True if a program with these settings of its engine depends on a rule.

    Said before anything is computed. Whether a forward draws, or leaves a parameter out, is not known then: in exact
    mode it may. A rule that only a later version has may be used by any program.
    """
    if name == "compile" and not compiles:
        return False
    return exact or name not in RULES or RULES[name].in_fast_mode


def lacking(run: str, there: str, *, exact: bool, compiles: bool) -> dict[str, tuple[str, str]]:
    """The rules of a run that are used and that somebody does not list: name -> (its number, those listed there)."""
    mine, others = parse(run), parse(there)
    found = {}
    for name in sorted(mine.keys() | others.keys()):
        number, offered = mine.get(name, _FIRST)[-1], others.get(name, _FIRST)
        if number not in offered and is_used(name, exact=exact, compiles=compiles):
            found[name] = (str(number), " or ".join(map(str, offered)))
    return found


def kept(run: str) -> str:
    """The rules of a run, as far as this version lists them, and its newest in place of all others."""
    mine, here = parse(run), parse(listed())
    return text_of({name: of if (of := mine.get(name, _FIRST))[-1] in here[name] else here[name][-1:] for name in here})


def renewed(run: str) -> str:
    """As `kept`, but the rules that are refused in part at their last number: where other bits are accepted."""
    found = parse(kept(run))
    return text_of({name: RULES[name].listed[-1:] if RULES[name].refused_in_part else of for name, of in found.items()})


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The differences between the arithmetic of two machines: name -> (before, after), "None" for what is missing."""
    return {
        name: (before.get(name, "None"), after.get(name, "None"))
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    }


def describe(differing: Mapping[str, tuple[str, str]]) -> str:
    """For people: every name with both values."""
    return "; ".join(f"{name}: {mine} in this run, {other} there" for name, (mine, other) in sorted(differing.items()))


def of_machine(arithmetic: Mapping[str, str]) -> dict[str, str]:
    """The facts that workers compare beside the rules: versions, device, threads."""
    return {name: value for name, value in arithmetic.items() if name != KEY}


def recorded(arithmetic: object) -> str:
    """The rules in what a checkpoint, or a journal's entry, keeps of the arithmetic. Raises ValueError if they are none
    that any version writes."""
    text = arithmetic.get(KEY, "") if isinstance(arithmetic, Mapping) else ""
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is no text of rules")
    parse(text)
    return text
