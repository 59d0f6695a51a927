"""A loss or gradient that is not finite: the step is left out, or the run rolls back; the same at every size."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import raysharded as rs
from raysharded.data.order import positions_of_step, sample_ids
from raysharded.errors import NonFiniteLoss
from tests.cases import tried_each_time
from tests.ray.leftovers import wait_until
from tests.training.harness import Collector, Outcome, SmallTask, Tokens, make_driver, make_job, make_limits, train

pytestmark = pytest.mark.procs
SEED, BATCH = 5, 8
MICROBATCHES = BATCH // 2


def first_sample_of(step: int, microbatch: int = 2) -> int:
    """The id that a run without skips reads first for a microbatch of a step."""
    return int(sample_ids(SEED, positions_of_step(step, BATCH), len(Tokens()))[2 * microbatch])


class Diverging(SmallTask):
    """The loss, or the gradient alone, is not finite for any microbatch with one of these samples."""

    def __init__(self, samples: Collection[int], *, in_gradient: bool = False) -> None:
        self._rows = torch.stack([torch.as_tensor(Tokens()[index]) for index in sorted(samples)])
        self._in_gradient = in_gradient

    def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        loss = super().loss(model, batch)
        assert isinstance(loss, rs.Loss)
        if not (batch[:, None, :] == self._rows[None]).all(-1).any():
            return loss
        bad = (loss.total - loss.total.detach()).sqrt() if self._in_gradient else loss.total * math.nan
        return rs.Loss(loss.total + bad if self._in_gradient else bad, loss.weight, loss.metrics)


def run(workers: int, bad: Collection[tuple[int, int]], policy: Any, **settings: Any) -> Outcome:
    """A run in which the microbatches `bad`, as (step, microbatch), are not finite."""
    in_gradient = settings.pop("in_gradient", False)
    samples = [first_sample_of(*one) for one in bad]
    task = Diverging(samples, in_gradient=in_gradient)
    settings = {"microbatches": MICROBATCHES, "steps": 4, "records_microbatches": policy == "skip", **settings}
    return train(workers, task=task, on_non_finite=policy, **settings)


@cache
def skipping(in_gradient: bool = False) -> Outcome:
    return run(1, [(1, 2), (3, 0), (3, 2)], "skip", in_gradient=in_gradient)


def left_out(outcome: Outcome) -> list[tuple[int, str, list[int]]]:
    """Step, cause and microbatches of each entry about a step that is left out."""
    return [(fields["step"], fields["what"], fields["microbatches"]) for fields in outcome.of("step_skipped")]


@pytest.mark.parametrize(
    ("in_gradient", "workers"),
    tried_each_time([(True, 2)], product((False, True), (1, 2, 3, 5))),
)
def test_a_step_that_is_not_finite_is_left_out_with_the_same_bits_at_every_size(
    workers: int, in_gradient: bool
) -> None:
    outcome = run(workers, [(1, 2), (3, 0), (3, 2)], "skip", in_gradient=in_gradient)
    assert outcome.bits == skipping(in_gradient).bits
    what = "gradient" if in_gradient else "loss"
    assert left_out(outcome) == [(1, what, [2]), (3, what, [0, 2])]
    assert [numbers.get("skipped", False) for numbers in outcome.numbers] == [True, False, True, False]
    assert math.isfinite(outcome.losses[-1])
    proven = [fields["step"] for fields in outcome.of("step") if "prove" in fields["seconds"]]
    assert proven == ([1, 2] if workers > 2 else [1])  # microbatch 2 is of the first round then, which proves nothing


def test_the_microbatches_of_a_step_that_is_left_out_are_recorded_too() -> None:
    """Their numbers are among the bits that are the same at every size."""
    bad = [(1, 2), (3, 0), (3, 2)]
    without = run(1, bad, "skip", records_microbatches=False)
    for numbers, plain in zip(skipping().numbers, without.numbers, strict=True):
        losses = [total for total, _ in numbers["microbatches"]]
        step = numbers["step"]
        assert [(step, index) for index, loss in enumerate(losses) if math.isnan(loss)] == [
            one for one in bad if one[0] == step
        ]
        assert sum(weight for _, weight in numbers["microbatches"]) == plain["weight"]
        assert repr(math.fsum(losses) / numbers["weight"]) == repr(plain["loss"])


def test_a_step_that_is_left_out_changes_no_bit_of_the_state() -> None:
    bad = first_sample_of(3)
    settings: dict[str, Any] = {"on_non_finite": "skip", "microbatches": MICROBATCHES, "steps": 3, "save_every": 2}
    outcome = train(1, task=Diverging([bad]), **settings)
    assert [fields["step"] for fields in outcome.of("step_skipped")] == [3]
    before, after = outcome.of("checkpoint")
    assert (before["step"], after["step"]) == (2, 3)
    assert before["fingerprint"] == after["fingerprint"] == outcome.fingerprint


LOCAL_AND_ALONE = rs.EngineConfig(accumulation="local", mirrors=False)


@pytest.mark.long  # a step is left out after its gradients are added, in any mode
@pytest.mark.parametrize(
    "engine", [LOCAL_AND_ALONE, rs.EngineConfig(accumulation="local"), rs.EngineConfig(mirrors=False)]
)
def test_leaving_out_gives_the_same_bits_in_every_mode(engine: rs.EngineConfig) -> None:
    assert run(2, [(1, 2), (3, 0), (3, 2)], "skip", engine=engine).bits == skipping().bits


@pytest.mark.parametrize(
    "kill",
    [
        (0, 3, "agree"),
        pytest.param((1, 2, "backward"), marks=pytest.mark.long),
        pytest.param((1, 1, "snapshot"), marks=pytest.mark.long),
        pytest.param((2, 4, "forward"), marks=pytest.mark.long),
    ],
)
def test_a_worker_lost_around_a_step_that_is_left_out_changes_no_bit(kill: tuple[int, int, str]) -> None:
    outcome = run(3 if kill[0] == 2 else 2, [(1, 2), (3, 0), (3, 2)], "skip", kills=[kill])
    assert outcome.of("recovery")
    assert outcome.bits == skipping().bits
    assert {step: (what, microbatches) for step, what, microbatches in left_out(outcome)} == {
        1: ("loss", [2]),
        3: ("loss", [0, 2]),
    }


def test_too_many_steps_in_a_row_that_are_left_out_end_the_run_with_the_first_cause() -> None:
    bad = [(step, step % 4) for step in (2, 3, 4)]
    with pytest.raises(
        NonFiniteLoss, match=r"3 steps in a row \(2 to 4\).*max_skipped_steps=2; the first: step 2: .*2"
    ):
        run(1, bad, "skip", max_skipped_steps=2)
    assert run(1, bad, "skip", max_skipped_steps=3).losses


@cache
def rewinding() -> Outcome:
    return run(1, [(4, 2)], "rewind", save_every=2, steps=5)


@pytest.mark.long  # in the test of a lost worker below the same run goes back
@pytest.mark.parametrize(("accumulation", "workers"), list(product(("sharded", "local"), (1, 2, 3))))
def test_a_rewind_goes_back_to_the_checkpoint_and_past_the_data_with_the_same_bits_at_every_size(
    workers: int, accumulation: Any
) -> None:
    engine = rs.EngineConfig(accumulation=accumulation)
    outcome = run(workers, [(4, 2)], "rewind", save_every=2, steps=5, engine=engine)
    (rewind,) = outcome.of("rewind")
    assert (rewind["step"], rewind["to_step"], rewind["skip_samples"]) == (4, 2, 2 * BATCH)
    assert outcome.bits == rewinding().bits
    assert all(math.isfinite(loss) for loss in outcome.losses)


def test_without_a_checkpoint_a_rewind_goes_back_to_the_start() -> None:
    outcome = run(1, [(2, 1)], "rewind", steps=3)
    (rewind,) = outcome.of("rewind")
    assert (rewind["step"], rewind["to_step"], rewind["skip_samples"]) == (2, 0, 2 * BATCH)
    assert all(math.isfinite(loss) for loss in outcome.losses)


@pytest.mark.parametrize(
    "kill",
    [
        (1, 3, "form"),
        pytest.param((1, 5, "backward"), marks=pytest.mark.long),
        pytest.param((2, 5, "agree"), marks=pytest.mark.long),
    ],
)
def test_a_worker_lost_after_a_rewind_does_not_undo_it(kill: tuple[int, int, str]) -> None:
    outcome = run(3 if kill[0] == 2 else 2, [(4, 2)], "rewind", save_every=2, steps=5, kills=[kill])
    (rewind,) = outcome.of("rewind")
    assert (rewind["step"], rewind["to_step"], rewind["skip_samples"]) == (4, 2, 2 * BATCH)
    assert outcome.of("worker_lost")
    assert outcome.bits == rewinding().bits
    assert all(math.isfinite(loss) for loss in outcome.losses)


def test_the_second_time_at_the_same_checkpoint_ends_the_run_and_names_both() -> None:
    with pytest.raises(NonFiniteLoss, match=r"(?s)^step 3: .*gone back to step 2 before.* of step 4: "):
        run(1, [(4, 2), (5, 1)], "rewind", save_every=2, steps=6)


class Committed(Tokens):
    """Samples that exist only when a checkpoint does: sample -> a file that a listener makes."""

    def __init__(self, seen: Mapping[int, Path]) -> None:
        super().__init__()
        self._seen = seen

    def __getitem__(self, index: int) -> Any:
        if index in self._seen:
            wait_until(self._seen[index].exists, "the checkpoint is committed")
        return super().__getitem__(index)


def test_after_a_newer_checkpoint_the_run_may_go_back_again_and_the_report_shows_that_nothing_was_lost(
    tmp_path: Path,
) -> None:
    from raysharded.report import load

    class Listener(Collector):
        def __call__(self, kind: str, fields: dict[str, Any]) -> None:
            Collector.__call__(self, kind, fields)
            if kind == "checkpoint":
                (tmp_path / f"committed {fields['step']}").touch()

    task = Diverging([first_sample_of(4), first_sample_of(9)])
    url = str(tmp_path / "run")
    seen = {first_sample_of(8): tmp_path / "committed 4", first_sample_of(9): tmp_path / "committed 6"}
    data = Committed(seen)  # read in the steps 6 and 7, after two steps' data were skipped
    job = make_job(
        url,
        task=task,
        microbatches=MICROBATCHES,
        steps=7,
        engine=rs.EngineConfig(prefetch=False),  # no process that reads has to start
        save_every=2,
        on_non_finite="rewind",
        data=data,
    )
    listener = Listener()
    metadata = {"batch": {"global_batch_size": BATCH, "microbatch_size": 2, "seed": SEED}, "reduction": "exact"}
    driver = make_driver(job, make_limits(job, 1), listener, metadata=metadata)
    driver.run()
    rewinds = [fields for kind, fields in listener.entries if kind == "rewind"]
    assert [(fields["step"], fields["to_step"]) for fields in rewinds] == [(4, 2), (7, 6)]
    report = load(url)
    assert report.ledger is not None
    assert report.ledger.steps_checked == 7
    assert report.ok, report.as_dict()
    assert [(span.first_step, span.last_step, span.skipped) for span in report.summary.spans] == [
        (1, 2, 0),
        (3, 6, 2 * BATCH),
        (7, 7, 3 * BATCH),
    ]


def test_a_resumed_run_continues_past_the_data_that_was_skipped(tmp_path: Path) -> None:
    url, task = str(tmp_path / "run"), Diverging([first_sample_of(4)])
    first = make_job(url, task=task, microbatches=MICROBATCHES, steps=4, save_every=2, on_non_finite="rewind")
    make_driver(first, make_limits(first, 1), Collector()).run()
    then = make_job(url, task=task, microbatches=MICROBATCHES, steps=5, save_every=2, on_non_finite="rewind")
    listener = Collector()
    driver = make_driver(then, make_limits(then, 1), listener)
    driver.restore()
    assert driver.state.decisions.skips == ((2, 2 * BATCH),)
    state = driver.run()
    assert state.result_fingerprint == rewinding().fingerprint
    assert sorted(listener.numbers) == [5]


class Broken(SmallTask):
    """A weight of the first model is NaN."""

    def build_model(self) -> torch.nn.Module:
        model = super().build_model()
        with torch.no_grad():
            model.get_parameter("embedding.weight").fill_(math.nan)
        return model


@pytest.mark.parametrize(("policy", "workers"), tried_each_time([("skip", 1)], [("stop", 2), ("skip", 1)]))
def test_weights_that_are_not_finite_are_named_with_the_way_out(policy: Any, workers: int) -> None:
    told = r"step 1: the loss is nan .*: 'embedding\.weight' has weights that are not finite before the step; give them"
    with pytest.raises(NonFiniteLoss, match=told):
        train(workers, task=Broken(), microbatches=MICROBATCHES, steps=2, on_non_finite=policy)


def test_the_first_step_is_not_advised_to_lower_the_rate() -> None:
    with pytest.raises(NonFiniteLoss, match=r"look at the model's forward, and at the data of this step\. Or let"):
        run(1, [(1, 2)], "stop", steps=1)
