"""Whoever changes what driver and workers say to each other gives the protocol another number."""

from __future__ import annotations

import pytest

from raysharded import __version__
from raysharded.protocol.version import FIRST, PROTOCOL, greeting, other_version
from tests.golden import protocol


def test_what_is_said_is_what_was_written_down_for_this_number() -> None:
    now, kept = list(protocol.lines()), protocol.kept()
    changed = sorted({*now} ^ {*kept})
    assert now == kept, (
        f"the protocol has changed: {changed[:5]}. Raise PROTOCOL in raysharded/protocol/version.py, unless that was "
        "done since the last release, and write it down in a commit of its own: python -m tests.golden.protocol"
    )


def test_who_has_the_same_number_is_no_other_whatever_the_version() -> None:
    assert other_version(greeting()) is None
    assert other_version({"protocol": PROTOCOL, "raysharded": "9.9", "later": 1}) is None


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (None, f"raysharded 0.1 (protocol {FIRST}; this is {__version__}, protocol {PROTOCOL})"),
        (
            {"protocol": 7, "raysharded": "3.0"},
            f"raysharded 3.0 (protocol 7; this is {__version__}, protocol {PROTOCOL})",
        ),
    ],
)
def test_who_has_another_number_is_named(answer: dict[str, object] | None, text: str) -> None:
    assert str(other_version(answer)) == text
