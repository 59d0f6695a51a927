"""Each mistake in a loop ends with one sentence that names it and the way out, or with equal bits."""

from __future__ import annotations

import contextlib
import math
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce

import raysharded as rs
from raysharded.actors.session.own_collectives import refuse_groups
from raysharded.actors.session.user_session import Session
from raysharded.errors import ConfigError, InexactError, RayshardedError, TaskError
from raysharded.run.group_planner import GroupPlanner
from raysharded.task import TrainFunction
from tests.cases import tried_each_time
from tests.session import loops
from tests.session.loops import Average, Loop, by_task, compute, optimizer_of, run, schedule
from tests.training.harness import Gpt, Tokens, samples

STEPS = 3
NORMS = {"-1.0": -1.0, "0.0": 0.0, "nan": math.nan}
FILE, LOOP = re.escape(__file__), re.escape(loops.__file__)


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """The loop of the tests with one mistake in it."""

    kind: str = ""

    def __call__(self, session: Session) -> None:
        kind = self.kind
        if kind == "raises early":
            raise ValueError("no such file")
        if kind == "returns early":
            return
        if kind == "rank before shard":
            _ = session.rank
        if kind == "makes a group":
            dist.init_process_group("gloo")
        if kind == "shards what it built itself":
            own = Gpt()
            session.shard(own, optimizer_of(own))
        model = session.build(Gpt)
        if kind == "builds twice":
            session.build(Gpt)
        optimizer = optimizer_of(Gpt() if kind == "another model" else model)
        if kind == "holds a parameter":
            first = next(model.parameters())
            optimizer.register_step_post_hook(lambda *_: first.data.clamp_(-1, 1))  # type: ignore[arg-type]
        if kind == "part of the model":
            optimizer = torch.optim.AdamW([next(model.parameters())])
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        average = Average()
        more: dict[str, Any] = {"parallelize": dict} if kind == "tensor parallel" else {}
        if kind == "registers a tensor":
            more["weights"] = nn.Linear(3, 3)
        if kind == "a name that is taken":
            more["log"] = average
        if kind == "gradient before shard":
            session.gradient(lambda batch: model(batch).sum())
        if kind == "log before a step":
            session.log(one=1.0)
        if kind == "stop before a step":
            session.stop()
        if kind == "steps before shard":
            next(session.steps())
        session.shard(
            nn.Sequential(model) if kind == "wraps the model" else model,
            optimizer,
            scheduler=None if kind == "not registered" else scheduler,
            average=average,
            **more,
        )
        if kind == "evaluates before a step":
            session.evaluate(lambda batch: model(batch[:, :-1]).sum(), Tokens(4))
        if kind == "forward before a step":
            _ = session.rank, model(torch.zeros(1, 8, dtype=torch.int64))
        if kind == "updates before a step" and session.rank >= 0:
            optimizer.step()
        if kind == "schedule behind shard":
            session.late = torch.optim.lr_scheduler.StepLR(optimizer, 2)  # type: ignore[attr-defined]
        if kind == "shards twice":
            session.shard(model, optimizer)
        scaler = torch.amp.GradScaler("cpu")
        for step in session.steps():
            if kind == "no with":
                continue
            if kind == "step outside":
                optimizer.step()
            if kind == "microbatches outside":
                list(step.microbatches())
            with step:
                if kind == "step first":
                    optimizer.step()
                if kind == "loss first":
                    _ = step.loss
                if kind == "clips first":
                    step.clip_grad_norm_(0.7)
                if kind == "no microbatches":
                    continue
                for batch in step.microbatches():
                    if kind == "raises":
                        raise KeyError("tokens")
                    if kind == "no backward":
                        continue
                    if kind == "metrics alone":
                        step.backward(model(batch[:, :-1]).sum(), metrics={"one": (1, 1)})
                    if kind == "not a loss":
                        step.backward(model(batch[:, :-1]))
                    if kind == "comes to depend on the rank":
                        step.backward(model(batch[:, :-1]).sum() * (1 + session.rank * (step.number > 1)))
                        continue
                    if kind == "depends on the rank":
                        step.backward(model(batch[:, :-1]).sum() * (1 + session.rank))
                        continue
                    if kind == "calls backward itself":
                        model(batch[:, :-1]).sum().backward()
                        continue
                    if kind == "scales the loss":
                        step.backward(scaler.scale(model(batch[:, :-1]).mean()))
                        continue
                    compute(step, model, batch)
                    if kind == "two backwards":
                        compute(step, model, batch)
                    if kind == "leaves the microbatches":
                        break
                if kind == "clips with torch":
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                if kind == "changes a gradient":
                    next(model.parameters()).grad.mul_(0.5)  # type: ignore[union-attr]
                if kind == "scales the loss":
                    scaler.step(optimizer)
                if kind == "two loops":
                    for batch in step.microbatches():
                        compute(step, model, batch)
                step.clip_grad_norm_(NORMS.get(kind.removeprefix("clips to "), 0.7))
                if kind == "no step":
                    continue
                if kind == "invalid rate":
                    optimizer.param_groups[1]["lr"] = -0.1
                if kind == "rank's own rate in the step":  # the scheduler sets it again
                    optimizer.param_groups[1]["lr"] *= 1 + session.rank
                if kind == "rank's own decay in a hook" and step.number == 1:
                    optimizer.register_step_pre_hook(
                        lambda one, *_: one.param_groups[1].update(weight_decay=0.1 + session.rank)
                    )
                optimizer.step()
                if kind == "rank's own decay in a hook":
                    optimizer.param_groups[1]["weight_decay"] = 0.0
                if kind == "two steps":
                    optimizer.step()
                if kind == "adds up in a step":
                    dist.all_reduce(torch.ones(1))
                if kind == "adds up on one worker" and session.rank == 1:
                    dist.all_reduce(torch.ones(1), group=cast(Any, model).norm.weight.device_mesh.get_group())
                for _ in range(dist.get_world_size() if kind == "schedules by the number of workers" else 0):
                    scheduler.step()
                if kind == "rank's own end" and session.rank == 0:
                    session.stop()
                if kind == "rank's own schedule" and session.rank == 1:
                    scheduler.step()
                scheduler.step()
                if kind == "rank's own state":
                    average.add(float(session.rank))
                if kind == "grows":
                    average.value = "x" * 70_000  # type: ignore[assignment]
                if kind == "becomes strange":
                    average.value = object()  # type: ignore[assignment]
            if kind == "parameter outside":
                with torch.no_grad():
                    next(model.parameters()).clamp_(-0.01, 0.01)
            if kind == "schedule outside":
                scheduler.step()
            if kind == "adds up between steps":
                all_reduce(torch.ones(1))
            if kind == "reads a rank of torch's" and dist.get_rank() == 0:
                _ = step.loss
            if kind == "state outside":
                average.add(step.loss)
            if kind == "enters again":
                with step:
                    pass
            if kind == "returns":
                return


