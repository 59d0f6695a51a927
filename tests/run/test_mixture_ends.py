"""The check of a mixture's end before its weights are changed."""

from __future__ import annotations

from collections.abc import Sized

import raysharded as rs
from raysharded.run.control import _ends_early
from tests.driver.scripted import training


class Absent(Sized):
    """A source whose length cannot be found on the driver's node."""

    def __len__(self) -> int:
        raise LookupError("no such table")

    def __getitem__(self, index: int, /) -> int:
        raise LookupError("no such table")


def test_data_that_cannot_be_opened_here_are_left_to_the_workers() -> None:
    state = training(2, step=2).state
    mixture = rs.Mixture({"here": [1], "absent": Absent()}, {"here": 1, "absent": 1}, max_epochs={"here": 1})
    assert _ends_early(mixture, state, {"here": 1.0}) == ""
    both_here = rs.Mixture({"here": [1], "absent": [2]}, {"here": 1, "absent": 1}, max_epochs={"here": 1})
    assert "the mixture would end after" in _ends_early(both_here, state, {"here": 1.0})
