"""Errors of torch are reported in the words of the task: its act, the remedy, and torch's message at the end."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.actors.task_calls.explanations import explanation, shortened, without_tables
from raysharded.actors.task_calls.task_errors import naming
from raysharded.errors import ConfigError, InexactError, NonFiniteLoss, RayshardedError, TaskError
from raysharded.ids import WorkerId
from tests.cases import tried_each_time
from tests.training import error_tasks as programs
from tests.training.harness import Collector, log_into, make_driver, make_job, make_limits, train

pytestmark = pytest.mark.procs
_LONGEST = 1000
IN_TASK_NUMBERS = pytest.mark.long
"""For errors that `test_task_numbers.py` has, too."""
_OUTSIDE = r"a weight of the model was used outside of the model's forward.*Call model\(\.\.\.\).*weight_decay"


def message_of(task: rs.Task, workers: int = 1, **settings: Any) -> str:
    """The error that a run of it ends with; it is short, and has the user's traceback."""
    settings = {"data": programs.rows(), "steps": 2, "microbatches": 3, **settings}
    with pytest.raises(RayshardedError) as raised:
        train(workers, task=task, **settings)
    error = raised.value
    text = str(error)
    assert len(text) < _LONGEST, text
    assert "fburl" not in f"{text}{getattr(error, 'user_traceback', '')}"
    return f"{type(error).__name__}: {text}"


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (programs.Sparse, r"TaskError: table is an Embedding with sparse=True, .*Leave it out in Sparse\.build_model"),
        (programs.SparseCall, r"sparse gradients cannot be sharded, .*leave out sparse=True \(of .*F\.embedding"),
        (
            programs.OtherMethod,
            r"InexactError: the model was not called in the forward .*Let the loss call model\(\.\.\.\)",
        ),
        (programs.SubmoduleAfter, rf"SubmoduleAfter\.loss in step 1, microbatch 0: {_OUTSIDE}"),
        (programs.Penalty, rf"the backward of Penalty\.loss in step 1, microbatch 0: {_OUTSIDE}"),
        (
            programs.RetainedBackward,
            r"InexactError: a gradient of the parameters of .* came while the loss was computed",
        ),
        (programs.Closure, r"TaskError: LBFGS\.step\(\), tried before the run: it wants a closure .*SGD, Adam, AdamW"),
        (programs.LoneMuon, r"are in no group .*Muon takes matrices alone, .*in exact mode it is refused.*AdamW"),
        (programs.NothingReturned, r"NothingReturned\.build_optimizer returned None: return a torch\.optim\.Optimizer"),
        (programs.AllMuon, r"AllMuon\.build_optimizer: Muon takes matrices alone"),
        (
            programs.Objects,
            r"Unit layers\.\d returns a Bare, in which FSDP2 finds no tensors: return a tensor, .*Task\.wrap",
        ),
        (programs.View, r"The output of unit layers\.\d is a view, and is changed in place .*write x = x \+ y"),
        (programs.RootObject, r"of step 1, microbatch 0 came to none of .*nothing would be .*The model returns a Bare"),
        (
            programs.RootView,
            r"came to none of .*The output of the model is a view, .*in place by the loss",
        ),
        (programs.InputAlone, r"came to none of .*The loss does not depend on what the model returned"),
        (programs.Detached, r"the loss does not depend on any trainable parameter .*return Loss\(total, 0\)"),
        (
            programs.MeanOverNothing,
            r"NonFiniteLoss: .*loss is nan .*a mean over what may be empty, .*return Loss\(sum,",
        ),
        (programs.Large, r"NonFiniteLoss: step 1: the gradient is too large: it is finite in each microbatch.*squares"),
        pytest.param(
            programs.NoRate, r"NoRate\.lr_scale\(1\) returned None, .*give a finite number", marks=IN_TASK_NUMBERS
        ),
        pytest.param(
            programs.TextRate, r"TextRate\.lr_scale\(1\) returned '1', .*give a finite number", marks=IN_TASK_NUMBERS
        ),
        (programs.InPlace, r"a tensor that backward needs was changed in place .*Write\s+x = x \+ y"),
        (programs.Twice, r"microbatch 1: the graph of the loss was freed\. .*detach\(\) it"),
        (
            programs.WrapsList,
            r"ConfigError: WrapsList\.wrap returned a ModuleList, which has no forward.*return the blocks",
        ),
        (programs.WrapRaises, r"TaskError: WrapRaises\.wrap raised KeyError: 'blocks'"),
    ],
)
def test_what_torch_refuses_is_reported_in_words_of_the_task(task: type[rs.Task], words: str) -> None:
    text = message_of(task())
    assert re.search(words, text), text


TOGETHER: dict[type[rs.Task], str] = {
    programs.Submodule: rf"Submodule\.loss in step 1, microbatch \d: {_OUTSIDE}",
    programs.GradientPenalty: r"not gathered for its backward\. A gradient of a gradient \(create_graph=True\)",
    programs.TwoBackwards: r"a gradient of the parameters of .* do not call backward\(\) in it",
}


