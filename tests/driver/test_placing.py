"""Where workers are started: shard groups together, and apart from each other."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, strategies as st

from raysharded.ray_backend.placement import choose_node


def placed(rooms: dict[str, int], group_size: int, count: int) -> Counter[str]:
    """Number of workers on each node, when so many are placed one after the other."""
    taken: Counter[str] = Counter()
    for _ in range(count):
        node = choose_node({name: room - taken[name] for name, room in rooms.items()}, taken, group_size)
        if node is not None:
            taken[node] += 1
    return taken


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_nodes_of_whole_groups_get_whole_groups_and_as_many_each(size: int, nodes: int, groups_per_node: int) -> None:
    rooms = {f"node {n}": size * groups_per_node for n in range(nodes)}
    for num_groups in range(nodes * groups_per_node + 1):
        taken = placed(rooms, size, num_groups * size)
        assert all(count % size == 0 for count in taken.values())
        assert max(taken.values(), default=0) <= -(-num_groups // nodes) * size  # apart, as far as can be


@given(st.lists(st.integers(0, 7), min_size=1, max_size=5), st.integers(1, 5), st.integers(0, 40))
def test_all_slots_are_used_before_anybody_waits(rooms: list[int], size: int, count: int) -> None:
    by_name = {f"node {n}": room for n, room in enumerate(rooms)}
    taken = placed(by_name, size, count)
    assert sum(taken.values()) == min(count, sum(rooms))
    assert all(taken[name] <= room for name, room in by_name.items())


def test_a_lost_workers_place_is_taken_before_a_new_group_is_begun() -> None:
    assert choose_node({"a": 8, "b": 1}, {"b": 3}, 4) == "b"
    assert choose_node({"a": 8, "b": 0}, {"b": 3}, 4) == "a"
    assert choose_node({"a": 0}, {}, 4) is None
