"""Registered state: plain data that comes back with its types, of a limited size, and compared between workers."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from enum import IntEnum, StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from raysharded.actors.optimizer.registered_state import MOST_BYTES, RegisteredState, are_different, values_of, words_of
from raysharded.actors.session.user_session import Session
from raysharded.data.plain_data import plain, restored
from raysharded.errors import TaskError
from raysharded.task import TrainFunction
from tests.actors.optimizer.test_shard_optimizer import Remembers
from tests.session.loops import compute, run
from tests.training.harness import Gpt, Small, make_driver, make_limits
from tests.training.test_checkpoints import Listening, resume, small_job


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def an_optimizer(lr: float | torch.Tensor = 0.1) -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=lr)


PLAIN = [
    *(None, True, 3, -0.0, 1e300, math.inf, "text", 2**70),
    *(np.float32(0.1), np.float64(0.1), np.float16(-0.0), np.int64(-3), np.bool_(True)),
    *([1, [2]], (1, (2.5,)), {"a": 1, "b": {"c": ()}}, {1: "one", (2, "x"): [None]}, Counter({3: 2, 7: 1})),
    *(
        {12: 0.5, 6: 0.25},
        {6: 0.25, 12: 0.5},
        Counter({7: 1, 30: np.int64(1), 4: 1}),
        {"b": [{9: 0, 10: 1}], "a": ({"d": {}, "c": 2},)},
    ),
    *(OrderedDict({"b": 1, "a": 2}), OrderedDict(a=1, b=OrderedDict()), {"b": OrderedDict({2: 0, 1: 1}), "a": {}}),
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_data_comes_back_with_its_types(value: Any) -> None:
    before = RegisteredState([], {"it": Holder(value)}).text()
    other = Holder("other")
    RegisteredState([], {"it": other}).load(before)
    assert repr(other.value) == repr(value)
    assert type(other.value) is type(value)


def test_a_tensor_of_one_number_comes_back_with_its_type() -> None:
    other = Holder(None)
    RegisteredState([], {"it": other}).load(RegisteredState([], {"it": Holder(torch.tensor(0.1))}).text())
    assert torch.equal(other.value, torch.tensor(0.1))


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (torch.ones(2), r"a Tensor of shape \[2\] at it\.value"),
        ([1, object()], r"a object at it\.value\[1\]"),
        ({"x": {"y": lambda: 0}}, r"a function at it\.value\.x\.y"),
        ({3, 4}, r"a set at it\.value"),
    ],
)
def test_what_is_not_plain_is_refused_by_the_way_to_it(value: Any, named: str) -> None:
    with pytest.raises(TaskError, match=named):
        RegisteredState([], {"it": Holder(value)})


class Phase(StrEnum):
    WARM = "warm"


class Level(IntEnum):
    LOW = 1


class Bounded(list[int]):
    """A list of another class."""


class Label(str):
    """Text of another class."""


Pair = namedtuple("Pair", "first second")  # noqa: PYI024 - as users have it


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (Phase.WARM, r"a Phase at it\.value: an Enum would come back as its value.*Give its \.value in state_dict"),
        (Level.LOW, r"a Level at it\.value: an Enum"),
        ({Phase.WARM: 1}, r"a Phase at it\.value: an Enum"),
        ([Pair(1, 2)], r"a Pair at it\.value\[0\]: it would come back as a plain tuple. Give tuple\(\.\.\.\)"),
        (defaultdict(int, {"a": 1}), r"a defaultdict at it\.value: it would come back as a plain dict"),
        ({"x": UserDict(a=1)}, r"a UserDict at it\.value\.x: it would come back as a plain dict"),
        (Bounded([1]), r"a Bounded at it\.value: it would come back as a plain list"),
        (Label("a"), r"a Label at it\.value: it would come back as a plain str"),
    ],
)
def test_what_would_come_back_as_another_class_is_refused_by_its_name(value: Any, told: str) -> None:
    with pytest.raises(TaskError, match=told):
        RegisteredState([], {"it": Holder(value)})


def test_states_of_streams_take_subclasses_as_the_plain_values_that_come_back() -> None:
    value = {Phase.WARM: [Pair(1, Label("b"))], "x": defaultdict(int, a=1), "y": Bounded([2])}
    assert restored(json.loads(json.dumps(plain(value, "it", "", whole=True)))) == {
        "warm": [(1, "b")],
        "x": {"a": 1},
        "y": [2],
    }


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(torch.Size([2, 3]), (2, 3)), (np.str_("a"), "a"), (MappingProxyType({"a": 1}), {"a": 1})],
    ids=["size", "NumPy's text", "a view of a dict"],
)
def test_values_that_behave_as_the_plain_ones_come_back_as_these(value: Any, wanted: Any) -> None:
    other = Holder(None)
    RegisteredState([], {"it": other}).load(RegisteredState([], {"it": Holder(value)}).text())
    assert other.value == wanted


def test_an_ordered_dict_in_a_state_of_an_earlier_version_is_no_change() -> None:
    holder = Holder(OrderedDict({"b": 1, "a": 2}))
    registered = RegisteredState([], {"it": holder})
    text = registered.text().replace("[-1,", "[")
    assert text != registered.text()
    assert registered.change_since(text) is None
    registered.load(text)
    assert type(holder.value) is dict
    assert list(holder.value) == ["b", "a"]


def test_state_that_grows_is_refused_by_its_name_and_the_limit() -> None:
    history = Holder([0.0])
    registered = RegisteredState([], {"history": history})
    history.value = [0.25] * MOST_BYTES
    with pytest.raises(TaskError, match=r"most of it 'history'.*limit is 64"):
        registered.text()


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, 20),
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5, 5]),
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 9)],
            [3],
        ),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (1 + done)),
    ],
    ids=["one cycle", "multi step", "plateau", "sequential", "lambda"],
)
def test_torchs_schedulers_continue_as_if_they_had_not_been_interrupted(make: Any) -> None:
    def step(scheduler: Any, number: int) -> None:
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))

    optimizer, other = an_optimizer(), an_optimizer()
    scheduler, of_other = make(optimizer), make(other)
    optimizer.step()
    other.step()
    registered = RegisteredState(optimizer.param_groups, {"scheduler": scheduler})
    joined = RegisteredState(other.param_groups, {"scheduler": of_other})
    for number in range(4):
        step(scheduler, number)
    joined.load(registered.text())
    for number in range(4, 9):
        assert joined.text() == registered.text()
        step(scheduler, number)
        step(of_other, number)
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] != 0.1


def test_a_learning_rate_that_is_a_tensor_stays_the_same_object() -> None:
    optimizer = an_optimizer(torch.tensor(0.1))
    registered = RegisteredState(optimizer.param_groups, {})
    text, rate = registered.text(), optimizer.param_groups[0]["lr"]
    rate.fill_(0.5)
    assert registered.change_since(text) == f"optimizer[0].lr[1] = 0.5 (it was {torch.tensor(0.1).item()})"
    registered.load(text)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == torch.tensor(0.1)


@pytest.mark.parametrize("rate", [0.37, torch.tensor(0.37, dtype=torch.float64)])
def test_a_rate_that_a_loop_has_put_in_the_place_of_a_tensor_comes_back_with_its_type(rate: Any) -> None:
    optimizer, other = an_optimizer(torch.tensor(0.1)), an_optimizer(torch.tensor(0.1))
    optimizer.param_groups[0]["lr"] = rate
    text, loaded = RegisteredState(optimizer.param_groups, {}).text(), RegisteredState(other.param_groups, {})
    loaded.load(text)
    assert type(other.param_groups[0]["lr"]) is type(rate)
    assert loaded.change_since(text) is None


def test_state_of_other_objects_is_refused() -> None:
    text = RegisteredState([], {"scheduler": Holder(1)}).text()
    with pytest.raises(TaskError, match=r"registered \['scheduler'\]; this program .* registers \['average'\]"):
        RegisteredState([], {"average": Holder(1)}).load(text)


def test_the_first_change_is_named() -> None:
    holder = Holder({"a": 1, "b": 2})
    registered = RegisteredState([], {"it": holder})
    text = registered.text()
    assert registered.change_since(text) is None
    holder.value["b"] = 3
    assert registered.change_since(text) == "it.value.b = 3 (it was 2)"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"a": False, "lr": 0.01}, "optimizer[0].a = False has appeared"),
        ({}, "optimizer[0].lr was removed (it was 0.01)"),
        ({"lr": np.float32(0.01)}, "optimizer[0].lr[0] = 'float32' has appeared"),
        ({"lr": 0.01, "since": [1]}, "optimizer[0].since[0] = 1 has appeared"),
    ],
)
def test_a_setting_that_appears_or_goes_is_named_as_such(change: dict[str, Any], named: str) -> None:
    group: dict[str, Any] = {"params": [], "lr": 0.01}
    registered = RegisteredState([group], {})
    text = registered.text()
    group.pop("lr")
    group.update(change)
    assert registered.change_since(text) == named


def test_settings_of_a_group_are_all_kept_but_functions_and_constants() -> None:
    left_out = {"rule": math.sqrt, "dtype": torch.float32, "device": torch.device("cpu")}
    registered = RegisteredState(
        [{"params": [], "lr": np.float32(0.1), "betas": (0.9, np.float64(0.5)), "since": {6: 0, 12: 1}, **left_out}], {}
    )
    group: dict[str, Any] = {"params": [], **left_out}
    RegisteredState([group], {}).load(registered.text())
    assert list(group["since"]) == [6, 12]
    assert repr(group["lr"]) == "np.float32(0.1)"
    assert repr(group["betas"]) == "(0.9, np.float64(0.5))"
    with pytest.raises(TaskError, match=r"a Tensor of shape \[1\] at optimizer\[0\]\.betas\[0\]"):
        RegisteredState([{"params": [], "betas": (torch.tensor([0.9]), 0.5)}], {})


@pytest.mark.parametrize("texts", [["a"], ["a"] * 5, ["a", "b"], ["a", "a", "b"], ["a", "b", "c", "a"]])
def test_sums_of_words_show_whether_all_texts_are_equal(texts: list[str]) -> None:
    sums = [sum(words) for words in zip(*map(words_of, texts), strict=True)]
    assert are_different(sums, len(texts)) == (len(set(texts)) > 1)


class Attributes(Holder):
    """Its state is its attributes, in their order, as torch's schedulers have it."""

    def state_dict(self) -> Any:
        return dict(vars(self))

    def load_state_dict(self, state: Any) -> None:
        vars(self).clear()
        vars(self).update(state)


