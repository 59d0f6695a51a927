"""The cases of a test that are tried each time, and those that are tried before a release."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def tried_each_time(now: Sequence[Any], of: Iterable[Any]) -> list[Any]:
    """All cases for `parametrize`: those in `now` unchanged, all others marked `long`. Each of `now` must be one."""
    cases = list(of)
    assert all(case in cases for case in now)
    return [*now, *(_long(case) for case in cases if case not in now)]


def examples(now: int, of: int) -> int:
    """The number of drawn examples: `now`, and all of them before a release (`make test-long`)."""
    return of if os.environ.get("RAYSHARDED_ALL_EXAMPLES") else now


def _long(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.long)
