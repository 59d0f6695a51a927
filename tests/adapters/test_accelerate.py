"""An ordinary script of `accelerate` in a session: the bits of one worker after losses, the plain script's results."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.data.loader import MicrobatchLoader
from raysharded.errors import RayshardedError
from raysharded.ids import WorkerId
from raysharded.testing import Fault
from tests.adapters import accelerate_programs
from tests.adapters.accelerate_programs import Script
from tests.adapters.programs import MICROBATCHES, STEPS, classifier, run, sentences
from tests.cases import tried_each_time
from tests.training.harness import Outcome, make_job

pytestmark = pytest.mark.procs
PROGRAM = re.escape(accelerate_programs.__file__)


@cache
def by_one_worker() -> Outcome:
    return run(1, Script(), sentences())


LOSSES = [
    (2, [(1, 2, "forward")], range(len(sentences()))),
    (3, [(1, 2, "backward"), (2, 3, "snapshot")], sentences()),
    (4, [(1, 2, "backward"), (2, 3, "snapshot"), (3, 5, "agree")], sentences()),
    (4, [(1, 3, "apply"), (2, STEPS, "apply")], range(len(sentences()))),
]


@pytest.mark.long  # a loss in an update is tried each time, and one in a forward with the results of the plain script
@pytest.mark.parametrize(
    ("workers", "kills", "data"), LOSSES, ids=["two workers", "samples", "four workers", "numbers of samples"]
)
def test_losses_change_no_bit(workers: int, kills: list[tuple[int, int, str]], data: Any) -> None:
    assert run(workers, Script(), data, kills=kills).bits == by_one_worker().bits


def undone_in(step: int) -> dict[str, Any]:
    """A loss that undoes a step behind its end: it is known while the survivor is in the update."""
    slow = Fault(worker=WorkerId(0), step=step, phase="apply", kind="slow", seconds=1.0)
    return {"kills": [(1, step, "apply")], "faults": [slow]}


@pytest.mark.parametrize("schedule", tried_each_time(["behind"], ["behind", "counted"]))
def test_a_schedule_behind_accumulate_is_done_again_with_its_step(schedule: str, tmp_path: Path) -> None:
    """The step that is undone has run to its end; a script counts it once."""
    numbers = range(len(sentences()))  # in place of the samples
    found = run(2, Script(str(tmp_path), schedule=schedule), numbers, **undone_in(2))
    assert found.bits == by_one_worker().bits
    counts = [line.split()[0] for line in (tmp_path / "evaluations").read_text().splitlines()]
    assert str(STEPS) in counts, "by the worker that was there from the beginning"


@pytest.mark.long  # one behind `accumulate` is tried each time
def test_a_schedule_of_epochs_is_done_again_with_its_step() -> None:
    script = Script(schedule="of epochs")
    assert run(2, script, sentences(), **undone_in(3)).bits == run(1, script, sentences()).bits


FAR_BACK = [
    [(1, 3, "apply")],
    [(1, 3, "apply"), (2, 3, "apply")],
    [(1, 3, "apply"), (2, 5, "backward"), (3, 5, "backward")],
]


@pytest.mark.parametrize(
    "kills", tried_each_time(FAR_BACK[:1], FAR_BACK), ids=["without mirrors", "at once", "one by one"]
)
def test_lines_behind_accumulate_that_cannot_be_brought_back_run_again(kills: list[tuple[int, int, str]]) -> None:
    """Weights are changed in the step of the first loss. It takes the run back to its start where nobody has a mirror,
    and so do two at once."""
    samples = 2 * STEPS * MICROBATCHES
    script, data = Script(schedule="with weights", samples=samples), sentences(samples)
    found = run(1 + len(kills), script, data, kills=kills, engine=rs.EngineConfig(mirrors=len(kills) > 1))
    assert "start" in {fields["source"] for fields in found.of("generation")[1:]}
    assert found.bits == run(1, script, data).bits


@pytest.mark.parametrize(
    ("mistake", "given", "named"),
    [
        (
            "no accumulate",
            {},
            (
                rf"^{PROGRAM}:\d+: accelerator\.backward\(loss\) belongs into `with accelerator\.accumulate\(model\):"
                r"`\. Put that line around the body of the loop over the training data"
            ),
        ),
        (
            "by a count",
            {},
            (
                r"step 1 ended without optimizer\.step\(\): in `with accelerator\.accumulate\(model\):` call it for "
                r"each microbatch, or `if accelerator\.sync_gradients:`, and not by a count of the script"
            ),
        ),
        (
            "skips a batch",
            {},
            (
                rf"^{PROGRAM}:\d+: .* in step 1, microbatch 1: call accelerator\.backward\(loss\) once for each batch, "
                r"and leave none out, as by `continue`"
            ),
        ),
        ("two losses", {}, rf"^{PROGRAM}:\d+: accelerator\.backward\(loss\) was called twice; add the losses, and"),
        (
            "an update behind",
            {},
            rf"^{PROGRAM}:\d+: optimizer\.step\(\) belongs into `with accelerator\.accumulate\(model\):`, behind acc",
        ),
        (
            "a break",
            {},
            (
                r"Script returned before the run's last step: the loop over accelerator\.epochs\(num_epochs\) trains "
                r"until then\. A script that leaves it by `break`, as at max_train_steps, needs that number in RunC"
            ),
        ),
        (
            "another model",
            {},
            rf"^{PROGRAM}:\d+: accelerator\.prepare was given another model than session\.build has returned",
        ),
        (
            "moves the model",
            {},
            (
                rf"^{PROGRAM}:\d+: the values of .* were read, or moved to a device: .* between session\.build and "
                r"accelerator\.prepare, .*\. A line that moves the model, such as model\.to\(device\): delete it"
            ),
        ),
        (
            "a plain Accelerator",
            {},
            rf"^{PROGRAM}:\d+: the values .* In a session an Accelerator is elastic\(Accelerator, session\)",
        ),
        pytest.param(
            "evaluates on rank 0",
            {"workers": 2},
            "step 3: 1 of 2 workers call the model's forward outside the microbatches, and the others do not",
            marks=pytest.mark.long,  # tests/session/test_lost_changes.py has it
        ),
        (
            "",
            {"data": range(12)},
            (
                r"ElasticTrainer\(data=\.\.\.\) has 12 samples, and the dataset of the first data loader, .* has 24\. "
                r".*give ElasticTrainer\(data=range\(24\)\)"
            ),
        ),
        (
            "",
            {"steps": STEPS // 2},
            (
                r"accelerator\.epochs\(2\) is 6 steps of 8 of 24 samples, and RunConfig\(max_steps=3\) ends before its "
                r"last epoch: give RunConfig\(max_steps=6\), or accelerator\.epochs\(1\)"
            ),
        ),
        (
            "",
            {"steps": STEPS + 1},
            (
                r"accelerator\.epochs\(2\) is 6 steps of 8 of 24 samples, and RunConfig\(max_steps=7\) has more: give "
                r"RunConfig\(max_steps=6\), or accelerator\.epochs\(3\)"
            ),
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else (value[:13] or "none"),
)
def test_a_mistake_ends_with_one_sentence_of_the_script(mistake: str, given: dict[str, Any], named: str) -> None:
    settings: dict[str, Any] = {"workers": 1, "data": sentences()}
    with pytest.raises(RayshardedError, match=named):
        run(script=Script(mistake=mistake), **(settings | given))


def test_a_cut_epoch_a_schedule_of_microbatches_and_a_gathered_loss_are_remarked_on() -> None:
    found = run(1, Script(mistake="a schedule of microbatches"), sentences(), steps=STEPS - 1)
    remarks = "\n".join(remark for step in found.of("step") for remark in step.get("remarks", ()))
    assert "RunConfig(max_steps=5) ends within the last epoch, as a script with max_train_steps=5 does" in remarks
    assert "num_training_steps=24, and the run has 5 steps: it steps once in each" in remarks
    assert remarks.count("the script gathers, or reduces, values that are not of held-out data") == 1


def test_the_results_are_those_of_the_plain_script(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from safetensors.torch import load_file

    loader = MicrobatchLoader(sentences(), make_job("", microbatches=MICROBATCHES).batch)
    keys = [(step, index) for step in range(1, STEPS + 1) for index in range(MICROBATCHES)]
    ordered = [sample for key in keys for sample in loader.load(*key).samples]
    script = Script(str(tmp_path), dropout=0.0)
    plain = Script(dropout=0.0)
    ((_, right, loss, *counted),) = plain.train(
        Accelerator(gradient_accumulation_steps=MICROBATCHES, cpu=True), classifier(0.0), ordered, shuffle=False
    )
    run(2, script, sentences(), kills=[(1, 4, "forward")])
    lines = (tmp_path / "evaluations").read_text().splitlines()
    assert lines
    for line in lines:
        found = ast.literal_eval(line.partition(" ")[2])[-1]
        assert found[1] == right
        assert found[2] == pytest.approx(loss, abs=1e-5)
        assert found[3:] == tuple(counted)
        assert counted[:2] == [7, right]
    assert (tmp_path / "once").read_text().splitlines() == lines[:1]
    saved, kept = (load_file(tmp_path / name) for name in ("saved/model.safetensors", "model.safetensors"))
    assert saved.keys() == kept.keys()
    assert all(saved[name].equal(kept[name]) for name in saved)
