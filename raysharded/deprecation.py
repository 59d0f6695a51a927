"""Old names that go on working until a stated version."""

from __future__ import annotations

import warnings

REMOVED_IN = "0.4"


def warn_of_old_name(old: str, new: str) -> None:
    """Issue a DeprecationWarning at the line that calls the function which calls this one."""
    warnings.warn(
        f"{old} is deprecated and will be removed in {REMOVED_IN}; use {new}.", DeprecationWarning, stacklevel=3
    )
