"""Invalid calls are refused before anything is written, with helpful errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raysharded.checkpoint import api
from raysharded.checkpoint.format.signing import SigningKey
from raysharded.errors import CheckpointError, ConfigError, IncompleteCheckpoint, NoCheckpoint
from tests.checkpoint.state_dict.ranks import run_ranks

STATE = {"model": {"w": torch.zeros(2, 3), "v": torch.zeros(2)}}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"metadata": {"a": object()}}, "metadata"),
        ({"metadata": {"a": (1,)}}, "metadata"),
        ({"metadata": {1: "a"}}, "metadata"),
        ({"metadata": [1]}, "metadata"),
        ({"data": {"a": math.inf}}, "data"),
        ({"metrics": {"loss": math.nan}}, "metrics.*loss.*nan"),
        ({"metrics": {"loss": torch.tensor(1.0)}}, "metrics.*loss"),
        ({"metrics": {"loss": True}}, "metrics.*loss"),
        ({"metrics": [1]}, "metrics"),
        ({"metrics": {"loss": 10**400}}, "metrics.*loss"),
        ({"metrics": {"loss": 10**5000}}, "metrics.*loss"),
        ({"metrics": {"loss": 1.0}, "metadata": {"metrics": {}}}, "metadata= has 'metrics' too"),
        ({"step": -1}, "step=-1"),
        ({"step": 1.0}, "step=1.0"),
        ({"step": True}, "step=True"),
        ({"step": 2**62 + 1}, "step=4611686018427387905"),
        ({"run": None}, "run=None"),
        ({"run": "\ud800"}, "not Unicode"),
        ({"key": "a" * 32}, "SigningKey"),
    ],
)
def test_invalid_facts_about_a_checkpoint_are_refused_before_anything_is_written(
    tmp_path: Path, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=said):
        api.save(tmp_path / "c", STATE, **wrong)
    key = wrong.get("key")
    about = {name: value for name, value in wrong.items() if name != "key"}
    with pytest.raises((CheckpointError, ConfigError), match=said), api.AsyncSaver(key=key) as saver:
        saver.save(tmp_path / "c", STATE, **about)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"x" * 4097: torch.ones(2)}, r"'xx.*xx' \(4097 characters\)"),
        ({"\ud800": torch.ones(2)}, "not Unicode"),
        ({"w": torch.ones([1] * 33)}, "w: it has 33 dimensions"),
        ({"w": torch.ones(2), "n": [10**4300]}, r"state\['n'\]\[0\]: .* more than 4300 digits"),
        ({"w": torch.ones(2), "n": {-(10**4300): 1}}, r"state\['n'\]: .* more than 4300 digits"),
    ],
    ids=["long name", "half a character", "dimensions", "number", "key"],
)
def test_a_state_beyond_the_bounds_of_the_format_is_refused_before_anything_is_written(
    tmp_path: Path, state: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        api.save(tmp_path / "c", state)
    assert type(caught.value) is CheckpointError
    with pytest.raises(CheckpointError, match=said), api.AsyncSaver() as saver:
        saver.save(tmp_path / "c", state)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused(tmp_path: Path) -> None:
    state = {"w": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}
    with pytest.raises(CheckpointError, match="w: a nested tensor"):
        api.save(tmp_path / "c", state)
    with pytest.raises(CheckpointError, match="w: a nested tensor"), api.AsyncSaver() as saver:
        saver.save(tmp_path / "c", state)
    assert list(tmp_path.iterdir()) == []


def test_what_is_just_within_the_bounds_comes_back(tmp_path: Path) -> None:
    state = {"x" * 4096: torch.ones([1] * 32), "n": 10**4300 - 1, 2**70: -(2**70)}
    api.save(tmp_path / "c", state, step=2**62)
    assert str(api.open(tmp_path / "c").state()) == str(state)


@pytest.mark.parametrize("uri", [None, b"/tmp/c", 5, ""])
def test_a_uri_is_text_or_a_path(uri: Any) -> None:
    for call in (lambda: api.save(uri, STATE), lambda: api.load(uri, STATE), lambda: api.open(uri)):
        with pytest.raises(ConfigError, match=r"uri=.*give the checkpoint's folder"):
            call()


def test_a_key_is_bytes(tmp_path: Path) -> None:
    text: Any = "t" * 32
    with pytest.raises(ConfigError, match=r"SigningKey\(.*bytes"):
        SigningKey(text)
    api.save(tmp_path / "c", STATE)
    with pytest.raises(ConfigError, match="SigningKey"):
        api.load(tmp_path / "c", STATE, key=text)
    with pytest.raises(ConfigError, match="SigningKey"):
        api.open(tmp_path / "c", key=text)


@pytest.mark.parametrize("below", ["step-5/manifest.json", "claims/00.json", "checkpoints/x/y"])
def test_a_folder_that_holds_checkpoints_is_no_place_for_one(tmp_path: Path, below: str) -> None:
    (tmp_path / "run" / below).parent.mkdir(parents=True)
    (tmp_path / "run" / below).write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds checkpoints.*such as .*run/step-7"):
        api.save(tmp_path / "run", STATE, step=7)
    assert [path.name for path in (tmp_path / "run").rglob("*") if path.is_file()] == [Path(below).name]


def test_what_a_failed_save_left_is_no_reason_to_refuse_the_next(tmp_path: Path) -> None:
    (tmp_path / "c" / "0123456789ab").mkdir(parents=True)
    (tmp_path / "c" / "0123456789ab" / "rank00000.safetensors").write_bytes(b"x")
    assert api.save(tmp_path / "c", STATE).step == 0


def call_unlike_the_other(rank: int, folder: str) -> list[str]:
    """The errors of this rank's calls, each with an argument that differs from the other rank's."""
    save, load, state = api.save, api.load, {"w": torch.zeros(1)}
    save(f"{folder}/there", state, timeout_s=60)
    calls: list[Callable[[], Any]] = [
        lambda: save(f"{folder}/step", state, step=4 + rank, timeout_s=60),
        lambda: save(f"{folder}/at-{rank}", state, timeout_s=60),
        lambda: save(f"{folder}/run", state, run=f"run-{rank}", timeout_s=60),
        lambda: api.AsyncSaver(timeout_s=60).save(f"{folder}/beside-{rank}", state).result(60),
        lambda: load(f"{folder}/{'there' if rank else 'elsewhere'}", state, timeout_s=60),
        lambda: load(f"{folder}/there", state, names=["w" if rank else "*"], timeout_s=60),
        lambda: load(f"{folder}/there", state, strict=not rank, timeout_s=60),
    ]
    said = []
    for call in calls:
        try:
            call()
        except CheckpointError as error:
            said.append(str(error))
    return said


@pytest.mark.procs
def test_ranks_that_give_different_arguments_are_refused_by_what_each_gave(tmp_path: Path) -> None:
    expected = [
        "the ranks give different steps: 4 on rank 0 and 5 on rank 1",
        f"the ranks give different uris: {tmp_path}/at-0 on rank 0 and {tmp_path}/at-1 on rank 1",
        "the ranks give different run names: run-0 on rank 0 and run-1 on rank 1",
        f"the ranks give different uris: {tmp_path}/beside-0 on rank 0 and {tmp_path}/beside-1 on rank 1",
        f"the ranks give different uris: {tmp_path}/elsewhere on rank 0 and {tmp_path}/there on rank 1",
        "the ranks give different names: ['*'] on rank 0 and ['w'] on rank 1",
        "the ranks give different values of strict: True on rank 0 and False on rank 1",
    ]
    for said in run_ranks(2, call_unlike_the_other, str(tmp_path)):
        for found, wanted in zip(said, expected, strict=True):
            assert wanted in found
    assert [path.name for path in tmp_path.iterdir()] == ["there"], "nothing is left behind"


@pytest.mark.parametrize("timeout_s", [None, 0, -1.0, float("nan"), float("inf"), True, "60"])
def test_a_timeout_is_seconds(tmp_path: Path, timeout_s: Any) -> None:
    for call in (
        lambda: api.save(tmp_path / "c", STATE, timeout_s=timeout_s),
        lambda: api.load(tmp_path / "c", STATE, timeout_s=timeout_s),
        lambda: api.AsyncSaver(timeout_s=timeout_s),
    ):
        with pytest.raises(ConfigError, match=r"timeout_s=.*give the seconds"):
            call()


def refusal(uri: Path, into: Any, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        api.load(uri, into, **options)
    return str(caught.value)


def test_the_remedy_is_for_the_kind_of_difference(tmp_path: Path) -> None:
    uri = tmp_path / "c"
    api.save(uri, STATE)
    shape = refusal(uri, {"model": {"w": torch.zeros(9), "v": torch.zeros(2)}})
    assert "cast=True" not in shape
    assert "strict=False" not in shape
    assert "names=" in shape
    dtype = refusal(uri, {"model": {"w": torch.zeros(2, 3).double(), "v": torch.zeros(2)}})
    assert "cast=True" in dtype
    assert "strict=False" not in dtype
    missing = refusal(uri, {"model": {**STATE["model"], "x": torch.zeros(1)}})
    assert "strict=False" in missing
    assert "cast=True" not in missing


def test_an_imaginary_part_is_never_dropped(tmp_path: Path) -> None:
    uri = tmp_path / "c"
    api.save(uri, {"z": torch.tensor([1 + 2j, 3 - 4j]), "x": torch.tensor([5.0])})
    for cast in (False, True):
        told = refusal(uri, {"z": torch.zeros(2), "x": torch.zeros(1)}, cast=cast)
        assert "1 do not fit: z is complex64, and float32 has no imaginary part. Leave out" in told
    complex_ = torch.zeros(1, dtype=torch.complex64)
    api.load(uri, {"x": complex_}, names=["x"], cast=True)
    assert complex_.tolist() == [5 + 0j]


def test_a_misspelt_name_is_answered_with_the_right_one(tmp_path: Path) -> None:
    state = {f"layer{n}": torch.zeros(1) for n in range(30)} | {"weights": {"query": torch.zeros(1)}}
    api.save(tmp_path / "c", state)
    assert "weights.query" in refusal(tmp_path / "c", state, names="weight.qery")
    assert "weights.query" in refusal(tmp_path / "c", state, names="weight.*")


def test_a_place_that_does_not_exist_is_called_that(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpoint, match=r"there is nothing at .*/nothing.*Check the spelling"):
        api.open(tmp_path / "nothing")


@pytest.mark.parametrize("typed", ["runs/mnie", "rnus/mine", "rnus/mnie", "runs/mine/step-51"])
def test_a_mistyped_place_is_answered_with_the_right_one(tmp_path: Path, typed: str) -> None:
    api.save(tmp_path / "runs" / "mine" / "step-50", {"w": torch.zeros(1)})
    there = tmp_path / "runs" / "mine" / ("step-50" if "step" in typed else "")
    with pytest.raises(NoCheckpoint, match=rf"Did you mean {there}\?"):
        api.load(tmp_path / typed, {"w": torch.zeros(1)})


def test_nothing_yet_is_told_apart_from_a_damaged_checkpoint(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with pytest.raises(NoCheckpoint):
        api.load(runs, STATE)
    (runs / "step-1").mkdir(parents=True)
    (runs / "step-1" / "g000001.safetensors").write_bytes(b"a save that was killed")
    with pytest.raises(NoCheckpoint):
        api.load(runs, STATE)
    api.save(runs / "step-2", STATE, step=2)
    next((runs / "step-2").rglob("*.safetensors")).unlink()
    with pytest.raises(IncompleteCheckpoint) as damaged:
        api.load(runs, STATE)
    assert not isinstance(damaged.value, NoCheckpoint)


@pytest.mark.parametrize("names", [5, [5], ("w", None)])
def test_names_are_text(tmp_path: Path, names: Any) -> None:
    api.save(tmp_path / "c", STATE)
    with pytest.raises(ConfigError, match=r"names=.*as text"):
        api.load(tmp_path / "c", STATE, names=names)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ([1, 2], r"cannot be indexed by \[1, 2\]"),
        (np.array([1, 2]), r"cannot be indexed by array\(\[1, 2\]\)"),
        ((0, np.array([1, 2])), "cannot be indexed by"),
        (slice("a", 3), r"index slice\('a', 3, None\) in dimension 0"),
        (slice(0, 2, "a"), "index slice"),
        (slice(0, 2, 0), "index slice"),
    ],
)
def test_what_is_no_index_is_refused(tmp_path: Path, index: Any, said: str) -> None:
    api.save(tmp_path / "c", STATE)
    with pytest.raises(CheckpointError, match=said):
        api.open(tmp_path / "c").read("model.w", index)
    assert api.open(tmp_path / "c").read("model.w", (1, 2)).shape == ()


def test_a_closed_saver_raises_an_error_about_it(tmp_path: Path) -> None:
    saver = api.AsyncSaver()
    saver.close()
    with pytest.raises(CheckpointError, match="closed"):
        saver.save(tmp_path / "c", STATE)
    with pytest.raises(CheckpointError, match="closed"):
        saver.prepare(STATE)


def test_what_is_printed_is_short(tmp_path: Path) -> None:
    with api.AsyncSaver() as saver:
        pending = saver.save(tmp_path / "c", {f"t{n}": torch.zeros(1) for n in range(100)}, step=3)
        pending.result(60)
    assert repr(pending) == f"PendingSave({str(tmp_path / 'c')!r}, step=3, saved)"
    assert repr(api.open(tmp_path / "c")) == f"OpenCheckpoint({str(tmp_path / 'c')!r}, step=3, 100 tensors)"


def test_a_module_without_shapes_yet_is_refused_by_its_parameters(tmp_path: Path) -> None:
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d())
    for state in (lazy, {"model": lazy}):
        with pytest.raises(ConfigError, match=r"6 tensors of the module are lazy and have no shape yet: 0\.weight"):
            api.save(tmp_path / "c", state)
    assert list(tmp_path.iterdir()) == []
    api.save(tmp_path / "c", torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)))
    with pytest.raises(ConfigError, match="Call the module once with a batch"):
        api.load(tmp_path / "c", lazy)
    lazy(torch.zeros(4, 2))
    api.load(tmp_path / "c", lazy)
    lazy.register_buffer("cache", torch.nn.UninitializedBuffer(), persistent=False)
    api.save(tmp_path / "d", lazy)


def test_an_optimizer_with_state_beside_its_parameters_is_refused_by_its_keys(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    api.save(tmp_path / "c", state)
    own: Any = optimizer.state
    own["calls"] = {"count": 1}
    for refused in (lambda: api.save(tmp_path / "d", state), lambda: api.load(tmp_path / "c", state)):
        with pytest.raises(ConfigError, match=r"the state of SGD has 'calls' beside its parameters"):
            refused()


class Counting(torch.optim.SGD):
    """Counts its steps under a key beside the parameters, as MADGRAD does."""

    def step(self, closure: Any = None) -> Any:
        state: Any = self.state
        state["k"] = torch.tensor([1])
        return super().step(closure)


def test_so_is_one_that_gets_such_state_in_its_first_step(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    api.save(tmp_path / "c", {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)})
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ConfigError, match=r"the state of Counting has 'k' beside its parameters"):
        api.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert not optimizer.state
