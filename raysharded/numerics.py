"""Named, numbered rules for computing bits, and the numbers that this version supports. Pure.

A run keeps the rules that it began with, as one text: "build 1, compile 1, draws 1, ...". A rule that the text does not
name has the number 1, as in runs and workers older than these rules. A change of a bit that training computes, or of
the sample order, adds a number to the rule that covers it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

KEY = "numerics"
"""Key of the rules in `WorkerInfo.arithmetic`, which workers compare, and in a checkpoint's record of it."""
_FIRST = (1,)
COMPILES_ALL_CODE = 3
"""The first number of the rule `compile` that concerns more than the blocks of `EngineConfig(compile=True)`."""
Numbers: TypeAlias = Mapping[str, tuple[int, ...]]
"""Rule -> its numbers, ascending."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: its subject, and the numbers that this version can compute."""

    covers: str
    listed: tuple[int, ...] = _FIRST
    """Supported numbers, ascending; a new run uses the last. A missing number was dropped: runs under it are
    rejected."""
    refused_in_part: bool = False
    """True if the older numbers are computed only for programs that give the same bits under the last one. Workers
    detect the other programs by trial and reject them. Those continue under the last number once it is accepted."""
    in_fast_mode: bool = False
    """True if the rule also holds with `EngineConfig(reduction="fast")`, which promises the same samples but not the
    same bits: samples, or a format of what the workers exchange."""


RULES: dict[str, Rule] = {
    "build": Rule(
        "the first weights and persistent buffers, drawn from the run's seed, whole or a module at a time, then "
        "sharded; and other random state that constructors keep: drawn anew in each build (1), or once, from a seed, "
        "in the build that creates the first weights (2)",
        listed=(1, 2),
        refused_in_part=True,
    ),
    "compile": Rule(
        "the shapes for which code is compiled: each separately in the blocks of `EngineConfig(compile=True)` (2), or "
        "also in code that the program itself compiles (3); other code for dynamic shapes from the second on, and not "
        "at all after eight, in each worker's order",
        listed=(2, 3),
    ),
    "draws": Rule(
        "the state of the process's generators in a loss, in its backward and in an evaluation, from the seed, the "
        "step and the microbatch: torch's only (1), or NumPy's and Python's, too (2); and in the callbacks of a "
        "`Trainer` with which a step or an epoch begins, from the step (3), or what the loop left (2)",
        listed=(1, 2, 3),
    ),
    "modes": Rule(
        "training or evaluation mode of the modules in each forward, torch's deterministic algorithms and other "
        "settings of the process, and the dtypes of mixed precision: all modules are in train mode, and settings "
        "that `build_model` changed stay (1), or frozen parts that it left in eval mode stay so, and settings are "
        "restored (2); modes that a loop sets between its microbatches and an evaluation hold, too (3)",
        (1, 2, 3),
    ),
    "numbers": Rule(
        "the step's loss and metrics from those of its microbatches: added along a tree (1, 2), or exactly and rounded "
        "once (3); the gradient's norm, clipping and scaling, the learning rate, and the optimizer's inputs",
        (1, 2, 3),
        in_fast_mode=True,
    ),
    "order": Rule(
        "the sample at each position, and the positions of each microbatch: a permutation of all samples (1), or, for "
        "data in blocks, which only `TokenDataset` has by itself, blocks and then a window (2)",
        (1, 2),
        in_fast_mode=True,
    ),
    "reduce": Rule("the tree that adds the gradients of the microbatches, and the dtype of the sums"),
    "unused": Rule(
        "the gradient of a parameter that some, or all, microbatches of a step do not use",
        (1, 2),
    ),
}
"""Rules by name; only tests change this mapping."""


