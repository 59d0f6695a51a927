"""Runs with the accelerator's code in real processes: bits, losses, and errors of the device at any call."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import tempfile
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import raysharded as rs
from raysharded.actors import worker
from raysharded.actors.comm.host_group import HostGroup
from raysharded.actors.device import accelerator
from raysharded.errors import CollectiveAborted
from raysharded.ids import WorkerId
from raysharded.task import TrainFunction
from tests.actors.device.communicator_double import DoubleAccelerator
from tests.cases import tried_each_time
from tests.session.loops import Loop
from tests.training.harness import Outcome, SmallTask, TwoBlocksTask, train

pytestmark = pytest.mark.procs
SETTINGS: dict[str, Any] = {"task": SmallTask(), "steps": 4, "microbatches": 4}
TWO_BLOCKS = SETTINGS | {"task": TwoBlocksTask()}


def on_double() -> None:
    """In a worker's process: compute on the double of an accelerator."""
    accelerator.use(DoubleAccelerator())


@cache
def on_cpu() -> Outcome:
    return train(1, **SETTINGS)


DISTURBED: dict[str, dict[str, Any]] = {
    "shards": {},
    "replicas": {"shards": 2},
    "local": {"engine": rs.EngineConfig(accumulation="local")},
    "audited": {"engine": rs.EngineConfig(audit_every_steps=2)},
    "audited replicas": {"shards": 2, "engine": rs.EngineConfig(audit_every_steps=2)},
    "local, audited": {"engine": rs.EngineConfig(accumulation="local", audit_every_steps=2)},
}
"""Shards alone die in `logged`, too."""


@pytest.mark.parametrize("name", tried_each_time(["local, audited"], DISTURBED))
def test_a_worker_that_dies_changes_no_bit(name: str) -> None:
    how = DISTURBED[name]
    workers = 4 if "shards" in how else 3
    disturbed = train(workers, use_gpu=True, prepare=on_double, kills=[(1, 3, "backward")], **how, **SETTINGS)
    assert disturbed.bits == on_cpu().bits
    assert len(disturbed.of("worker_lost")) == 1


class Logging(DoubleAccelerator):
    """Writes its calls to a file of its process, those for page-locked memory with their bytes."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._file = Path(folder) / str(os.getpid())
        self.on_call = self._note

    def pinned(self, size_bytes: int) -> torch.Tensor:
        self._note(str(size_bytes))
        return super().pinned(size_bytes)

    def all_to_all(self, *args: Any) -> None:
        self._note("exchange")
        super().all_to_all(*args)

    def _note(self, call: str) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{call}\n")


def on_logging(folder: str) -> None:
    """In a worker's process: compute on a device that logs its calls, with a setting of the user's environment.

    An exchange over gloo is an error.
    """
    os.environ["NCCL_P2P_DISABLE"] = "1"
    accelerator.use(Logging(folder))

    def fails(*_: Any) -> None:
        raise AssertionError("an exchange between hosts")

    setattr(HostGroup, "exchange", fails)  # noqa: B010 - in this process alone


@cache
def logged() -> tuple[Outcome, tuple[list[str], ...]]:
    """A run in which worker 1 of three dies, and the calls of each process."""
    with tempfile.TemporaryDirectory() as folder:
        kills = [(1, 3, "backward")]
        prepare = partial(on_logging, folder)
        outcome = train(3, use_gpu=True, prepare=prepare, kills=kills, **TWO_BLOCKS)
        return outcome, tuple(file.read_text().split() for file in Path(folder).iterdir())


def test_state_moves_between_devices_where_one_communicator_has_all_workers() -> None:
    disturbed, _ = logged()
    assert disturbed.bits == train(1, **TWO_BLOCKS).bits
    assert len(disturbed.of("worker_lost")) == 1
    assert [fields["source"] for fields in disturbed.of("generation")[1:]][:1] == ["memory"]


class Breaking(DoubleAccelerator):
    """Its context dies at the n-th call of one kind, in the first process that comes so far: every later call fails."""

    def __init__(self, call: str, number: int, marker: str, rank: int | None = None) -> None:
        """`rank`: of the process in its first generation; None: any."""
        super().__init__()
        self._call, self._left, self._marker, self._is_dead = call, number, marker, False
        self._rank, self._first = rank, rank
        self.on_call = self._strike

    def communicator(self, name: str, store: Any, rank: int, size: int, timeout: Any) -> Any:
        if not self.calls:
            self._first = rank
        return super().communicator(name, store, rank, size, timeout)

    def identity(self, device: torch.device) -> str:
        return f"GPU {os.getpid()}"

    def _strike(self, call: str) -> None:
        if call == self._call and self._rank in (None, self._first) and not self._is_dead:
            self._left -= 1
            if self._left <= 0:
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(self._marker, os.O_CREAT | os.O_EXCL))
                    self._is_dead = True
        if self._is_dead:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nSearch for it.")


def on_breaking(call: str, number: int, marker: str, rank: int | None = None) -> None:
    """In a worker's process: compute on a device that may break."""
    accelerator.use(Breaking(call, number, marker, rank))


