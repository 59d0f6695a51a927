"""The layouts that fit, the choice and its reason, and the error where none does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import raysharded as rs
from raysharded.errors import ConfigError
from raysharded.layout import Mesh
from raysharded.planning.memory.footprint import Setting
from raysharded.planning.models.hf_config import parse_config
from raysharded.planning.search import Cluster, nearest, option, options, recommended, why_not, why_nothing_fits
from raysharded.planning.trace import empty_trace
from tests.planning.configs import LLAMA_8B

GIB = 1 << 30
SHAPES = parse_config(LLAMA_8B, "it").model()
SETTING = Setting(
    shapes=SHAPES,
    num_microbatches=64,
    engine=rs.EngineConfig(param_dtype="bfloat16"),
    trace=replace(empty_trace(len(SHAPES.units)), flops=6 * 8e9 * 4096),
    on_gpu=True,
)


def cluster(workers: int, device_gib: float, **given: Any) -> Cluster:
    return Cluster(workers=workers, workers_per_node=8, device_memory=int(device_gib * GIB), headroom=0.0, **given)


def test_what_fits_is_what_is_below_the_limit() -> None:
    needed = option(SETTING, cluster(16, 1000), Mesh(replicas=2, shards=8)).memory.device
    exactly = cluster(16, needed / GIB)
    assert option(SETTING, exactly, Mesh(replicas=2, shards=8)).fits
    less = replace(exactly, device_memory=needed - 1)
    found = option(SETTING, less, Mesh(replicas=2, shards=8))
    assert (found.fits, len(found.shortages)) == (False, 1)
    assert not option(SETTING, replace(exactly, headroom=0.01), Mesh(replicas=2, shards=8)).fits


def test_a_node_holds_the_snapshots_of_all_its_workers() -> None:
    found = option(SETTING, cluster(16, 1000, host_memory=GIB), Mesh(replicas=1, shards=16))
    assert found.node_host_bytes == 8 * found.memory.host
    assert "of host memory per node of 1.0 GiB" in found.shortages[0]


def test_with_memory_to_spare_and_a_slow_network_shard_groups_stay_on_a_node() -> None:
    many = replace(SETTING, num_microbatches=512)
    best = recommended(options(many, cluster(64, 1000, network_bandwidth=5e9)))
    assert best is not None
    assert best[0].layout == Mesh(replicas=8, shards=8)


def test_with_little_memory_the_recommended_layout_has_larger_groups_and_gives_the_reason() -> None:
    found = options(SETTING, cluster(64, 1000))
    (node,) = (each for each in found if each.layout.shards == 8)
    best = recommended(options(SETTING, cluster(64, (node.memory.device - 1) / GIB)))
    assert best is not None
    taken, reasons = best
    assert taken.layout.shards > 8
    assert taken.fits
    assert reasons[0].startswith("8x8 and more replicas do not fit: ")


def test_what_fits_nowhere_is_reported_with_the_numbers_and_the_nearest_that_fits() -> None:
    small = cluster(8, 20)
    other = nearest(SETTING, small)
    assert other is not None
    assert other.fits
    assert not option(SETTING, small, Mesh(replicas=1, shards=other.layout.shards - 1)).fits
    message = why_nothing_fits(SETTING, small, options(SETTING, small))
    assert message.startswith("no layout of 8 workers fits: 1x8 needs ")
    assert message.endswith(f"; the nearest that fits is {other.layout}, {other.layout.world_size} workers.")


def test_where_more_workers_do_not_help_it_names_what_takes_the_memory() -> None:
    tiny = cluster(8, 1)
    assert nearest(SETTING, tiny) is None
    assert "more workers do not help, as" in why_nothing_fits(SETTING, tiny, options(SETTING, tiny))


def test_a_layout_that_was_requested_and_does_not_fit_is_answered_with_the_nearest_that_does() -> None:
    found = options(SETTING, cluster(64, 1000))
    (node,) = (each for each in found if each.layout.shards == 8)
    small = cluster(64, (node.memory.device + 1) / GIB)
    wanted = option(SETTING, small, Mesh(replicas=64, shards=1))
    message = why_not(SETTING, small, wanted, options(SETTING, small))
    assert message.startswith("layout 64x1 needs ")
    assert message.endswith("; the nearest of as many workers that fits is 8x8.")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": 0}, "workers=0: give a whole number of 1 or more."),
        ({"device_memory": 0}, "device_memory=0: give a size above 0, such as 80GiB."),
        ({"headroom": 1.0}, "headroom=1.0: give a share of the memory from 0 to below 1, such as 0.1."),
        ({"flops": 0.0}, "flops=0.0: give a number above 0."),
    ],
)
def test_clusters_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Cluster(**({"workers": 8} | given))
    assert str(error.value) == message