def test_dicts_are_compared_in_one_order_and_come_back_in_their_own() -> None:
    """An object that is made anew may have its attributes in another order than one that has trained."""
    holders = [Attributes({"a": 1, "b": {3: 0}}), Attributes({"b": {3: 0}, "a": 1})]
    holders[1].count = 1  # type: ignore[attr-defined]
    vars(holders[0]).update(count=1, value=vars(holders[0]).pop("value"))
    states = [RegisteredState([], {"it": holder, "same": Holder(0)}) for holder in holders]
    texts = [state.text() for state in states]
    assert texts[0] != texts[1]
    assert values_of(texts[0]) == values_of(texts[1])
    assert json.loads(texts[0].partition("\n")[0])
    assert states[0].change_since(texts[1]) is None
    states[0].load(texts[1])
    assert states[0].text() == texts[1]
    assert repr(vars(holders[0])) == repr(vars(holders[1]))


def test_a_state_without_the_order_of_its_dicts_is_loaded_as_it_lies() -> None:
    holder = Holder({6: 0.25, 12: 0.5})
    registered = RegisteredState([], {"it": holder})
    values, _, orders = registered.text().split("\n")
    assert orders
    registered.load(values)
    assert list(holder.value) == [12, 6]
    registered.load('{"optimizer":[],"it":{"dict":[["value",{"dict":[[5,1],[2,2]]}]]}}')
    assert holder.value == {5: 1, 2: 2}
    assert list(holder.value) == [5, 2]