# A sentence names a line of the loop if one leads to the error. None does for these: "returns early" and "returns",
# as the function is over; "part of the model", which is found as the workers form; "depends on the rank" and "comes to
# depend on the rank", of which bits alone are known; and "rank's own ...", where sums over the workers differ.
MISTAKES: list[tuple[str, int, type[RayshardedError], str]] = [
    ("raises early", 1, TaskError, FILE + r":\d+: Mistake raised ValueError: no such file"),
    ("returns early", 1, TaskError, r"returned without session\.shard\(model, optimizer\) and a loop over"),
    ("rank before shard", 1, TaskError, FILE + r":\d+: session\.rank is known after session\.shard"),
    ("shards what it built itself", 1, TaskError, FILE + r":\d+: session\.shard comes behind session\.build: build"),
    ("wraps the model", 1, TaskError, FILE + r":\d+: session\.shard was given another model than session\.build"),
    ("evaluates before a step", 1, TaskError, FILE + r":\d+: session\.evaluate.* belongs into `with step:`"),
    ("forward before a step", 1, TaskError, FILE + r":\d+: a forward of the model belongs into `with step:`, as it"),
    ("updates before a step", 1, TaskError, FILE + r":\d+: optimizer\.step\(\) belongs into `with step:`"),
    ("builds twice", 1, TaskError, FILE + r":\d+: session\.build was called twice"),
    ("another model", 1, TaskError, FILE + r":\d+: the optimizer has a parameter of shape .* model\.parameters\(\)"),
    (
        "holds a parameter",
        1,
        TaskError,
        FILE + r":\d+: optimizer\..*first.* refers to the parameter 'embedding\.weight'",
    ),
    ("part of the model", 1, TaskError, r"trainable parameters are in no group of the optimizer, first"),
    ("tensor parallel", 1, TaskError, FILE + r":\d+: session\.shard\(parallelize=\.\.\.\).*Leave the degree at 1"),
    (
        "registers a tensor",
        1,
        TaskError,
        FILE + r":\d+: .*a Tensor of shape \[3, 3\] at weights\.weight: it must be plain data",
    ),
    ("a name that is taken", 1, TaskError, FILE + r":\d+: session\.shard\(log=\.\.\.\): the name is taken"),
    ("gradient before shard", 1, TaskError, FILE + r":\d+: session\.gradient\(\) comes after session\.shard"),
    ("log before a step", 1, TaskError, FILE + r":\d+: session\.log\(\) belongs into `with step:`"),
    ("stop before a step", 1, TaskError, FILE + r":\d+: session\.stop\(\) belongs into `with step:`"),
    ("steps before shard", 1, TaskError, FILE + r":\d+: session\.steps\(\) comes after session\.shard"),
    (
        "not registered",
        1,
        InexactError,
        FILE + r":\d+: a LambdaLR of the optimizer is not registered: .*scheduler=scheduler",
    ),
    (
        "schedule behind shard",
        1,
        InexactError,
        FILE + r":\d+: a StepLR of the optimizer is not registered: .*ahead of session\.shard",
    ),
    ("shards twice", 1, TaskError, FILE + r":\d+: session\.shard is called once"),
    ("no with", 1, TaskError, FILE + r":\d+: step 1 was not entered: write `with step:` around the body"),
    ("step outside", 1, TaskError, FILE + r":\d+: optimizer\.step\(\) belongs into `with step:`"),
    ("microbatches outside", 1, TaskError, FILE + r":\d+: step\.microbatches\(\) belongs into `with step:`"),
    ("step first", 1, TaskError, FILE + r":\d+: optimizer\.step\(\) belongs behind the loop over step\.microbatches"),
    ("loss first", 1, TaskError, FILE + r":\d+: step\.loss is known once all workers have computed"),
    ("clips first", 1, TaskError, FILE + r":\d+: step\.clip_grad_norm_\(\) belongs between"),
    ("no microbatches", 1, TaskError, FILE + r":\d+: step 1 ended without a whole loop over step\.microbatches\(\)"),
    ("raises", 1, TaskError, FILE + r":\d+: .*step 1, microbatch 0 raised KeyError: 'tokens'"),
    ("no backward", 1, TaskError, FILE + r":\d+: .*microbatch 0: call step\.backward\(loss\) once for each microbatch"),
    ("metrics alone", 1, TaskError, FILE + r":\d+: give step\.backward a summed loss with weight="),
    (
        "not a loss",
        1,
        TaskError,
        FILE + r":\d+: .*microbatch 0 returned a tensor .*call step\.backward\(sum, weight=\.\.\.\)",
    ),
    (
        "two backwards",
        1,
        TaskError,
        LOOP + r":\d+: a forward of the model came behind step\.backward\(loss\)\. Add all losses",
    ),
    (
        "leaves the microbatches",
        1,
        TaskError,
        FILE + r":\d+: step\.clip_grad_norm_\(\) came before the loop over step\.microbatches\(\) has ended.*`break`",
    ),
    *(
        (f"clips to {norm}", 1, TaskError, FILE + rf":\d+: step\.clip_grad_norm_\({norm}\): give a number above 0")
        for norm in NORMS
    ),
    ("two loops", 1, TaskError, FILE + r":\d+: step\.microbatches\(\) was called twice in step 1"),
    ("no step", 1, TaskError, FILE + r":\d+: step 1 ended without optimizer\.step\(\)"),
    ("invalid rate", 1, TaskError, FILE + r":\d+: .*parameter group 1 is -0\.1 in step 1.*give a finite number"),
    ("two steps", 1, TaskError, FILE + r":\d+: optimizer\.step\(\) belongs .* once in each step"),
    ("rank's own end", 2, InexactError, r"step 1: 1 of 2 workers call session\.stop, and the others do not"),
    ("rank's own schedule", 2, InexactError, r"step 1: the optimizer's settings,.* worker 0 has .*, worker 1 "),
    *(
        (
            f"rank's own {what}",
            2,
            InexactError,
            rf"step 1: .* worker 0 has optimizer\[1\]\.{key} = \S+, worker 1 optimizer\[1\]\.{key} = \S+",
        )
        for what, key in (("rate in the step", "lr"), ("decay in a hook", "weight_decay"))
    ),
    (
        "rank's own state",
        2,
        InexactError,
        r"step 1: .*worker 0 has average\.value = 0\.0, worker 1 average\.value = 0\.1",
    ),
    ("grows", 1, TaskError, FILE + r":\d+: .*most of it 'average' .*the limit is 64"),
    ("becomes strange", 1, TaskError, FILE + r":\d+: .*has a object at average\.value: it must be plain data"),
    (
        "schedule outside",
        1,
        InexactError,
        FILE + r":\d+: .*changed between step 1 and the next: .*\(it was .*Move what changes it",
    ),
    (
        "state outside",
        1,
        InexactError,
        FILE + r":\d+: .*(average\.count = 1 \(it was 0\)|average\.value = .*\(it was 0\.0\))",
    ),
    (
        "parameter outside",
        1,
        InexactError,
        FILE + r":\d+: parameters changed between step 1 and the next: .*behind optimizer\.step",
    ),
    (
        "clips with torch",
        2,
        InexactError,
        "^" + FILE + r":\d+: gradients changed between .*clip with step\.clip_grad_norm_",
    ),
    ("changes a gradient", 2, InexactError, FILE + r":\d+: gradients changed between .* in a hook of the optimizer"),
    ("depends on the rank", 2, InexactError, r"step 1: when microbatch \d was computed a second time, to prove"),
    (
        "comes to depend on the rank",
        3,
        InexactError,
        r"step 2: microbatches 0, 1, 2 have another .* when another worker computes them \(workers 0, 1, 2\)",
    ),
    (
        "calls backward itself",
        1,
        InexactError,
        FILE + r":\d+: a gradient .* came while the loss was computed\. call step\.backward\(loss\), once for each",
    ),
    ("scales the loss", 1, TaskError, FILE + r":\d+: a GradScaler changes gradients.*Leave it out"),
    *(
        (
            kind,
            workers,
            TaskError,
            FILE + r":\d+: torch\.distributed\.all_reduce\(\) was called.*step\.loss and step\.metrics",
        )
        for kind, workers in (("adds up in a step", 1), ("adds up on one worker", 2), ("adds up between steps", 1))
    ),
    (
        "schedules by the number of workers",
        2,
        TaskError,
        FILE
        + r":\d+: torch\.distributed\.get_world_size\(\) was called.*the number of workers changes.*num_microbatches",
    ),
    ("reads a rank of torch's", 1, TaskError, FILE + r":\d+: torch\.distributed\.get_rank\(\) .*Read session\.rank"),
    ("makes a group", 1, TaskError, FILE + r":\d+: torch\.distributed\.init_process_group\(\) .*Leave it out"),
    ("enters again", 1, TaskError, FILE + r":\d+: step 1 is over; take the next one from session\.steps"),
    ("returns", 1, TaskError, r"returned before the run's last step: iterate over session\.steps\(\)"),
]


