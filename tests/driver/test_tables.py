"""Mappings of which another one with an entry more is cheap."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given, strategies as st

from raysharded.driver.tables import with_entry

ENTRIES = st.lists(st.tuples(st.integers(0, 40), st.integers()), max_size=120)


@given(first=st.dictionaries(st.integers(0, 40), st.integers()), more=ENTRIES)
def test_a_table_is_as_a_dict_of_the_same_entries_and_those_before_it_stay(
    first: dict[int, int], more: list[tuple[int, int]]
) -> None:
    plain, table = dict(first), dict[int, int](first)
    history: list[tuple[Mapping[int, int], dict[int, int]]] = []
    grown: Mapping[int, int] = table
    for key, value in more:
        grown, plain = with_entry(grown, key, value), {**plain, key: value}
        history.append((grown, plain))
    for found, expected in history:
        assert found == expected
        assert list(found.items()) == list(expected.items())
        assert len(found) == len(expected)
        assert all((key in found) == (key in expected) for key in range(41))
    assert table == first
