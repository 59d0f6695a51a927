"""Live memory during forward and backward of one microbatch, unit by unit. Pure: `tracing.measurement` creates
traces."""

from __future__ import annotations

from dataclasses import dataclass, replace

from raysharded.errors import ConfigError

OUTSIDE = -1
"""The unit of all computation outside the model: the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """An interval of forward or backward in which one unit computes.

    The bytes exclude parameters, buffers and the gradients of finished units. They include the gradients of the current
    unit and of the root.
    """

    unit: int
    """The unit's index in `ModelShapes.units`; OUTSIDE for the loss."""
    backward: bool
    start: int
    peak: int
    end: int
    ends_unit: bool = False
    """Whether the phase completes the unit's gradients, which are then reduced. Other gradients are reduced at the end
    of backward."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trace:
    """Forward and backward of one microbatch."""

    phases: tuple[Phase, ...]
    flops: float
    """Operations of forward and backward, including recomputation under activation checkpointing."""
    tensor_bytes: int = 0
    """Bytes that a worker sends to the others of its tensor parallel group, in both."""

    @property
    def peak(self) -> int:
        """The peak of live bytes."""
        return max((phase.peak for phase in self.phases), default=0)


def repeat_unit(trace: Trace, unit: int, times: int, flops_of_unit: float) -> Trace:
    """The trace of a model in which the unit occurs `times` times in a row instead of once.

    For models of many equal blocks, of which few were measured. The memory that the unit keeps for backward is
    multiplied. Raises ConfigError unless the unit has one phase in forward and one in backward.
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
    """Units in sequence within the root, without activations: for results that depend on the parameters alone."""
    inner, root = range(num_units - 1), num_units - 1

    def phase(unit: int, *, backward: bool, ends_unit: bool = False) -> Phase:
        return Phase(unit=unit, backward=backward, start=0, peak=0, end=0, ends_unit=ends_unit)

    phases = [phase(unit, backward=False) for unit in (root, *inner, OUTSIDE)]
    phases.append(phase(root, backward=True))
    phases += [phase(unit, backward=True, ends_unit=True) for unit in reversed(inner)]
    return Trace(phases=(*phases, phase(root, backward=True)), flops=0.0)