LOCAL = {"engine": rs.EngineConfig(accumulation="local")}
CALLS: dict[str, tuple[int, dict[str, Any]]] = {
    "make": (1, {}),
    "connect": (1, {}),
    "allreduce": (1, {}),
    "drain": (3, {}),
    "release_freed_memory": (1, {}),
    "pinned": (1, {}),
    "new_stream": (2, {}),
    "current_stream": (5, {}),
    "record": (9, {}),
    "all_to_all": (4, {}),
    "keep_for_current_stream": (3, LOCAL),
    "abort": (1, {"kills": [(2, 3, "backward")]}),
}


WHILE_FORMING = ("make", "connect", "allreduce", "drain", "release_freed_memory", "new_stream", "pinned")
"""Calls that fail before the first generation has formed."""


@pytest.mark.parametrize("call", tried_each_time(["connect", "record"], CALLS))
def test_a_device_that_fails_in_any_call_costs_its_worker_and_changes_no_bit(call: str, tmp_path: Path) -> None:
    number, how = CALLS[call]
    marker = tmp_path / "struck"
    prepare = partial(on_breaking, call, number, str(marker))
    workers = 3 if "kills" in how else 2
    outcome = train(workers, use_gpu=True, prepare=prepare, losses=4, **how, **SETTINGS)
    assert marker.exists()
    assert outcome.bits == on_cpu().bits
    (leaving,) = outcome.of("worker_leaving")
    assert "CUDA error: an illegal memory access" in leaving["reason"]
    kills = how.get("kills", ())
    if not kills:
        first, *later = (generation["source"] for generation in outcome.of("generation")[1:])
        assert first == ("start" if call in WHILE_FORMING else "memory")
        assert set(later) <= {"memory"}
    assert len(outcome.of("worker_lost")) == len(kills)


PARITY = {"engine": rs.EngineConfig(redundancy=rs.Redundancy(parity=(2, 1)))}
NEEDED: dict[str, tuple[int, str, int, tuple[int, int, str], dict[str, Any]]] = {
    "died before": (3, "abort", 1, (0, 3, "backward"), {}),
    "dies as the next generation forms": (3, "all_to_all", 10, (0, 2, "form"), {}),
    "parity": (3, "abort", 1, (0, 3, "backward"), PARITY),
    "to new workers alone": (2, "abort", 1, (0, 3, "backward"), {}),
    "a loop of a user": (2, "abort", 1, (0, 3, "backward"), {"task": TrainFunction(Loop())}),
}


@pytest.mark.parametrize("case", tried_each_time(["to new workers alone"], NEEDED))
def test_what_a_worker_with_a_dead_device_alone_holds_is_handed_over_by_it(case: str, tmp_path: Path) -> None:
    """The worker 0, whose mirror it holds, is killed at about the same time. There is no checkpoint."""
    workers, call, number, kill, how = NEEDED[case]
    marker = tmp_path / "struck"
    prepare = partial(on_breaking, call, number, str(marker), 1)
    outcome = train(workers, use_gpu=True, prepare=prepare, kills=[kill], losses=4, **SETTINGS | how)
    assert marker.exists()
    assert outcome.bits == (train(1, **SETTINGS | how) if "task" in how else on_cpu()).bits
    served = [fields for fields in outcome.of("generation") if "failed_devices" in fields]
    at_most = 2 if kill[2] == "form" else 1  # the generation that fails may need it, too, for the newest step
    assert 1 <= len(served) <= at_most, outcome.of("generation")
    for generation in served:
        assert generation["failed_devices"] == [1]
        assert generation["source"] == "memory"
        assert generation["step"] >= 1
        assert 1 not in generation["members"]
    assert [fields["worker"] for fields in outcome.of("worker_left")] == [1]
    assert [fields["worker"] for fields in outcome.of("worker_lost")] == [0]


