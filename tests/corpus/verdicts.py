"""The verdict on a row of the corpus: equal at every size and right beside plain torch, or refused in these words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from raysharded.errors import RayshardedError, text_of
from tests.corpus.plain import Plain, in_plain_torch
from tests.corpus.program import Program
from tests.corpus.rows import Row
from tests.corpus.runs import Ran, Size, run
from tests.corpus.variants import Variant

Outcome = Literal["equal", "refused", "WRONG", "FALSE ALARM", "NOT REFUSED", "OTHER WORDS", "BROKEN"]
"""Failures are in capitals. WRONG: other bits at another size, or other numbers than plain torch's. BROKEN: it ended
with an error that is not raysharded's, or a step that was computed again gave other numbers."""
SIZES = (Size(workers=1), Size(workers=3), Size(workers=3, is_killed=True))
FEWER = SIZES[::2]
"""Sizes of a short trial, and of separate workers: each of those takes as long to start as a hundred forked ones."""
RESUMED = (Size(workers=1, then=1), Size(workers=3, then=1), Size(workers=1, then=3))
"""Sizes of a program in two parts; the last two are those of a short trial."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of a row, and its reason."""

    row: str
    outcome: Outcome
    why: str

    @property
    def is_right(self) -> bool:
        """True if it is the row's expected result."""
        return self.outcome in ("equal", "refused")


def verdict(row: Row, program: Program, *, is_short: bool = False) -> Verdict:
    """Train the program at each size, and compare. `is_short`: not at three workers that nothing happens to."""
    ran: dict[str, Ran] = {}
    refusals: dict[str, str] = {}
    for size in _sizes_of(row, program, is_short):
        if refusals and size.is_killed:
            break  # it ends before the kill
        try:
            ran[_name(size)] = run(program, size, separate=row.separate)
        except RayshardedError as error:
            refusals[_name(size)] = text_of(error)
        except Exception as error:  # noqa: BLE001 - one row reports it, and the others are tried
            why = f"at {_name(size)}: {type(error).__name__}: {first_line(text_of(error))}"
            return Verdict(row=row.name, outcome="BROKEN", why=why)
    if refusals:
        return _of_refusal(row, refusals, ran)
    if row.is_refused:
        return Verdict(
            row=row.name, outcome="NOT REFUSED", why=f"expected {row.words!r}; it {wrong(ran) or 'is equal'}"
        )
    found = wrong(ran) or _beside(next(iter(ran.values())), program)
    if found:
        return Verdict(row=row.name, outcome="WRONG", why=found)
    return Verdict(row=row.name, outcome="equal", why=f"{len(ran)} runs")


def _sizes_of(row: Row, program: Program, is_short: bool) -> Sequence[Size]:
    if program.then is not None:
        return RESUMED[1:] if is_short else RESUMED
    if row.separate and row.is_refused:  # one worker alone cannot show the cause of that refusal
        return (Size(workers=2),) if is_short else SIZES[1:2]
    return FEWER if row.separate or (is_short and not row.words) else SIZES


def verdict_varied(name: str, variant: Variant, program: Program) -> Verdict:
    """Train the program otherwise, and compare the bits at the variant's sizes, or with those that it has as it is."""
    ran: dict[str, Ran] = {}
    try:
        if variant.as_usual:
            ran["as it is"] = run(program, Size(workers=1))
        for size in variant.sizes:
            ran[_name(size)] = run(variant.change(program), size)
    except RayshardedError as error:
        return Verdict(row=name, outcome="FALSE ALARM", why=first_line(text_of(error)))
    except Exception as error:  # noqa: BLE001 - as above
        return Verdict(row=name, outcome="BROKEN", why=f"{type(error).__name__}: {first_line(text_of(error))}")
    found = wrong(ran)
    return Verdict(row=name, outcome="WRONG" if found else "equal", why=found or f"{len(ran)} runs")


def _name(size: Size) -> str:
    return str(size) if size.then is None else f"{size}, then {size.then}"