def parse(text: str) -> dict[str, tuple[int, ...]]:
    """The rules that a text names, with their numbers. Raises ValueError for a text that `text_of` cannot produce."""
    found: dict[str, tuple[int, ...]] = {}
    for part in text.split(", ") if text else ():
        name, *numbers = part.split(" ")
        if not name or not numbers or name in found or not all(n.isascii() and n.isdigit() for n in numbers):
            raise ValueError(f'{text!r} is invalid: {part!r} is not a new rule and its numbers, as in "order 1"')
        found[name] = tuple(sorted(map(int, numbers)))
    return found


def text_of(numbers: Numbers) -> str:
    """The rules as one text, sorted by name.

    Law: parse(text_of(n)) == n for sorted numbers.
    """
    return ", ".join(f"{name} {' '.join(map(str, of))}" for name, of in sorted(numbers.items()))


def listed() -> str:
    """All rules and numbers that this version supports, as a worker reports them."""
    return text_of({name: rule.listed for name, rule in RULES.items()})


def newest() -> str:
    """The rules of a new run, as text."""
    return text_of({name: rule.listed[-1:] for name, rule in RULES.items()})


def whole(text: str) -> str:
    """A run's rules, completed with all rules that this version knows; missing ones have the number 1."""
    return text_of({**dict.fromkeys(RULES, _FIRST), **parse(text)})


def number_of(text: str, name: str) -> int:
    """The number of a rule in a run's text."""
    return parse(text).get(name, _FIRST)[-1]


def is_used(name: str, number: int, *, exact: bool, compiles: bool) -> bool:
    """True if a program with these engine settings depends on this number of a rule.

    The answer is given before anything is computed. Whether a forward draws random numbers, omits a parameter or calls
    code that the program compiles is then unknown, so in exact mode it is assumed to. Any program may use a rule that
    only a later version has.
    """
    if name == "compile" and number < COMPILES_ALL_CODE and not compiles:
        return False
    return exact or name not in RULES or RULES[name].in_fast_mode


def lacking(run: str, there: str, *, exact: bool, compiles: bool) -> dict[str, tuple[str, str]]:
    """The rules that a run uses at a number missing `there`: name -> (the run's number, the numbers listed there)."""
    mine, others = parse(run), parse(there)
    found = {}
    for name in sorted(mine.keys() | others.keys()):
        number, offered = mine.get(name, _FIRST)[-1], others.get(name, _FIRST)
        if number not in offered and is_used(name, number, exact=exact, compiles=compiles):
            found[name] = (str(number), " or ".join(map(str, offered)))
    return found


def kept(run: str) -> str:
    """The rules of a run that this version supports; the next higher number, or the newest, replaces each other one."""
    mine = parse(run)
    return text_of({name: (_nearest(mine.get(name, _FIRST)[-1], here),) for name, here in parse(listed()).items()})


def _nearest(number: int, supported: tuple[int, ...]) -> int:
    return next((one for one in supported if one >= number), supported[-1])


def renewed(run: str) -> str:
    """As `kept`, but with the last number of the rules refused in part: for a run that accepts other bits."""
    found = parse(kept(run))
    return text_of({name: RULES[name].listed[-1:] if RULES[name].refused_in_part else of for name, of in found.items()})


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Differences between the arithmetic of two machines: name -> (before, after), "None" for a missing value."""
    return {
        name: (before.get(name, "None"), after.get(name, "None"))
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    }


def describe(differing: Mapping[str, tuple[str, str]]) -> str:
    """Text for people: every name with both values."""
    return "; ".join(f"{name}: {mine} in this run, {other} there" for name, (mine, other) in sorted(differing.items()))


def of_machine(arithmetic: Mapping[str, str]) -> dict[str, str]:
    """The facts that workers compare besides the rules: versions, device, threads."""
    return {name: value for name, value in arithmetic.items() if name != KEY}


def recorded(arithmetic: object) -> str:
    """The rules in the arithmetic that a checkpoint or a journal entry records. Raises ValueError for a text that no
    version writes."""
    text = arithmetic.get(KEY, "") if isinstance(arithmetic, Mapping) else ""
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is an invalid text of rules")
    parse(text)
    return text