class Spikes:
    """The newest three losses, by the number of samples: a queue, whose oldest entry goes."""

    def __init__(self) -> None:
        self.recent: dict[int, float] = {}

    def limit(self) -> float:
        return 0.1 * sum(self.recent.values()) or 0.7

    def add(self, samples: int, loss: float) -> None:
        self.recent[samples] = loss
        if len(self.recent) > 3:
            self.recent.pop(next(iter(self.recent)))

    def state_dict(self) -> dict[int, float]:
        return self.recent

    def load_state_dict(self, state: dict[int, float]) -> None:
        self.recent = state


class Reordered:
    """Has its attributes in another order from step 1 on, except in a worker that joins later."""

    def __init__(self) -> None:
        self.first, self.newest = 0, 0

    def add(self, number: int) -> None:
        if number == 1:
            del self.first
            self.first = 1
        self.newest = number

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def clips_by_a_queue(session: Session) -> None:
    """Its optimizer counts the steps in its groups."""
    model, spikes, reordered = session.build(Small), Spikes(), Reordered()
    optimizer = Remembers(model.parameters(), "group")
    session.shard(model, optimizer, spikes=spikes, reordered=reordered)
    for step in session.steps():
        with step:
            for batch in step.microbatches():
                compute(step, model, batch)
            step.clip_grad_norm_(spikes.limit())
            optimizer.step()
            spikes.add(40 * step.number, step.loss)
            reordered.add(step.number)
            assert [*spikes.recent] == [40 * number for number in range(1, step.number + 1)][-3:]
            assert optimizer.param_groups[0]["k"] == step.number