def on_breaking_unreachable(call: str, number: int, marker: str, rank: int) -> None:
    """In a worker's process: compute on a device that may break, and reach no other worker then."""

    def serve(*_: Any, **__: Any) -> None:
        raise CollectiveAborted("the store of the generation cannot be reached")

    on_breaking(call, number, marker, rank)
    setattr(worker, "serve", serve)  # noqa: B010 - a function for another


def test_a_hand_over_in_vain_ends_its_generation_at_once_and_an_older_source_is_taken(tmp_path: Path) -> None:
    prepare = partial(on_breaking_unreachable, "abort", 1, str(tmp_path / "struck"), 1)
    outcome = train(3, use_gpu=True, prepare=prepare, kills=[(0, 3, "backward")], losses=4, **SETTINGS)
    assert outcome.bits == on_cpu().bits
    sources = [(generation["source"], "failed_devices" in generation) for generation in outcome.of("generation")]
    tried = [source for source, hands_over in sources if hands_over]
    assert tried in (["memory"] * 2, ["memory"] * 3)
    assert ("start", False) in sources[1 + len(tried) :]
    (recovery,) = outcome.of("recovery")
    assert recovery["reasons"].count("worker 1, whose GPU failed, could not hand over") == len(tried)
    assert recovery["total_s"] < 30, "less than a generation may take to form"


class Stuck(DoubleAccelerator):
    """Its communicators block: in their second connection, or in every abort. A file shows that they connect again."""

    def __init__(self, call: str, marker: str) -> None:
        super().__init__()
        self._call, self._marker, self._connections = call, marker, 0
        self.blocking = {call} & {"abort"}
        self.on_call = self._note

    def _note(self, call: str) -> None:
        if call == "connect":
            self._connections += 1
            self.blocking = {self._call} & ({"abort"} if self._connections != 2 else {self._call})
            if self._connections == 2:
                Path(self._marker).touch()


def on_stuck(call: str, marker: str) -> None:
    """In a worker's process: compute on a device whose communicators block."""
    accelerator.use(Stuck(call, marker))


def on_dying_beside(marker: str) -> None:
    """In a worker's process: die in the second connection, once another worker is in its second one."""
    device, connections = DoubleAccelerator(), itertools.count(1)

    def strike(call: str) -> None:
        if call == "connect" and next(connections) == 2:
            deadline = time.monotonic() + 60
            while not Path(marker).exists():
                assert time.monotonic() < deadline
                time.sleep(0.002)
            os.kill(os.getpid(), signal.SIGKILL)

    device.on_call = strike
    accelerator.use(device)


@pytest.mark.parametrize("call", tried_each_time(["connect"], ["connect", "connect for good", "abort"]))
def test_a_loss_beside_a_communicator_that_blocks_costs_no_further_worker(call: str, tmp_path: Path) -> None:
    """Worker 1 dies in a step. In the next generation worker 0 waits for its communicator while worker 3 dies."""
    marker = tmp_path / "connects again"
    prepare = {WorkerId(worker): on_double for worker in range(6)}
    prepare |= {WorkerId(0): partial(on_stuck, call, str(marker)), WorkerId(3): partial(on_dying_beside, str(marker))}
    kills = [(1, 3, "backward")]
    outcome = train(4, use_gpu=True, prepare=prepare, kills=kills, losses=1, **SETTINGS)
    assert marker.exists()
    assert outcome.bits == on_cpu().bits
    assert [lost["worker"] for lost in outcome.of("worker_lost")] == [1, 3]
    assert outcome.of("worker_leaving") == outcome.of("stuck") == []
    generations = outcome.of("generation")
    assert [generation["members"] for generation in generations[:2]] == [[0, 1, 2, 3], [0, 2, 3]]
    assert {generation["source"] for generation in generations[1:]} == {"memory"}


def test_survivors_drain_their_devices_after_the_abort_and_before_they_allocate_again() -> None:
    _, logs = logged()
    survivors = [calls for calls in logs if calls.count("make") > 1 and "abort" in calls]
    assert len(survivors) == 2
    for calls in survivors:
        second = calls.index("make", calls.index("make") + 1)  # a third is that of a replacement which joins in time
        drained = second - 1 - calls[:second][::-1].index("drain")
        assert "abort" in calls[:drained]
        assert not {"pinned", "new_stream", "all_to_all"} & set(calls[drained:second])


