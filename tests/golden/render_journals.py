"""Keeps what today's readers make of the golden journals: `python -m tests.golden.render_journals`."""

from __future__ import annotations

from tests.golden import recordings
from tests.golden.test_journals import JOURNALS, NAMES


def main() -> None:
    for name in NAMES:
        (JOURNALS / f"{name}.txt").write_text(recordings.rendering(JOURNALS / name), encoding="utf-8")


if __name__ == "__main__":
    main()
