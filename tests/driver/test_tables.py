"""Mappings of which another one with an entry more or less is cheap."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given, strategies as st

from raysharded.driver.state.persistent_map import with_entry, without

CHANGES = st.lists(st.tuples(st.integers(0, 40), st.none() | st.integers()), max_size=120)
"""(key, its value from now on; None: it goes)"""


@given(first=st.dictionaries(st.integers(0, 40), st.integers()), changes=CHANGES)
def test_a_table_is_as_a_dict_of_the_same_entries_and_those_before_it_stay(
    first: dict[int, int], changes: list[tuple[int, int | None]]
) -> None:
    plain, table = dict(first), dict[int, int](first)
    history: list[tuple[Mapping[int, int], dict[int, int]]] = []
    changed: Mapping[int, int] = table
    for key, value in changes:
        if value is None:
            changed, plain = without(changed, key), {other: plain[other] for other in plain if other != key}
        else:
            changed, plain = with_entry(changed, key, value), {**plain, key: value}
        history.append((changed, plain))
    for found, expected in history:
        assert found == expected
        assert list(found.items()) == list(expected.items())
        assert len(found) == len(expected)
        assert all((key in found) == (key in expected) for key in range(41))
    assert table == first