class Hanging(DoubleAccelerator):
    """Its device finishes nothing from the n-th event on, in the first process that comes so far."""

    def __init__(self, number: int, marker: str) -> None:
        super().__init__()
        self._left, self._marker = number, marker
        self.on_call = self._strike

    def _strike(self, call: str) -> None:
        self._left -= call == "record"
        if call == "record" and self._left == 0:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self._marker, os.O_CREAT | os.O_EXCL))
                self.reached.clear()

    def is_in_collective(self) -> bool:
        return self.reached.is_set()


def on_hanging(number: int, marker: str) -> None:
    """In a worker's process: compute on a device that may hang."""
    accelerator.use(Hanging(number, marker))


@pytest.mark.long
def test_a_worker_whose_device_hangs_in_a_kernel_is_named_as_the_one_behind(tmp_path: Path) -> None:
    """It waits for its device, and its peers for it. Long: a device has ten seconds to finish."""
    prepare = partial(on_hanging, 30, str(tmp_path / "struck"))
    outcome = train(3, use_gpu=True, prepare=prepare, losses=4, hang_timeout_s=5.0, **SETTINGS)
    assert outcome.bits == on_cpu().bits
    assert outcome.of("stuck")[0]["behind"] == [leaving["worker"] for leaving in outcome.of("worker_leaving")]
    assert outcome.of("worker_lost") == [], "its peers are not to blame"


class Used(DoubleAccelerator):
    """A device with a use to report."""

    def use(self, device: torch.device) -> dict[str, float]:
        return {"used_bytes": 5.0, "utilization": 0.5}


def on_used() -> None:
    """In a worker's process: compute on a device whose use is known."""
    accelerator.use(Used())


def test_the_use_of_a_device_is_in_each_steps_entry() -> None:
    outcome = train(1, task=SmallTask(), use_gpu=True, prepare=on_used, steps=2, microbatches=2)
    assert [step["gpu"] for step in outcome.of("step")] == [{"used_bytes": 5.0, "utilization": 0.5}] * 2
    assert "gpu" not in on_cpu().of("step")[0]


def test_settings_of_the_user_are_kept_and_said_once() -> None:
    """By one worker, in the first step, also if a generation follows."""
    outcome, _ = logged()
    said = [remark for step in outcome.of("step") for remark in step.get("remarks", ()) if "environment" in remark]
    assert said == ["settings of the environment that are kept: NCCL_P2P_DISABLE=1"]


def on_noting_compiler(notes: str) -> None:
    """In a worker's process: compute on the double; write whether each graph is compiled without measured choices."""
    from torch._dynamo import lookup_backend
    from torch._inductor import config

    def compiled(*given: Any, **named: Any) -> Any:
        with Path(notes).open("a", encoding="utf-8") as file:
            file.write(f"{config.deterministic}\n")
        return lookup_backend("eager")(*given, **named)

    on_double()
    usual = torch.nn.Module.compile
    type.__setattr__(torch.nn.Module, "compile", lambda block: usual(block, backend=compiled))


def test_blocks_are_compiled_for_a_device_without_choices_by_measured_times(tmp_path: Path) -> None:
    notes = tmp_path / "compiled"
    prepare, engine = partial(on_noting_compiler, str(notes)), rs.EngineConfig(compile=True)
    train(1, task=SmallTask(), use_gpu=True, prepare=prepare, engine=engine, steps=1, microbatches=1)
    assert set(notes.read_text().split()) == {"True"}


def test_a_worker_warms_its_device_up_before_others_wait_for_it() -> None:
    """It drains the device before it makes a communicator, in its first generation, too.

    A joiner may make its first one as it prepares a change of the members, before it forms a generation.
    """
    _, logs = logged()
    drained = sorted(calls[: calls.index("make")].count("drain") for calls in logs if "make" in calls)
    of_joiners, of_first_generation = drained[:-3], drained[-3:]
    assert len(of_first_generation) == 3
    assert min(of_first_generation) >= 3, "the warm-up, and twice as it forms"
    assert all(of_joiners), "the warm-up"


def test_no_step_waits_for_page_locked_memory_of_its_buffers() -> None:
    """All of a layout is allocated before the first exchange: four buffers. Later ones are for reads and batches."""
    _, logs = logged()
    first_generation = [calls[: calls.index("abort")] if "abort" in calls else calls for calls in logs]
    trained = [calls for calls in first_generation if "exchange" in calls]
    assert len(trained) >= 3
    for calls in trained:
        first = calls.index("exchange")
        before, after = ([int(call) for call in part if call.isdigit()] for part in (calls[:first], calls[first:]))
        assert max(before) > 100_000
        assert max(after) < max(before) // 4
