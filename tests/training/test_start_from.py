"""A run that begins with the weights of another checkpoint: the same bits at every size, in every form of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded import checkpoint
from raysharded.checkpoint.interop import import_dcp, import_huggingface, place_of
from raysharded.errors import CheckpointError, ConfigError, NoCheckpoint, RayshardedError
from raysharded.ids import WorkerId
from raysharded.journal.log import read
from raysharded.run.start_from import with_initial_weights
from raysharded.testing import Fault, FaultPlan
from raysharded.testing.processes import ProcessLauncher
from tests.canary import connections
from tests.cases import tried_each_time
from tests.checkpoint.interop.ranks import bits, dcp
from tests.training.harness import Gpt, GptTask, samples

pytestmark = pytest.mark.procs

STEPS = 2


class Scaled(Gpt):
    """Has one parameter more than the checkpoint that it starts from."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.75))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.scale


class Still(GptTask):
    """Leaves the weights as they are."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.0)


class Scaling(GptTask):
    def build_model(self) -> nn.Module:
        return Scaled()


class StillScaled(Still):
    def build_model(self) -> nn.Module:
        return Scaled()


def trainer(folder: Path, name: str, workers: int, start: Any = None, task: rs.Task | None = None, **run: Any) -> Any:
    return rs.ElasticTrainer(
        task=task or GptTask(),
        data=samples(),
        batch=rs.BatchConfig(global_batch_size=6, microbatch_size=2, seed=5),
        scaling=rs.ScalingConfig(num_workers=(1, workers)),
        run=rs.RunConfig(name=name, storage_path=folder, max_steps=STEPS, start_from=start, **run),
    )


def fitted(made: rs.ElasticTrainer) -> rs.Result:
    return made.start_with(ProcessLauncher).wait()


def pretrained(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Path, nn.Module]:
    """A model whose weights no task here would draw, saved in the usual way."""
    torch.manual_seed(99)
    model = Gpt()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.to(dtype))
        for buffer in model.buffers():
            buffer.mul_(2)
    state = {name: value.to(dtype) for name, value in model.state_dict().items()}
    checkpoint.save(folder / "pretrained", {"model": state}, step=0)
    return folder / "pretrained", model


def first_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Weights of a run that did no update: those of its last checkpoint."""
    opened = checkpoint.open(folder)
    return {name: opened.read(name) for name in opened.tensors if name.startswith(("model.", "buffer."))}


@pytest.mark.parametrize(
    ("dtype", "workers"), tried_each_time([(torch.bfloat16, 2)], [(torch.float32, 2), (torch.bfloat16, 2)])
)
def test_weights_and_buffers_are_those_of_the_checkpoint(tmp_path: Path, dtype: torch.dtype, workers: int) -> None:
    uri, model = pretrained(tmp_path, dtype)
    fitted(trainer(tmp_path / "runs", "still", workers, uri, Still()))
    found = first_weights(tmp_path / "runs" / "still")
    for name, value in model.named_parameters():
        assert torch.equal(found[f"model.{name}"], value.detach()), name
    assert torch.equal(found["buffer.positions"], model.get_buffer("positions").to(dtype).float())