AT_THEIR_CALL = {
    "rank before shard",
    "makes a group",
    "shards what it built itself",
    "builds twice",
    "gradient before shard",
    "log before a step",
    "stop before a step",
    "steps before shard",
    "wraps the model",
    "tensor parallel",
    "shards twice",
    "evaluates before a step",
    "forward before a step",
    "step outside",
    "microbatches outside",
    "step first",
    "loss first",
    "clips first",
    "two loops",
    "clips to -1.0",
    "two steps",
    "adds up in a step",
    "schedules by the number of workers",
    "enters again",
}
OF_OTHERS = {
    "logs early": r"step\.metrics is known once all workers have computed",
    "logs a metric": r"session\.log\(accuracy=\.\.\.\): the step has a metric of this name",
    "logs text": r"was given a str; give a number",
    "forward ahead of the microbatches": r":\d+: a forward of the model came ahead of the microbatches\.",
    "evaluates ahead of the update": r"session\.evaluate\(\) belongs into `with step:`, behind optimizer\.step",
    "evaluates nothing": r":\d+: session\.evaluate\(num_samples=0\): give 1 or more",
}
"""Mistakes whose call raises, which one run makes each time. Alone they are tried before a release."""


class Refused:
    """Makes these mistakes, catches the error of each, and continues."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def _refused(self, kind: str) -> Iterator[None]:
        try:
            yield
        except TaskError as error:
            with (self._folder / kind).open("a", encoding="utf-8") as file:
                file.write(f"{error}\n")
        else:
            raise AssertionError(f"{kind}: no error")

    def __call__(self, session: Session) -> None:
        refused, few = self._refused, samples()[:4]
        with refused("rank before shard"):
            _ = session.rank
        with refused("makes a group"):
            dist.init_process_group("gloo")
        with refused("shards what it built itself"):
            own = Gpt()
            session.shard(own, optimizer_of(own))
        model = session.build(Gpt)
        with refused("builds twice"):
            session.build(Gpt)
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        with refused("gradient before shard"):
            session.gradient(lambda batch: model(batch).sum())
        with refused("log before a step"):
            session.log(one=1.0)
        with refused("stop before a step"):
            session.stop()
        with refused("steps before shard"):
            next(session.steps())
        with refused("wraps the model"):
            session.shard(nn.Sequential(model), optimizer, scheduler=scheduler)
        with refused("tensor parallel"):
            session.shard(model, optimizer, parallelize=dict)
        session.shard(model, optimizer, scheduler=scheduler)
        with refused("shards twice"):
            session.shard(model, optimizer)
        with refused("evaluates before a step"):
            session.evaluate(lambda batch: model(batch[:, :-1]).sum(), few)
        with refused("forward before a step"):
            _ = session.rank, model(torch.zeros(1, 8, dtype=torch.int64))
        for step in session.steps():
            with refused("step outside"):
                optimizer.step()
            with refused("microbatches outside"):
                list(step.microbatches())
            with step:
                with refused("step first"):
                    optimizer.step()
                with refused("loss first"):
                    _ = step.loss
                with refused("clips first"):
                    step.clip_grad_norm_(0.7)
                with refused("logs early"):
                    session.log(early=1.0)
                with refused("forward ahead of the microbatches"):
                    model(torch.zeros(1, 8, dtype=torch.int64))
                for batch in step.microbatches():
                    compute(step, model, batch)
                with refused("two loops"):
                    list(step.microbatches())
                with refused("clips to -1.0"):
                    step.clip_grad_norm_(-1.0)
                with refused("evaluates ahead of the update"):
                    session.evaluate(lambda batch: model(batch[:, :-1]).sum(), few)
                step.clip_grad_norm_(0.7)
                optimizer.step()
                with refused("two steps"):
                    optimizer.step()
                with refused("logs a metric"):
                    session.log(accuracy=1.0)
                with refused("logs text"):
                    session.log(name="text")  # type: ignore[arg-type]
                with refused("evaluates nothing"):
                    session.evaluate(lambda batch: model(batch[:, :-1]).sum(), few, num_samples=0)
                with refused("adds up in a step"):
                    dist.all_reduce(torch.ones(1))
                with refused("schedules by the number of workers"):
                    dist.get_world_size()
                scheduler.step()
            with refused("enters again"), step:
                pass


@pytest.mark.procs
def test_mistakes_that_their_call_refuses_are_named_and_leave_the_run_alone(tmp_path: Path) -> None:
    assert run(1, Refused(tmp_path), steps=4).bits == by_task(4).bits
    sentences = {kind: sentence for kind, _, _, sentence in MISTAKES if kind in AT_THEIR_CALL} | OF_OTHERS
    assert {file.name for file in tmp_path.iterdir()} == sentences.keys() == AT_THEIR_CALL | OF_OTHERS.keys()
    for kind, sentence in sentences.items():
        assert re.search(sentence, (tmp_path / kind).read_text(encoding="utf-8")), kind


BEFORE_A_RELEASE = AT_THEIR_CALL | {
    "clips to 0.0",
    "clips to nan",
    "adds up on one worker",
    "adds up between steps",
    "rank's own schedule",
    "rank's own decay in a hook",
    "rank's own state",
    "changes a gradient",
    "grows",
    "schedule behind shard",
    "schedule outside",
    "updates before a step",
    "reads a rank of torch's",
}
"""These, and mistakes with the sentence of another one that is tried each time, here or without processes."""


def kinds() -> list[Any]:
    assert {kind for kind, *_ in MISTAKES} >= BEFORE_A_RELEASE
    return [
        pytest.param(*mistake, id=mistake[0], marks=[pytest.mark.long] * (mistake[0] in BEFORE_A_RELEASE))
        for mistake in MISTAKES
    ]


@pytest.mark.procs
@pytest.mark.parametrize(("kind", "workers", "error", "sentence"), kinds())
def test_a_mistake_ends_the_run_with_a_sentence_that_names_it(
    kind: str, workers: int, error: type[RayshardedError], sentence: str
) -> None:
    with pytest.raises(error, match=sentence) as found:
        run(workers, Mistake(kind=kind), steps=STEPS)
    assert "raysharded/actors" not in str(found.value)


PACKAGE = "/lib/site-packages/metrics/all.py"


@pytest.mark.parametrize(
    ("module", "file", "call", "error"),
    [
        ("metrics.all", PACKAGE, "dist.get_rank()", ValueError),
        ("metrics.all", PACKAGE, "dist.all_reduce(torch.ones(1))", TaskError),
        ("torchtitan.metrics", "titan/metrics.py", "dist.all_gather_object([], 1)", ValueError),
        ("loop", "loop.py", "dist.get_backend()", ValueError),
        ("loop", "loop.py", "dist.get_rank()", TaskError),
        ("loop", "loop.py", "dist.barrier()", TaskError),
    ],
)
def test_packages_may_read_ranks_and_frameworks_with_an_adapter_may_communicate(
    module: str, file: str, call: str, error: type[Exception]
) -> None:
    """ValueError is torch's, which has no group here: the call has reached it."""
    found: list[BaseException] = []

    def run_function() -> None:
        refuse_groups()
        with pytest.raises(error) as raised:
            eval(compile(call, file, "eval"), {"__name__": module, "dist": dist, "torch": torch})  # noqa: S307 - a call of this test
        found.append(raised.value)

    thread = threading.Thread(target=run_function)
    thread.start()
    thread.join()
    assert [type(one) for one in found] == [error]
    with pytest.raises(ValueError, match="Default process group"):
        dist.get_rank()  # another thread is none of a function


