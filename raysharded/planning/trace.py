"""What forward and backward of one microbatch keep alive, unit by unit. Pure: `tracing.measurement` makes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from raysharded.errors import ConfigError

OUTSIDE = -1
"""The unit of what happens outside the model: the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A stretch of forward or backward in which one unit computes.

    Bytes are of everything but parameters, buffers and the gradients of units that are done; those of the unit at hand
    and of the root are in them.
    """

    unit: int
    """Its place in `ModelShapes.units`; OUTSIDE for the loss."""
    backward: bool
    start: int
    peak: int
    end: int
    ends_unit: bool = False
    """Whether the unit's gradients are complete with it, and reduced now; those of the others at backward's end."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trace:
    """Forward and backward of one microbatch."""

    phases: tuple[Phase, ...]
    flops: float
    """Of both, with what is computed twice under activation checkpointing."""
    tensor_bytes: int = 0
    """What a worker sends to the others of its tensor parallel group, in both."""

    @property
    def peak(self) -> int:
        """Bytes; the most that is alive at once."""
        return max((phase.peak for phase in self.phases), default=0)


def repeat_unit(trace: Trace, unit: int, times: int, flops_of_unit: float) -> Trace:
    """The trace of a model in which the unit stands `times` times in a row instead of once.

    For models of many equal blocks, of which few were measured. What the unit leaves for backward is left that many
    times. Raises ConfigError unless the unit has one phase in forward and one in backward.
    """
    forward = [p for p in trace.phases if p.unit == unit and not p.backward]
    backward = [p for p in trace.phases if p.unit == unit and p.backward]
    if len(forward) != 1 or len(backward) != 1:
        raise ConfigError(f"unit {unit} has {len(forward)} forward and {len(backward)} backward phases; need one each.")
    kept, more = forward[0].end - forward[0].start, times - 1
    phases: list[Phase] = []
    past = False
    for phase in trace.phases:
        if phase is forward[0]:
            phases += [_moved(phase, unit + i, kept * i) for i in range(times)]
            past = True
        elif phase is backward[0]:
            phases += [_moved(phase, unit + i, kept * i) for i in reversed(range(times))]
            past = False
        else:
            phases.append(_moved(phase, phase.unit + (more if phase.unit > unit else 0), kept * more if past else 0))
    return Trace(phases=tuple(phases), flops=trace.flops + more * flops_of_unit)


def _moved(phase: Phase, unit: int, by: int) -> Phase:
    return replace(phase, unit=unit, start=phase.start + by, peak=phase.peak + by, end=phase.end + by)


def empty_trace(num_units: int) -> Trace:
    """Units in turn, the root around them, without activations: for what follows from the parameters alone."""
    inner, root = range(num_units - 1), num_units - 1

    def phase(unit: int, *, backward: bool, ends_unit: bool = False) -> Phase:
        return Phase(unit=unit, backward=backward, start=0, peak=0, end=0, ends_unit=ends_unit)

    phases = [phase(unit, backward=False) for unit in (root, *inner, OUTSIDE)]
    phases.append(phase(root, backward=True))
    phases += [phase(unit, backward=True, ends_unit=True) for unit in reversed(inner)]
    return Trace(phases=(*phases, phase(root, backward=True)), flops=0.0)