def _of_refusal(row: Row, refusals: Mapping[str, str], ran: Mapping[str, Ran]) -> Verdict:
    def found(outcome: Outcome, why: str) -> Verdict:
        return Verdict(row=row.name, outcome=outcome, why=why)

    said = "; ".join(dict.fromkeys(first_line(text) for text in refusals.values()))
    if not row.words:
        where = "" if not ran else f"at {', '.join(refusals)} and not at {', '.join(ran)}: "
        return found("FALSE ALARM", where + said)
    if ran:
        return found("NOT REFUSED", f"at {', '.join(ran)}; at {', '.join(refusals)}: {said}")
    if not all(any(part in text for part in row.words.split("|")) for text in refusals.values()):
        return found("OTHER WORDS", f"expected {row.words!r}: {said}")
    return found("refused", said)


def first_line(text: str, most: int = 300) -> str:
    """The text's first line, cut."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= most else line[:most] + " ..."


def wrong(ran: Mapping[str, Ran]) -> str:
    """The first number that differs, of runs whose bits are not those of the first."""
    (first, expected), *others = ran.items()
    return "; ".join(
        f"{name} and {first} differ {_where(expected, other)}" for name, other in others if other.bits != expected.bits
    )


def _where(one: Ran, other: Ran) -> str:
    for step, (numbers, others) in enumerate(zip(one.numbers, other.numbers, strict=False), 1):
        for name, number in numbers.items():
            if repr(number) != repr(others.get(name)):
                return f"in step {step}: {name} {others.get(name)} for {number}"
    for name, tensor in one.weights.items():
        if name not in other.weights or not torch.equal(tensor, other.weights[name]):
            return f"at the end: {name}"
    return "in what the optimizer keeps"


def _beside(ran: Ran, program: Program) -> str:
    try:
        plain = in_plain_torch(program)
    except Exception as error:  # noqa: BLE001 - with any error the row is not equal to it
        return f"plain torch raises {type(error).__name__}: {first_line(text_of(error))}"
    return beside_plain(ran, plain, program.tolerance)


def beside_plain(ran: Ran, plain: Plain, tolerance: float) -> str:
    """The numbers and tensors that are further from plain torch's than the tolerance: the first of each kind."""
    kept = plain.kept if plain.kept is not None else ran.kept
    found = [
        _further("loss", [n["loss"] for n in ran.numbers], plain.losses, tolerance),
        _further("gradient_norm", [n["gradient_norm"] for n in ran.numbers], plain.norms, tolerance),
        _further(
            "evaluation's loss",
            [n["evaluation"]["loss"] for n in ran.numbers if n.get("evaluation")],
            plain.evaluations,
            tolerance,
        ),
        next(_further_tensors(ran.weights, plain.weights, tolerance, plain.without_gradient), ""),
        next(_further_tensors(_loose(ran.kept), _loose(kept), tolerance, plain.without_gradient), ""),
    ]
    return "not plain torch's: " + "; ".join(filter(None, found)) if any(found) else ""


def _loose(kept: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Counters are numbers or tensors, of any dtype."""
    return {name: one.double().reshape(()) if one.numel() == 1 else one for name, one in kept.items()}


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _further(name: str, numbers: Sequence[float], expected: Sequence[float], tolerance: float) -> str:
    if len(numbers) != len(expected):
        return f"{len(numbers)} numbers of {name} for {len(expected)}"
    for step, (number, other) in enumerate(zip(numbers, expected, strict=True), 1):
        if not abs(number - other) <= tolerance * max(abs(number), abs(other)):
            return f"{name} {step}: {number} for {other}"
    return ""


def _further_tensors(
    tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float, but: Sequence[str]
) -> Iterator[str]:
    """`but`: the parameters whose values, and optimizer state, are not compared."""
    yield from (f"{name} is not in the checkpoint" for name in expected if name not in tensors)
    for name, tensor in tensors.items():
        if name not in expected:
            yield f"{name} is not in plain torch's state"
        elif tensor.shape != expected[name].shape or tensor.dtype != expected[name].dtype:
            yield f"{name} is {_form(tensor)} for {_form(expected[name])}"
        elif tensor.numel() and name not in but and name.rpartition(".")[0] not in but:
            size = expected[name].double().abs().max()
            furthest = (tensor.double() - expected[name].double()).abs().max()
            if not furthest <= tolerance * size:
                yield f"{name} is {float(furthest / size):.1e} of its largest from it"