@pytest.mark.parametrize(
    ("task", "workers"),
    tried_each_time(
        [(programs.GradientPenalty, 2), (programs.TwoBackwards, 1)], [(task, n) for task in TOGETHER for n in (1, 2)]
    ),
)
def test_workers_that_fail_together_end_in_one_message(task: type[rs.Task], workers: int) -> None:
    text, words = message_of(task(), workers), TOGETHER[task]
    assert re.search(words, text), text
    assert text.count("torch's own words") <= 1


@pytest.mark.parametrize("workers", tried_each_time([1], [1, 2]))
def test_a_backward_that_comes_to_no_unit_is_refused_in_fast_mode_too(workers: int) -> None:
    engine = rs.EngineConfig(reduction="fast")
    assert "The model returns a Bare" in message_of(programs.RootObject(), workers, engine=engine)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            programs.WithNone(),
            r"collating microbatch \d of step \d, of samples \d+, \d+, raised .*Sample \d+ is None: leave",
        ),
        (
            programs.Ragged(),
            r"collating microbatch \d of step \d, .*has the shape \(\d,\) and sample \d+ \(\d,\): pad them",
        ),
        (
            {"train": programs.rows()},
            r"dict\[0\] raised at the start: .*'train' is not a dataset: give one of them, \['train'\]",
        ),
    ],
)
def test_samples_are_named_with_the_step_also_beside_an_evaluation(data: Any, words: str) -> None:
    evaluation = rs.EvalConfig(data=programs.rows(), every_steps=1, num_samples=4)
    text = message_of(programs.Regression(), data=data, evaluation=evaluation)
    assert re.search(words, text), text
    assert "evaluation" not in text


def test_samples_of_an_evaluation_are_named_as_such() -> None:
    evaluation = rs.EvalConfig(data=programs.WithNone(), every_steps=1, num_samples=4)
    text = message_of(programs.Regression(), evaluation=evaluation)
    assert "collating microbatch 1 of the evaluation after step 1, of samples 2, 3, raised" in text
    assert "Sample 3 is None" in text


class Breaking(programs.Regression):
    """An optimizer that raises an unexpected error, in every step of a run."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        class Broken(torch.optim.SGD):
            def zero_grad(self, set_to_none: bool = True) -> None:
                raise ZeroDivisionError("nobody foresaw this")

        return Broken(model.parameters(), lr=0.1)


def test_an_unexpected_error_has_its_traceback_once_in_a_log_however_often_it_is_tried(tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = make_job(f"{tmp_path}/run", task=Breaking(), data=programs.rows(), steps=2, microbatches=3)
    limits = make_limits(job, 1, task_error_retries=2)
    with pytest.raises(TaskError, match="ZeroDivisionError: nobody foresaw this"):
        make_driver(job, limits, Collector(), prepare={WorkerId(0): _Logging(str(log))}).run()
    text = log.read_text()
    assert text.count("unexpected error: ZeroDivisionError") == 3, "one line for each try"
    assert text.count("Traceback (most recent call last)") == 1


class _Logging:
    def __init__(self, file: str) -> None:
        self._file = file

    def __call__(self) -> None:
        log_into(self._file)


def test_an_error_that_nobody_knows_is_shown_as_it_is() -> None:
    error = ValueError("blocks must be 3")
    assert explanation(error, "build") is None
    with (
        pytest.raises(TaskError, match=r"^T\.build_model raised ValueError: blocks must be 3$") as raised,
        naming("T.build_model", "build"),
    ):
        raise error
    assert "blocks must be 3" in raised.value.user_traceback
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


@pytest.mark.parametrize(
    "reading",
    [
        lambda param: param.norm().item(),
        lambda param: setattr(param, "data", torch.eye(3)),
        lambda param: param.numpy(),
        lambda param: bool(param.isnan().any()),
        lambda param: param.to("cpu"),
    ],
)
def test_what_a_parameter_without_values_cannot_do_while_the_model_is_built(reading: Callable[[Any], Any]) -> None:
    param = nn.Parameter(torch.empty(3, 3, device="meta"), requires_grad=False)
    with (
        pytest.raises(TaskError, match=r"^T\.build_model: while raysharded builds the model, .*init_weights"),
        naming("T.build_model", "build"),
    ):
        reading(param)


def test_errors_of_raysharded_pass_through() -> None:
    for error in (ConfigError("a"), InexactError("b"), NonFiniteLoss("c")):
        with pytest.raises(type(error)), naming("T.loss", "loss"):
            raise error


def test_tables_of_kernels_are_cut_and_long_words_shortened() -> None:
    with pytest.raises(NotImplementedError) as raised:
        torch.ops.aten.bincount(torch.zeros(3, dtype=torch.int64).to_sparse())
    text = str(raised.value)
    assert len(text) > 2000
    short = without_tables(text)
    assert short.startswith("Could not run 'aten::bincount' with arguments from the 'SparseCPU' backend")
    assert len(short) < 200
    assert without_tables("my words " * 100) == "my words " * 100
    assert len(shortened("my words " * 100)) < 410
