"""Every mistake ends with one clear error, and leaves no process and no slot behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.data.pack import pack
from raysharded.errors import ClusterError, ConfigError, DataError, InexactError, NonFiniteLoss, StorageError, TaskError
from raysharded.testing import processes
from tests.ray.leftovers import assert_no_slot_is_leaked
from tests.training.harness import GptTask, Tokens

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


class Raises(GptTask):
    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        raise KeyError("no such column")


class GivesNan(GptTask):
    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        loss = super().loss(model, batch)
        assert isinstance(loss, rs.Loss)
        return rs.Loss(loss.total * float("nan"), loss.weight)


class WithBatchNorm(GptTask):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def trainer(
    folder: Path, task: rs.Task | None = None, data: Any = None, workers: int = 1, **scaling: Any
) -> rs.ElasticTrainer:
    return rs.ElasticTrainer(
        task=task or GptTask(),
        data=data or Tokens(),
        batch=rs.BatchConfig(global_batch_size=4, microbatch_size=1),
        scaling=rs.ScalingConfig(num_workers=workers, **scaling),
        run=rs.RunConfig(name="wrong", storage_path=str(folder), max_steps=2),
    )


def fit(folder: Path, *objects: Any, **settings: Any) -> None:
    """Train on Ray."""
    trainer(folder, *objects, **settings).fit(progress=False)


def test_a_loss_that_raises_shows_the_users_traceback_once(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"Raises.loss in step 1.*KeyError: 'no such column'") as caught:
        fit(tmp_path, Raises(), workers=2)  # the other one is freed
    assert 'raise KeyError("no such column")' in caught.value.user_traceback
    assert_no_slot_is_leaked()


def test_a_loss_of_nan_is_named_with_its_step(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLoss, match=r"step 1: the loss is nan.*look at the model.s forward"):
        processes.fit(trainer(tmp_path, GivesNan()))


def test_batch_norm_is_refused_in_exact_mode_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(InexactError, match=r"BatchNorm1d.*Use LayerNorm"):
        processes.fit(trainer(tmp_path, WithBatchNorm()))


def test_more_workers_than_the_cluster_has_are_refused_with_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ClusterError, match=r"[012] of at least 3 workers.*Each worker needs 4 CPU \(the cluster has 8"):
        fit(tmp_path, workers=3, cpus_per_worker=4.0, start_timeout_s=3.0)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told[0] == (
        "the run needs at least 3 workers with 4 CPU each, and the cluster as it is has 8 CPU: enough for 2. The run "
        "waits up to 3.00 s for nodes to be added (ScalingConfig.start_timeout_s)."
    )
    assert_no_slot_is_leaked()


def test_storage_that_cannot_be_written_is_named_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StorageError, match="file/runs"):
        fit(tmp_path / "file" / "runs")
    assert_no_slot_is_leaked()


def test_a_data_file_cut_short_is_named(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("many words " * 5000)
    pack([str(text)], str(tmp_path / "packed"))
    part = next((tmp_path / "packed").glob("*.tokens"))
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(DataError, match=part.name):
        processes.fit(trainer(tmp_path, data=rs.TokenDataset(str(tmp_path / "packed"), seq_len=8)))


def test_an_unknown_field_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"RunConfig has no field 'max_step': did you mean 'max_steps'"):
        rs.RunConfig(name="a", storage_path="b", max_step=3)  # type: ignore[call-arg]