def from_hugging_face(folder: Path, model: nn.Module) -> None:
    """A folder as `save_pretrained` writes one: two files and more, with an index, and no tied head."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    (folder / "hf").mkdir()
    huggingface_hub.save_torch_state_dict(state, folder / "hf", max_shard_size="8KB")
    assert (folder / "hf" / "model.safetensors.index.json").exists()
    import_huggingface(place_of(folder / "hf"), place_of(folder / "imported"))


def from_dcp(folder: Path, model: nn.Module) -> None:
    """A checkpoint with an optimizer and a number beside the model."""
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    import_dcp(place_of(folder / "dcp"), place_of(folder / "imported"))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("imported", tried_each_time([from_hugging_face], [from_hugging_face, from_dcp]))
def test_weights_and_buffers_are_those_that_were_imported(
    tmp_path: Path, imported: Callable[[Path, nn.Module], None]
) -> None:
    _, model = pretrained(tmp_path)
    imported(tmp_path, model)
    fitted(trainer(tmp_path / "runs", "still", 1, tmp_path / "imported", Still()))
    found = first_weights(tmp_path / "runs" / "still")
    assert found.keys() == {f"model.{name}" for name, _ in model.named_parameters()} | {"buffer.positions"}
    for name, value in found.items():
        assert bits(value) == bits(model.state_dict()[name.partition(".")[2]]), name


@pytest.mark.parametrize(("workers", "kill"), tried_each_time([(2, True)], [(2, True), (3, False), (3, True)]))
def test_the_same_bits_at_every_size_and_after_a_kill(tmp_path: Path, workers: int, kill: bool) -> None:
    uri, _ = pretrained(tmp_path)
    alone = fitted(trainer(tmp_path / "runs", "alone", 1, uri))
    made = trainer(tmp_path / "runs", "more", workers, str(uri))
    plan = FaultPlan(faults=(Fault(worker=WorkerId(1), step=1, phase="backward"),), folder=str(tmp_path))
    made.faults = plan if kill else None
    assert fitted(made).fingerprint == alone.fingerprint
    assert not kill or plan.fired(plan.faults[0])
    assert fitted(trainer(tmp_path / "runs", "drawn", 1)).fingerprint != alone.fingerprint


def begun_with(result: rs.Result) -> str:
    """The remark about its weights with which the run began."""
    steps = [entry for entry in read(checkpoint.open_storage(result.url)) if entry["kind"] == "step"]
    (told,) = (text for text in steps[0]["remarks"] if "start_from" in text)
    assert not any("start_from" in text for entry in steps[1:] for text in entry.get("remarks", ()))
    return str(told)


@pytest.mark.parametrize("workers", tried_each_time([1], [1, 2]))
def test_a_line_says_at_the_start_what_is_taken_and_what_is_left_out(tmp_path: Path, workers: int) -> None:
    runs = tmp_path / "runs"
    parent = fitted(trainer(runs, "scaled", 1, task=Scaling()))
    tensors = checkpoint.open(parent.checkpoint).tensors
    shared = sum(name.startswith(("model.", "buffer.")) for name in tensors) - 1
    others = sorted(name for name in tensors if not name.startswith(("model.", "buffer.")))
    told = begun_with(fitted(trainer(runs, "plain", workers, parent.url)))
    assert told == (
        f"RunConfig.start_from: {shared} of {shared} parameters and buffers are those of {parent.url}. Left out: 1 of "
        f"it that the model lacks, first 'model.scale'. Left out: {len(others)} other tensors (of an optimizer, or "
        f"values), first {others[0]!r}. The optimizer, the count of steps and the data begin anew."
    )
    plain = checkpoint.open_storage(str(runs / "plain")).url
    assert begun_with(fitted(trainer(runs, "again", workers, plain, Scaling()))).startswith(
        f"RunConfig.start_from: {shared} of {shared + 1} parameters and buffers are those of {plain}. As in a new run: "
        "1 that are not in it, first 'model.scale'. Left out: "
    )


def test_what_the_checkpoint_lacks_begins_as_in_a_new_run(tmp_path: Path) -> None:
    uri, model = pretrained(tmp_path)
    fitted(trainer(tmp_path / "runs", "more", 1, uri, StillScaled()))
    found = first_weights(tmp_path / "runs" / "more")
    assert found["model.scale"].item() == 0.75
    assert torch.equal(found["model.norm.weight"], model.get_parameter("norm.weight").detach())


def test_a_run_that_has_begun_keeps_the_checkpoint_that_it_began_with(tmp_path: Path) -> None:
    uri, _ = pretrained(tmp_path)
    made = trainer(tmp_path / "runs", "kept", 1, uri)
    fitted(made)
    storage = checkpoint.open_storage(made.url)
    (started,) = (entry for entry in read(storage) if entry["kind"] == "started")
    assert started["start_from"]["uri"] == str(uri)
    longer = replace(made.run, max_steps=STEPS + 1)
    made.run = replace(longer, start_from=None)
    assert fitted(made).steps == STEPS + 1
    made.run = replace(longer, start_from="elsewhere", max_steps=STEPS + 2)
    with pytest.raises(
        ConfigError, match=r"was started with start_from='.*pretrained' and is resumed with 'elsewhere'"
    ):
        fitted(made)


def test_a_journal_leads_a_resumed_run_to_no_strangers_server(tmp_path: Path) -> None:
    uri, _ = pretrained(tmp_path)
    own = trainer(tmp_path / "runs", "mine", 1, uri).spec()
    storage = checkpoint.open_storage(own.url)
    weights = with_initial_weights(own, storage, [], None).initial_weights
    assert weights is not None
    again = replace(own, run=replace(own.run, start_from=None))
    there = "http://127.0.0.1:9/weights"
    for place, spec in ((there, own), (there, again), (weights.url, own), (weights.url, again)):
        starts = [{"resumed_after_step": 0, "start_from": {**asdict(weights), "url": place}}]
        if place == there:
            with connections() as opened, pytest.raises(CheckpointError, match="it was not opened"):
                with_initial_weights(spec, storage, starts, None)
            assert opened == []
        else:
            assert with_initial_weights(spec, storage, starts, None).initial_weights == weights
    for damaged in ("weights", {"uri": str(uri)}, {**asdict(weights), "url": 7}):
        with pytest.raises(RayshardedError):
            with_initial_weights(again, storage, [{"resumed_after_step": 0, "start_from": damaged}], None)


def test_a_fork_begins_with_its_own_checkpoint_with_any_fate_of_the_source(tmp_path: Path) -> None:
    uri, _ = pretrained(tmp_path)
    made = trainer(tmp_path / "runs", "whole", 1, uri, checkpoint=rs.CheckpointConfig(every_steps=1, keep_last=9))
    run = made.start_with(ProcessLauncher)
    whole = run.wait()
    uri.rename(tmp_path / "moved")
    fork = run.fork("fork", 1)
    assert fork.wait().fingerprint == whole.fingerprint
    (started,) = (entry for entry in read(checkpoint.open_storage(fork.url)) if entry["kind"] == "started")
    assert (started["resumed_after_step"], started.get("start_from")) == (1, None)
    made.run = replace(made.run, name="fork", max_steps=STEPS + 1)
    assert fitted(made).steps == STEPS + 1


class Wider(GptTask):
    def build_model(self) -> nn.Module:
        model = Gpt()
        model.norm = nn.LayerNorm(3)
        return model


class Other(GptTask):
    def build_model(self) -> nn.Module:
        return nn.Sequential(Gpt())


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Wider(), r"'model.norm.(bias|weight)' has the shape \(16,\) in .*pretrained, \(3,\) in the model"),
        (
            Other(),
            r"none of the model's parameters is in .*pretrained. The model's first is 'model.0.*import --map",
        ),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path: Path, task: rs.Task, message: str) -> None:
    uri, _ = pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        fitted(trainer(tmp_path / "runs", "other", 1, uri, task))


@pytest.mark.parametrize(("file", "what"), [("model.safetensors", "Hugging Face"), (".metadata", "torch.distributed")])
def test_a_folder_of_another_library_is_refused_with_the_way_to_import_it(tmp_path: Path, file: str, what: str) -> None:
    (tmp_path / file).write_bytes(b"{}")
    with pytest.raises(NoCheckpoint, match=rf"It has files of {what}.*: `raysharded checkpoint import FOLDER NEW`"):
        checkpoint.open(tmp_path)


def test_a_place_without_a_checkpoint_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is nothing at"):
        fitted(trainer(tmp_path / "runs", "none", 1, tmp_path / "nothing"))
