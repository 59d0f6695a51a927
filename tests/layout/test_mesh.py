"""The mesh: the members of each shard group, and the holders of each shard."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from raysharded.errors import ConfigError
from raysharded.layout import Mesh


@given(st.integers(1, 9), st.integers(1, 9))
def test_groups_and_holders_each_cover_every_rank_once(replicas: int, shards: int) -> None:
    mesh = Mesh(replicas=replicas, shards=shards)
    ranks = list(range(mesh.world_size))
    assert sorted(rank for replica in range(replicas) for rank in mesh.group(replica)) == ranks
    assert sorted(rank for shard in range(shards) for rank in mesh.holders(shard)) == ranks
    for rank in ranks:
        assert mesh.group(mesh.replica_of(rank))[mesh.shard_of(rank)] == rank
        assert mesh.holders(mesh.shard_of(rank))[mesh.replica_of(rank)] == rank


@pytest.mark.parametrize(("replicas", "shards"), [(0, 1), (1, 0), (-1, 2)])
def test_a_mesh_of_nobody_is_refused(replicas: int, shards: int) -> None:
    with pytest.raises(ConfigError, match="must be 1 or more"):
        Mesh(replicas=replicas, shards=shards)
