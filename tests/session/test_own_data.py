"""Microbatches that a loop reads itself: the same bytes at every number of workers, and errors by name."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import raysharded as rs
from raysharded.actors.optimizer.registered_state import RegisteredState
from raysharded.actors.session.own_data import OwnData
from raysharded.checkpoint import list_checkpoints, open_checkpoint, open_storage
from raysharded.data.loader import MicrobatchLoader
from raysharded.data.sources import own_microbatches
from raysharded.data.streams.numbered_microbatches import MicrobatchFunction, MicrobatchNumbers, MicrobatchStreams
from raysharded.data.streams.own_microbatches import OwnMicrobatches
from raysharded.errors import ConfigError, DataError, InexactError, RayshardedError, TaskError
from raysharded.ids import WorkerId
from raysharded.protocol.messages import REGISTERED_STATE
from raysharded.task import TrainFunction
from raysharded.testing import Fault, FaultPlan
from tests.cases import tried_each_time
from tests.session import streams
from tests.session.loops import MICROBATCHES, Loop, run
from tests.session.streams import OwnLoop, TokenStream, read_bytes
from tests.training.harness import GptTask, make_driver, make_job, make_limits
from tests.training.test_checkpoints import WAIT_S, Listening, fingerprint, small_job
from tests.training.test_leaving import Seen

BATCH = rs.BatchConfig(global_batch_size=2 * MICROBATCHES, microbatch_size=2, seed=5)
DATA = MicrobatchNumbers()
MORE_THAN_ANY = 10_000


def nothing() -> None: ...


def loader(source: Any, *, max_steps: int = 9, ahead: bool = False) -> OwnMicrobatches:
    """The loader of a worker that reads all microbatches, in this process or in another."""
    found = own_microbatches(source, BATCH, rs.EngineConfig(prefetch=ahead), max_steps, nothing)
    numbers = MicrobatchLoader(DATA, BATCH)
    numbers.skip((), 2, (-DATA.order_digest, BATCH.global_batch_size))
    return found.over(numbers)


def of_streams(make: Any = TokenStream, **settings: Any) -> OwnMicrobatches:
    return loader(MicrobatchStreams(make, MICROBATCHES, BATCH.seed), **settings)


def do_step(own: OwnMicrobatches, step: int) -> tuple[list[Any], str]:
    """The microbatches of a step, and the sentence about streams that have ended."""
    own.plan([(step, index) for index in range(MICROBATCHES)])
    found = [own.load(step, index).samples[0]["tokens"] for index in range(MICROBATCHES)]
    own.plan([(step + 1, index) for index in range(MICROBATCHES)])
    return found, own.add(step, [own.own_part(step)])


def registered_in(url: str) -> str:
    """The state that the newest checkpoint has."""
    storage = open_storage(url)
    newest = list_checkpoints(storage)[-1]
    return str(open_checkpoint(storage, newest.prefix).manifest.metadata[REGISTERED_STATE])


@pytest.mark.procs
def test_streams_go_on_from_1_to_3_to_2_workers_with_the_bytes_of_one(tmp_path: Path) -> None:
    found = []
    for name, first in {"one": 5, "changing": 2}.items():
        folder = tmp_path / name
        folder.mkdir()
        job = small_job(f"{tmp_path}/run of {name}", task=TrainFunction(OwnLoop(folder)), data=DATA, steps=first)
        state = make_driver(job, make_limits(job, 1), Listening()).run()
        if first < 5:
            kill = Fault(worker=WorkerId(1), step=4, phase="backward")
            faults = FaultPlan(faults=(kill,), folder=str(tmp_path))
            job = replace(job, max_steps=5, faults=faults)
            driver = make_driver(job, make_limits(job, 3, min_workers=2, max_worker_losses=1), Listening())
            driver.restore()
            state = driver.run()
            assert faults.fired(kill)
        found.append((read_bytes(folder), fingerprint(state), registered_in(job.run_url)))
    assert found[0] == found[1]
    assert len(found[0][0]) == 5 * MICROBATCHES
    assert all(len(digests) == 1 for digests in found[0][0].values())


@pytest.mark.procs
@pytest.mark.long
def test_streams_have_the_bytes_of_one_worker_on_4_3_7_and_1_with_kills(tmp_path: Path) -> None:
    folder, happened = tmp_path / "read", tmp_path / "happened"
    folder.mkdir()
    loop = OwnLoop(folder, partial(streams.paced, happened))
    job = make_job(f"{tmp_path}/run", task=TrainFunction(loop), microbatches=8, data=DATA, steps=MORE_THAN_ANY)
    seen = Seen()
    driver = make_driver(job, make_limits(job, 7, min_workers=1, max_worker_losses=3), seen)

    def kill(place: int) -> None:
        losses = len(seen.of("worker_lost"))
        os.kill(driver.state.facts[driver.state.members[place]].pid, signal.SIGKILL)
        seen.wait(lambda s: len(s.of("worker_lost")) > losses)

    def resize(workers: int) -> None:
        driver.resize(workers)
        seen.wait(lambda s: len(s.memberships[-1]) == workers)
        goal = seen.step + 2
        seen.wait(lambda s: s.step >= goal)

    driver.resize(4)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(driver.run)
        try:
            seen.wait(lambda s: s.step >= 2)
            kill(1)
            resize(3)
            resize(7)
            kill(0)
            kill(3)
            resize(1)
            happened.touch()
            driver.stop(checkpoint_within_s=WAIT_S)
        except BaseException:
            driver.stop()
            raise
        state = running.result(WAIT_S)
    last = seen.of("checkpoint")[-1]
    alone = tmp_path / "alone"
    alone.mkdir()
    job = replace(job, run_url=f"{tmp_path}/other", max_steps=last["step"], task=TrainFunction(OwnLoop(alone)))
    one = make_driver(job, make_limits(job, 1), Listening()).run()
    assert last["fingerprint"] == one.result_fingerprint
    assert state.losses == 3
    many, few = read_bytes(folder), read_bytes(alone)
    assert {name: many[name] for name in few} == few
    assert all(len(digests) == 1 for digests in many.values())
    assert {4, 3, 7, 1} <= {len(members) for members in seen.memberships}


@pytest.mark.procs
def test_a_function_of_the_microbatch_is_read_with_the_bytes_of_one_worker(tmp_path: Path) -> None:
    found = []
    for workers, kills in ((1, []), (2, [(1, 2, "forward")])):
        folder = tmp_path / f"{workers}"
        folder.mkdir()
        loop = OwnLoop(folder, streams.drawn, is_stream=False)
        found.append((run(workers, loop, data=DATA, kills=kills, steps=2).bits, read_bytes(folder)))
    assert found[0] == found[1]


@pytest.mark.procs
def test_a_stream_that_ends_before_the_others_ends_the_run_with_the_step_before(tmp_path: Path) -> None:
    outcome = run(2, OwnLoop(tmp_path, streams.short_by_one), data=DATA, done=3)
    said = [remark for fields in outcome.of("step") for remark in fields.get("remarks", ())]
    assert any("stream 1 has ended behind step 3, and the other 3 of 4 have not" in remark for remark in said)
    assert "4-0" not in read_bytes(tmp_path)


@pytest.mark.procs
@pytest.mark.parametrize(
    ("make", "is_stream"),
    tried_each_time([(streams.OfItsProcess, True)], [(streams.OfItsProcess, True), (streams.of_its_process, False)]),
)
def test_microbatches_that_depend_on_the_process_are_found_in_the_first_step(
    make: Any, is_stream: bool, tmp_path: Path
) -> None:
    with pytest.raises(InexactError, match=r"step 1: when microbatch \d was computed a second time, to prove"):
        run(2, OwnLoop(tmp_path, make, is_stream=is_stream), data=DATA, steps=2)


@pytest.mark.procs
def test_a_session_without_data_says_what_to_give() -> None:
    with pytest.raises(RayshardedError, match=r"the trainer has no data=.*session\.streams\(make\)"):
        run(1, Loop(), data=DATA)


@pytest.mark.parametrize("ahead", tried_each_time([False], [False, True]))  # in this process, in another
def test_a_stream_goes_back_with_its_step_whatever_was_read_ahead(ahead: bool) -> None:
    own = of_streams(ahead=ahead)
    try:
        own.check()
        before = RegisteredState([], {}, own)
        kept = [(before.text(), do_step(own, step)[0]) for step in (1, 2, 3)]
        other = of_streams()
        later = RegisteredState([], {}, other)
        for step in (2, 3, 1):
            for registered, one in ((before, own), (later, other)):
                text, batches = kept[step - 1]
                registered.load(text)
                assert registered.text() == text
                assert torch.equal(torch.stack(do_step(one, step)[0]), torch.stack(batches))
        assert json.loads(kept[1][0].partition("\n")[0])["session.streams"]["step"] == 1
    finally:
        own.close()


def test_a_last_step_reads_nothing_further_and_equal_streams_end_together() -> None:
    own = of_streams(partial(TokenStream, batches=2))
    assert do_step(own, 1)[1] == ""
    assert do_step(own, 2)[1] == "all streams have ended: step 2 is the run's last one."
    own = of_streams(partial(TokenStream, batches=2), max_steps=2)
    assert [do_step(own, step)[1] for step in (1, 2)] == ["", ""]


@pytest.mark.parametrize(
    ("kind", "named", "make"),
    [
        (DataError, r"stream 0 of 4: after load_state_dict\(\) the source does not continue", streams.Forgetful),
        (DataError, r"stream 0 of 4 has no microbatch for step 1\. Give streams with at least one", streams.empty),
        (TaskError, r"make\(0, 4\) gave a list without state_dict and load_state_dict", lambda *_: [1, 2]),
        (TaskError, r"stream 0 of 4, for step 1, raised .*KeyError: 'no stream 0 of 4'", streams.broken),
        (TaskError, r"set at state_dict\(\)\.seen: the state of a stream must be plain data", streams.Odd),
    ],
)
def test_streams_that_cannot_be_kept_are_refused_at_the_start(kind: type[Exception], named: str, make: Any) -> None:
    with pytest.raises(kind, match=named):
        of_streams(make).check()


def test_a_function_that_is_not_pure_is_refused_at_the_start() -> None:
    with pytest.raises(InexactError, match=r"session\.reads: read\(step, 0\) gave other bytes when it was called"):
        loader(MicrobatchFunction(streams.counted, MICROBATCHES)).check()
    loader(MicrobatchFunction(streams.drawn, MICROBATCHES)).check()  # its draws are seeded by the microbatch


def test_a_stream_that_gives_other_bytes_in_a_step_that_is_done_again_is_found() -> None:
    own = of_streams(streams.Moody)
    own.check()
    do_step(own, 1)
    text = RegisteredState([], {}, own).text()
    do_step(own, 2)
    RegisteredState([], {}, own).load(text)
    with pytest.raises(DataError, match=r"stream 0 of 4: after load_state_dict"):
        do_step(own, 2)


def test_states_have_a_limit_and_are_those_of_this_run() -> None:
    own = of_streams(streams.Large)
    with pytest.raises(TaskError, match=r"the states of 4 streams have .*; the limit is 4"):
        do_step(own, 1)
    text = RegisteredState([], {}, of_streams()).text()
    for streams_, have in ((None, "has states of streams, and this program has none"), (own, "has no streams")):
        with pytest.raises(TaskError, match=have):
            RegisteredState([], {}, streams_).load(RegisteredState([], {}).text() if streams_ else text)
    fewer = OwnMicrobatches(
        MicrobatchStreams(TokenStream, 2, 5),
        own._reader,
        replace(BATCH, global_batch_size=4),
        max_steps=9,
        prefetch=False,
    )
    with pytest.raises(TaskError, match="has 4 streams, and a step of this run 2 microbatches"):
        RegisteredState([], {}, fewer).load(text)


def test_own_data_are_given_once_and_in_place_of_the_trainers(tmp_path: Path) -> None:
    own = OwnData(make_job(f"{tmp_path}/run", data=[1, 2]))
    with pytest.raises(TaskError, match=r"session\.streams takes the place of the trainer's data: leave data= out"):
        own.streams(TokenStream)
    own = OwnData(make_job(f"{tmp_path}/run", data=DATA, engine=rs.EngineConfig(prefetch=False)))
    own.reads(streams.batch_at)
    with pytest.raises(TaskError, match=r"session\.streams is called once"):
        own.streams(TokenStream)
    with pytest.raises(TaskError, match="collate= has no samples to join"):
        own.collate(list)
    settings: dict[str, Any] = {
        "batch": BATCH,
        "scaling": rs.ScalingConfig(num_workers=1),
        "run": rs.RunConfig(name="it", storage_path=str(tmp_path), max_steps=1),
    }
    assert isinstance(rs.ElasticTrainer(train_fn=Loop(), **settings).data, MicrobatchNumbers)
    with pytest.raises(ConfigError, match="data= is missing: give a map-style dataset"):
        rs.ElasticTrainer(task=GptTask(), **settings)
