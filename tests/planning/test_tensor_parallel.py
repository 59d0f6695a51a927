"""Plans with tensor parallelism, without workers: against the real layout and build; and refusals."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

import raysharded as rs
from raysharded.actors.model.sharded_model import local_of
from raysharded.actors.shards.device_state import state_spec
from raysharded.errors import ConfigError
from raysharded.layout import Mesh, shard_map
from raysharded.layout.mesh import layouts_of, mesh_of
from raysharded.planning.memory.footprint import Setting, local_setting, snapshot_bytes, worker_memory
from raysharded.planning.memory.units import unit_bytes
from raysharded.planning.search import Cluster, options, refuse_what_fits_nowhere, with_plan
from raysharded.planning.tracing.measurement import measure
from raysharded.planning.traffic.worker_traffic import worker_traffic
from raysharded.run.group_planner import GroupPlanner
from tests.actors.fake_group import fake_mesh
from tests.actors.model.test_tensor_parallel import build
from tests.cases import tried_each_time
from tests.training.harness import VOCABULARY, GptTask, Tokens
from tests.training.llama import LlamaTask

SAMPLES = [Tokens()[0], Tokens()[1]]


def planned(degree: int, *, checkpointing: bool = False) -> Setting:
    return _planned(degree, rs.EngineConfig(activation_checkpointing=checkpointing))


@lru_cache
def _planned(degree: int, engine: rs.EngineConfig) -> Setting:
    shapes, trace = measure(LlamaTask(), engine, SAMPLES, degree=degree)
    return Setting(shapes=shapes, num_microbatches=8, engine=engine, trace=trace, degree=degree)


@pytest.mark.parametrize(
    ("data_shards", "degree"), tried_each_time([(2, 3)], of=[(1, 2), (2, 2), (3, 2), (2, 3), (1, 6)])
)
def test_a_worker_holds_what_a_real_one_does(data_shards: int, degree: int) -> None:
    setting, shards = planned(degree), data_shards * degree
    for rank in range(shards):
        sharded = build(LlamaTask(), data_shards, degree, rank)
        local = local_setting(setting, rank % degree)
        columns = local.shapes.columns
        held = dict(
            zip([p.name for p in local.shapes.parameters], columns.held(data_shards, rank // degree), strict=True)
        )
        assert held == {name: local_of(param).numel() for name, param in sharded.parameters.items()}
        padded = unit_bytes(local.shapes, data_shards, setting.engine).shard.sum()
        assert padded == sum(_memory_bytes(param) for param in sharded.parameters.values())
        tensors = {t.name: (t.dtype, t.shape) for t in setting.shapes.state_at(degree).tensors}
        spec = state_spec(tensors, sharded.cuts)
        assert snapshot_bytes(setting.shapes, shards, rank, degree) == shard_map(spec, shards, rank, degree).size_bytes


def _memory_bytes(param: torch.Tensor) -> int:
    return local_of(param).untyped_storage().nbytes()


def test_a_state_that_could_be_cut_is_listed_in_strips_without_tensor_parallelism_too() -> None:
    assert any(tensor.strips > 1 for tensor in planned(1).shapes.state.tensors)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_group_shares_the_computation_and_what_it_sends_is_that_of_its_styles(checkpointing: bool) -> None:
    alone, both = (planned(degree, checkpointing=checkpointing).trace for degree in (1, 2))
    assert alone is not None
    assert both is not None
    assert alone.tensor_bytes == 0
    assert both.flops == pytest.approx(alone.flops / 2, rel=0.01)
    assert both.peak < alone.peak
    tokens, width, vocabulary = 2 * (len(SAMPLES[0]) - 1), 48, 67
    hidden = tokens * width * 4
    # all-reduces in a ring, which for 2 workers send once what is given: the embedding's sum, in forward o and down of
    # both blocks, in backward the sums of the gradients that go into q, k, v, gate and up, and into the head; o's again
    # if blocks are computed again (down's result is not needed); and the head's columns are gathered
    sums = 1 + 2 * 2 + 2 * 5 + 1 + (2 if checkpointing else 0)
    gathered = tokens * -(-vocabulary // 2) * 4
    assert both.tensor_bytes == sums * hidden + gathered


def test_the_groups_traffic_stays_on_a_node_that_has_whole_ones() -> None:
    setting = planned(2)
    near, far = (worker_traffic(setting, mesh_of(1, 8, 2), workers_per_node=n) for n in (4, 1))
    assert near.sent == {**far.sent, "reduction": near.sent["reduction"]}  # where several add first it is another
    assert near.between["tensor"] == 0
    assert far.between["tensor"] == far.sent["tensor"] > 0
    assert near.between["all_gather"] == near.sent["all_gather"] // 2  # two nodes in a ring of four
    assert 0 < near.between["reduction"] < near.sent["reduction"]


def test_layouts_are_of_whole_groups() -> None:
    assert list(map(str, layouts_of(12, 2))) == ["1x6x2", "2x3x2", "3x2x2", "6x1x2"]
    assert layouts_of(4, 2)[0].apart == 2
    found = options(planned(2), Cluster(workers=4))
    assert [str(each.layout) for each in found] == ["1x2x2", "2x1x2"]
    assert [each.idle for each in found] == [0, 0]
    with pytest.raises(
        ConfigError, match=r"7 workers are not a multiple of the tensor parallel degree 2; take 6 or 8\."
    ):
        layouts_of(7, 2)


def test_a_mesh_of_another_degree_is_refused() -> None:
    with pytest.raises(ConfigError, match="1x4 has a tensor parallel degree of 1, but the model was measured with 2"):
        worker_memory(planned(2), Mesh(shards=4))


def test_a_process_that_has_groups_is_refused() -> None:
    with fake_mesh(2), pytest.raises(ConfigError, match="in a process without torch"):
        measure(LlamaTask(), rs.EngineConfig(), SAMPLES, degree=2)


def test_a_task_without_styles_is_refused() -> None:
    with pytest.raises(ConfigError, match="GptTask has no parallelize"):
        measure(GptTask(), rs.EngineConfig(), SAMPLES, degree=2)


class InSequence(nn.Module):
    """A feed-forward between norms, of any part of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(16), nn.Linear(16, 32), nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(self.up(self.norm(x)).relu())
        return y


