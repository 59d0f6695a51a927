"""Short runs on plain processes of this machine, and the comparison of their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from raysharded.errors import RayshardedError
from raysharded.ids import WorkerId
from raysharded.run.local import LocalRun
from raysharded.testing.processes import ProcessLauncher

if TYPE_CHECKING:
    from raysharded.run.spec import RunSpec

COMPARED = ("loss", "gradient_norm", "weight", "digest")


@dataclass(slots=True)
class Training:
    """The numbers of one run."""

    fingerprint: str = ""
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Step -> its journal entry."""
    audits: int = 0
    """Steps that were computed twice with the same bits."""

    def listen(self, kind: str, entry: dict[str, Any]) -> None:
        """Record a journal entry."""
        if kind == "step":
            self.steps[entry["step"]] = dict(entry)
        elif kind == "audit":
            self.audits += 1


def train(spec: RunSpec, timeout_s: float, prepare: Mapping[WorkerId, Callable[[], None]] | None = None) -> Training:
    """Train to the end with processes as workers. `prepare`: as for `ProcessLauncher`.

    Raises the run's error, or TimeoutError; the workers have then exited, too.
    """
    training = Training()
    run = LocalRun(spec, training.listen, launch=partial(ProcessLauncher, prepare=prepare))
    run.begin()
    try:
        training.fingerprint = run.wait(timeout_s).fingerprint
    except BaseException:
        run.stop()
        with suppress(RayshardedError):
            run.wait()
        raise
    return training


def difference(alone: Training, together: Training, compared: Sequence[str] = COMPARED) -> str:
    """The first number that differs between a run at 1 worker and one at 2, and whether the weights differ; empty if
    nothing differs."""
    told = []
    for step in sorted(alone.steps.keys() | together.steps.keys()):
        one, two = alone.steps.get(step, {}), together.steps.get(step, {})
        differing = [name for name in compared if repr(one.get(name)) != repr(two.get(name))]
        if differing:
            name = differing[0]
            told.append(
                f"the {name.replace('_', ' ')} of step {step} is {one.get(name)} at 1 worker and {two.get(name)} at 2"
            )
            break
    if alone.fingerprint != together.fingerprint:
        told.append(
            f"the weights differ: their fingerprint is {alone.fingerprint} at 1 and {together.fingerprint} at 2"
        )
    return "; ".join(told)