@pytest.mark.procs
def test_the_order_of_a_dict_and_a_count_in_the_groups_outlive_a_kill_and_reach_a_worker_that_joins() -> None:
    found = run(2, clips_by_a_queue, kills=[(1, 4, "forward")], replacement_wait_s=60.0, steps=5)
    assert [len(fields["members"]) for fields in found.of("generation")] == [2, 2]
    assert found.bits == run(1, clips_by_a_queue, steps=5).bits


def with_names(*names: list[str]) -> RegisteredState:
    """A state of groups with parameters of these names."""
    return RegisteredState([{"params": [], "lr": 0.1} for _ in names], {}, None, names)


A_GROUP, ANOTHER = ["head.weight", "body.weight"], ["head.bias", "body.bias"]


def test_a_state_of_groups_in_another_order_is_refused_by_the_first_of_them() -> None:
    text = with_names(A_GROUP, [], ANOTHER).text()
    with pytest.raises(TaskError, match=r"parameters of this program's group 0 \(first 'head\.bias'\) in group 2"):
        with_names(ANOTHER, [], A_GROUP).load(text)


@pytest.mark.parametrize(
    "names",
    [
        (A_GROUP, [], ANOTHER),
        (A_GROUP[::-1], [], ANOTHER),
        (A_GROUP[:1], [], ANOTHER),
        ([*A_GROUP, "new.weight"], [], [*ANOTHER, "new.bias"]),
        ([*A_GROUP, "head.bias"], [], ["body.bias"]),
        ([], [], ANOTHER),
        ([], A_GROUP[:1], [*A_GROUP[1:], *ANOTHER]),
    ],
    ids=["same", "order in a group", "frozen", "added", "moved", "all frozen", "into a group that was empty"],
)
def test_groups_at_their_places_may_have_fewer_or_more_parameters(names: Any) -> None:
    text = with_names(A_GROUP, [], ANOTHER).text()
    joined = with_names(*names)
    joined.load(text)
    assert joined.change_since(text) is None


def test_a_state_of_an_earlier_version_has_no_order_of_groups_and_is_loaded() -> None:
    text = RegisteredState([{"params": [], "lr": 0.25}, {"params": []}], {}).text()
    registered = with_names(ANOTHER, A_GROUP)
    registered.load(text)
    assert "optimizer.names" not in text
    assert registered._groups[0]["lr"] == 0.25


class InGroups:
    """Decays the matrices alone; builds its two groups in either order, and may freeze a part."""

    def __init__(self, *, is_reversed: bool = False, freezes: bool = False) -> None:
        self._is_reversed, self._freezes = is_reversed, freezes

    def __call__(self, session: Session) -> None:
        model = session.build(self._make)
        params = [param for param in model.parameters() if param.requires_grad]
        decays = {"params": [param for param in params if param.dim() > 1], "weight_decay": 5.0}
        others = {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0}
        optimizer = torch.optim.AdamW([others, decays] if self._is_reversed else [decays, others], lr=1e-2)
        session.shard(model, optimizer)
        for step in session.steps():
            with step:
                for batch in step.microbatches():
                    compute(step, model, batch)
                optimizer.step()

    def _make(self) -> torch.nn.Module:
        model = Gpt()
        if self._freezes:
            model.get_submodule("blocks.0").requires_grad_(False)
        return model


@pytest.mark.procs
def test_a_resume_with_groups_in_another_order_is_refused_and_one_with_a_frozen_part_continues(tmp_path: Path) -> None:
    job = small_job(f"{tmp_path}/run", task=TrainFunction(InGroups()), steps=1)
    make_driver(job, make_limits(job, 1), Listening()).run()
    with pytest.raises(TaskError, match=r"this program's group 0 \(first '.*norm.*'\) in group 1"):
        resume(job.run_url, 1, steps=2, task=TrainFunction(InGroups(is_reversed=True)))
    _, listener = resume(job.run_url, 1, steps=2, task=TrainFunction(InGroups(freezes=True)))
    assert [fields["step"] for fields in listener.of("step")] == [2]
