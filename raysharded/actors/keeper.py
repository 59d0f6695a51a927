"""What a worker keeps of the others' state in a generation: a mirror, or parity blocks."""

from __future__ import annotations

from raysharded.actors.mirror import Keeper, Mirror
from raysharded.actors.parity import ParityKeeper
from raysharded.actors.place import Place
from raysharded.actors.process_group import Groups
from raysharded.actors.shards import ShardStore


def keeper_of(place: Place, groups: Groups, store: ShardStore) -> Keeper:
    """Parity where that is wanted and there are workers enough, or else a mirror."""
    if place.parity is not None and place.has_parity:
        return ParityKeeper(place, place.parity, groups, store)
    return Mirror(place, groups, store)