class SequenceTask(LlamaTask):
    """With sequence parallelism: between the blocks each worker has a part of every sample."""

    def build_model(self) -> nn.Module:
        layers = OrderedDict(tokens=nn.Embedding(VOCABULARY, 16), block=InSequence(), head=nn.Linear(16, VOCABULARY))
        return nn.Sequential(layers)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Mapping[str, ParallelStyle]:
        return {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "block.norm": SequenceParallel(),
            "block.up": ColwiseParallel(input_layouts=Shard(1)),
            "block.down": RowwiseParallel(output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }


def test_collectives_of_sequence_parallelism_are_counted_and_the_sums_of_what_it_leaves_whole() -> None:
    _, trace = measure(SequenceTask(), rs.EngineConfig(), SAMPLES, degree=2)
    tokens = 2 * (len(SAMPLES[0]) - 1)
    part = tokens * 16 * 4 // 2  # a worker's, of the sequence
    scatters = (
        1 + 1
    ) + 2  # of the sums after the embedding and the block; in backward of those that go into up and head
    gathers = 2 + (1 + 1)  # into up and head; in backward out of the block and the embedding
    head = tokens * -(-VOCABULARY // 2) * 4
    norm = 16 * 4
    assert trace.tensor_bytes == (scatters + gathers) * part + head + norm


def test_a_run_with_memory_given_is_planned_in_whole_groups() -> None:
    setting = planned(2)
    little, much = (worker_memory(setting, mesh_of(1, shards, 2)).device for shards in (8, 4))
    memory = int((little + much) / 2 / 0.9)
    scaling = rs.ScalingConfig(
        num_workers=(4, 9), shard_group_size=None, tensor_parallel_degree=2, memory_per_worker=memory
    )
    refuse_what_fits_nowhere(setting, scaling, None)
    few = rs.ScalingConfig(num_workers=4, tensor_parallel_degree=2, memory_per_worker=memory)
    with pytest.raises(ConfigError, match=r"of 4 workers fits: 1x2x2 needs .*; the nearest that fits is 1x\dx2"):
        refuse_what_fits_nowhere(setting, few, None)


def test_only_meshes_of_whole_groups_are_in_the_tables() -> None:
    scaling = rs.ScalingConfig(
        num_workers=(2, 8), shard_group_size=4, tensor_parallel_degree=2, memory_per_worker=1 << 30
    )
    trainer = rs.ElasticTrainer(
        task=LlamaTask(),
        data=Tokens(),
        batch=rs.BatchConfig(global_batch_size=16, microbatch_size=2),
        scaling=scaling,
        run=rs.RunConfig(name="it", storage_path="runs", max_steps=1),
    )
    grouping = GroupPlanner(trainer.spec()).grouping()
    assert grouping is not None
    assert [len(row) for row in grouping.step_s] == [0, 4, 0, 2, 0, 1, 0, 1]
    assert all(all(row) for row in grouping.fits)
    assert grouping == with_plan(grouping, planned(2), scaling)