class Hooked(Loop):
    """Clips by the norm of a worker's gradients, in a hook."""

    def __call__(self, session: Session) -> None:
        model = session.build(Gpt)
        optimizer = optimizer_of(model)
        optimizer.register_step_pre_hook(clips_by_norm)
        session.shard(model, optimizer)
        for step in session.steps():
            with step:
                for batch in step.microbatches():
                    compute(step, model, batch)
                optimizer.step()


def clips_by_norm(optimizer: torch.optim.Optimizer, *_: object) -> None:
    torch.nn.utils.clip_grad_norm_([param for group in optimizer.param_groups for param in group["params"]], 0.01)


class Scheduled(Loop):
    """Steps its scheduler in a hook of the optimizer."""

    def __call__(self, session: Session) -> None:
        model = session.build(Gpt)
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        session.shard(model, optimizer, scheduler=scheduler)
        for step in session.steps():
            with step:
                for batch in step.microbatches():
                    compute(step, model, batch)
                optimizer.step()


def without_a_rate(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.param_groups[0]["lr"] = None  # as Adafactor of transformers has with relative_step
    return optimizer


def norm_with_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


class Other:
    """A loop with another model, or optimizer."""

    def __init__(self, make: Callable[[], nn.Module], optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        self._make, self._optimizer = make, optimizer

    def __call__(self, session: Session) -> None:
        model = session.build(self._make)
        session.shard(model, self._optimizer(model.parameters()))


def two_rates(params: Any) -> torch.optim.Optimizer:
    first, *_ = params
    return torch.optim.SGD([first], lr=0.1)


@pytest.mark.procs
@pytest.mark.parametrize(
    ("workers", "loop", "sentence"),
    [
        (2, Hooked(), r"step\.clip_grad_norm_"),
        (1, Scheduled(), r"no rate may change: call scheduler\.step\(\) behind it, in the `with`\."),
        (1, Other(Gpt, without_a_rate), r"has lr=None\. Give it a number; an optimizer"),
        (1, Other(norm_with_statistics, torch.optim.SGD), r"put it in eval\(\) in session\.build\(make\)"),
        (1, Other(Gpt, two_rates), r"add them in the optimizer of session\.shard"),
    ],
    ids=["hook", "scheduler", "no rate", "batch norm", "groups"],
)
def test_errors_speak_of_the_loop_and_not_of_methods_of_a_task(workers: int, loop: Any, sentence: str) -> None:
    with pytest.raises(RayshardedError, match=sentence) as found:
        run(workers, loop, steps=STEPS)
    for word in ("build_model", "build_optimizer", "Task."):
        assert word not in str(found.value)


class Swallowing:
    """Catches all errors in the `with`."""

    def __call__(self, session: Session) -> None:
        model = session.build(Gpt)
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        session.shard(model, optimizer, scheduler=scheduler)
        for step in session.steps():
            with step:
                with contextlib.suppress(Exception):
                    for batch in step.microbatches():
                        with contextlib.suppress(Exception):
                            compute(step, model, batch)
                for act in (partial(step.clip_grad_norm_, 0.7), optimizer.step, scheduler.step):
                    with contextlib.suppress(Exception):
                        act()


SWALLOWED = [(worker, worker + 1, phase) for worker, phase in enumerate(("forward", "backward", "agree", "apply"), 1)]
TWO = [(1, 2, "backward"), (2, 3, "apply")]


@pytest.mark.procs
@pytest.mark.parametrize("kills", tried_each_time([TWO], [TWO, SWALLOWED]))
def test_an_except_that_swallows_the_error_of_a_lost_worker_changes_no_bit(kills: list[tuple[int, int, str]]) -> None:
    steps = len(kills) + 2
    assert run(len(kills) + 1, Swallowing(), kills=kills, steps=steps).bits == by_task(steps).bits


TRAINER: dict[str, Any] = {
    "data": Tokens(),
    "batch": rs.BatchConfig(global_batch_size=8, microbatch_size=2),
    "scaling": rs.ScalingConfig(num_workers=2),
    "run": rs.RunConfig(name="a", storage_path="b", max_steps=1),
}
HELD_OUT = rs.EvalConfig(data=Tokens(), num_samples=4, every_steps=1)
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: rs.ElasticTrainer(**TRAINER), "give exactly one of them, a raysharded.Task or a function"),
    (lambda: rs.ElasticTrainer(task=TrainFunction(print), train_fn=print, **TRAINER), "give exactly one of them"),
    (lambda: rs.ElasticTrainer(train_fn=cast(Any, Mistake), **TRAINER), "a function that is called with the session"),
    (
        lambda: rs.ElasticTrainer(train_fn=print, evaluation=HELD_OUT, **TRAINER),
        "evaluation= needs a raysharded.Task",
    ),
    (
        lambda: rs.ElasticTrainer(
            train_fn=print, **{**TRAINER, "scaling": rs.ScalingConfig(num_workers=2, tensor_parallel_degree=2)}
        ),
        "tensor_parallel_degree=2: .* a train_fn has no tensor parallelism",
    ),
    (
        lambda: GroupPlanner(
            rs.ElasticTrainer(
                train_fn=print, **{**TRAINER, "scaling": rs.ScalingConfig(num_workers=2, memory_per_worker=2**30)}
            ).spec()
        ).check_memory(),
        r"memory_per_worker\) needs a raysharded.Task",
    ),
]


@pytest.mark.parametrize(("make", "sentence"), REFUSED)
def test_a_trainer_refuses_what_a_function_cannot_have(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()
