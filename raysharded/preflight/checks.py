"""The checks, in sequence, within a time limit: needs, two builds, one worker, two workers, a loss."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from raysharded.data.outlook import outlook
from raysharded.display.quantities import count, duration
from raysharded.errors import InexactError, RayshardedError, TaskError, text_of
from raysharded.ids import WorkerId
from raysharded.preflight import builds, requirements
from raysharded.preflight.fresh_process import FreshProcess, NotImportable
from raysharded.preflight.remarks import prepare, quiet, remarks_in
from raysharded.preflight.requirements import Needs, Shape
from raysharded.preflight.results import Check, Report
from raysharded.preflight.small_run import Device, Small
from raysharded.preflight.trial_runs import COMPARED, Training, difference, train
from raysharded.run.listeners import untested_versions, versions
from raysharded.task import TrainFunction
from raysharded.testing.faults import Fault, FaultPlan
from raysharded.validation import is_int, require, require_number

if TYPE_CHECKING:
    from raysharded.run.spec import RunSpec

Listener: TypeAlias = Callable[[Needs | Check], None]
STEPS = 3
TIMEOUT_S = 600.0
_FEWEST_STEPS = 2
_HASH_SEEDS = (1, 2)
_BUILDS, _ALONE, _AUDITED, _KILLED = "two builds", "1 worker", "2 workers, audited", "2 workers, one killed"
_COMPARED = (*COMPARED, "metrics", "evaluation")
_UNKNOWN_OF_A_LOOP = "a training function builds its model when it is called: its memory cannot be planned"
_ADVICE = (
    "Look in the task, or the training function, and its data for what depends on the number of workers or on the "
    "process: the rank or the world size, process ids, the environment, files that are written, what is kept from call "
    "to call."
)


def check(
    spec: RunSpec,
    *,
    steps: int = STEPS,
    device: Device | None = None,
    timeout_s: float = TIMEOUT_S,
    listen: Listener | None = None,
) -> Report:
    """Test a run, as `ElasticTrainer.check` describes. `listen` is called with the needs, then with every check."""
    enough = is_int(steps) and steps >= _FEWEST_STEPS
    require(enough, f"check: steps={steps!r}: give a whole number of {_FEWEST_STEPS} or more.")
    require(device in (None, "cpu"), f"check: device={device!r}: give 'cpu', or None for the trainer's device.")
    require_number("check", "timeout_s", timeout_s, 0, above=True)
    began = time.monotonic()
    try:
        with ExitStack() as ending:
            ending.enter_context(quiet())
            folder = ending.enter_context(tempfile.TemporaryDirectory(prefix="raysharded-check-"))
            if isinstance(spec.task, TrainFunction):  # it may have no more
                steps = min(steps, max(_FEWEST_STEPS, spec.run.max_steps))
            small = Small(spec=spec, folder=folder, steps=steps, device=device, timeout_s=timeout_s)
            checking = _Checking(small, began + timeout_s, listen or (lambda _: None), ending)
            needed = checking.needs()
            checks = tuple(checking.checks())
            repeated = outlook(spec.data, spec.batch, spec.run.max_steps)
            remarks = (*untested_versions(), *repeated, *remarks_in(folder))
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Interrupted. Nothing is left of the check.") from None
    return Report(
        needs=needed,
        checks=checks,
        untried=tuple(small.untried()),
        remarks=remarks,
        versions=versions(),
        took_s=time.monotonic() - began,
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """The result of a check that came to its end."""

    held: str
    differs: str = ""
    """The difference; empty if there is none."""
    advice: str = ""


@dataclass(slots=True)
class _Checking:
    """One check, from beginning to end."""

    small: Small
    deadline: float
    listen: Listener
    ending: ExitStack
    """Ends the processes that the check starts."""
    processes: list[FreshProcess] = field(default_factory=list)
    stopped: Check | None = None
    """A failed check without which the others cannot be run."""
    alone: Training | None = None

    @property
    def is_loop(self) -> bool:
        """True if the run's loop is a user's function: what it builds is known once it runs."""
        return isinstance(self.small.spec.task, TrainFunction)

    # -- its needs --

    def needs(self) -> Needs:
        """Raises ConfigError if the memory or the time is insufficient, or if the task cannot be sent to other
        processes."""
        small, began = self.small, time.monotonic()
        own = small.spec
        if small.use_gpu:
            requirements.require_gpus()
        shape: Shape | None = None
        unknown = ""
        self.processes.append(self.ending.enter_context(FreshProcess(_HASH_SEEDS[0])))
        made = small.made(requirements.WORKERS)
        if self.is_loop:
            unknown = _UNKNOWN_OF_A_LOOP
            data_bytes = self.processes[0].ask(builds.receive, own.task, own.data)
        else:
            asked = (own.task, own.data, small.batch, made.engine, small.use_gpu)
            data_bytes = self.processes[0].ask(requirements.shape_of, *asked)
        try:
            shape = self.processes[0].answer(self.deadline)
        except TimeoutError:
            self.stopped = self._out_of_time(_BUILDS, began)
        except NotImportable:
            raise
        except RayshardedError as error:
            unknown = f"its memory cannot be planned: {_line(error)}"
        found = requirements.needs_of(
            shape, small.batch, steps=small.steps, data_bytes=data_bytes, threads=small.threads, unknown=unknown
        )
        self.listen(found)
        free = None if shape is None else shape.free_device_bytes
        requirements.require_room(found, free if small.use_gpu else None, timeout_s=self.deadline - began)
        return found

    # -- its tests --

    def checks(self) -> Iterator[Check]:
        """All checks, in order."""
        if self.is_loop:
            for process in self.processes:
                process.end()
        for name, act in (
            *(() if self.is_loop else ((_BUILDS, self._builds),)),
            (_ALONE, self._train_alone),
            (_AUDITED, self._train_audited),
            (_KILLED, self._train_with_a_loss),
        ):
            found = self._tried(name, act)
            self.listen(found)
            yield found

    def _tried(self, name: str, act: Callable[[], _Found]) -> Check:
        if self.stopped is not None:
            if self.stopped.name == name:
                return self.stopped
            why = "the time is over" if self.stopped.status == "not tried" else f"{self.stopped.name!r} was refused"
            return Check(name=name, status="not tried", found=why)
        began = time.monotonic()
        try:
            if began > self.deadline:
                raise TimeoutError
            got = act()
        except TimeoutError:
            self.stopped = self._out_of_time(name, began)
            return self.stopped
        except (RayshardedError, OSError) as error:
            traceback = error.user_traceback if isinstance(error, TaskError) else ""
            found = Check(
                name=name, status="refused", found=_line(error), took_s=_since(began), user_traceback=traceback
            )
            self.stopped = found
            return found
        if got.differs:
            return Check(name=name, status="differs", found=got.differs, advice=got.advice, took_s=_since(began))
        return Check(name=name, status="ok", found=got.held, took_s=_since(began))

    def _out_of_time(self, name: str, began: float) -> Check:
        found = f"not done within {duration(self.small.timeout_s)}"
        advice = "Give it more time (--timeout), fewer --steps, or settings of a smaller model."
        return Check(name=name, status="not tried", found=found, advice=advice, took_s=_since(began))

    def _builds(self) -> _Found:
        small = self.small
        self.processes.append(self.ending.enter_context(FreshProcess(_HASH_SEEDS[1])))
        task, engine = small.spec.task, small.spec.engine
        for process in self.processes:
            process.ask(builds.build_of, task, engine, small.threads, small.batch.seed)
        found = [process.answer(self.deadline) for process in self.processes]
        for process in self.processes:
            process.end()  # their memory is for the workers
        held = f"the same in two fresh processes: {found[0].summary}"
        return _Found(held, builds.difference(type(task).__name__, found))

    def _train_alone(self) -> _Found:
        self.alone = self._train(self.small.made(1))
        steps = count(len(self.alone.steps), "step")
        return _Found(f"{steps}: the start checks, the trial of the optimizer and the proof of the first step hold")

    def _train_audited(self) -> _Found:
        found = self._train(self.small.made(requirements.WORKERS, audited=True))
        if not found.audits:
            raise InexactError("no step was audited")
        held = f"the same losses, gradient norms, samples and weights, and {count(found.audits, 'step')} computed twice"
        return _Found(held, self._difference(found), _ADVICE)

    def _train_with_a_loss(self) -> _Found:
        step = self.small.steps // 2 + 1
        kill = Fault(worker=WorkerId(1), step=step, phase="backward")
        plan = FaultPlan(faults=(kill,), folder=self.small.folder)
        found = self._train(self.small.made(requirements.WORKERS, faults=plan))
        if not plan.fired(kill):
            raise InexactError(
                f"worker 1 was to be killed in the backward of step {step}, and computed nothing there: give data of "
                "two microbatches or more"
            )
        held = f"killed in the backward of step {step}, and replaced: the same numbers"
        return _Found(held, self._difference(found), _ADVICE)

    def _difference(self, found: Training) -> str:
        assert self.alone is not None
        return difference(self.alone, found, _COMPARED)

    def _train(self, spec: RunSpec) -> Training:
        first = prepare(self.small.folder, use_gpu=self.small.use_gpu)
        return train(spec, max(0.0, self.deadline - time.monotonic()), first)


def _since(began: float) -> float:
    return time.monotonic() - began


def _line(error: BaseException) -> str:
    return " ".join(text_of(error).split())
