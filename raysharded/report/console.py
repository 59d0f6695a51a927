"""The console of everything that is drawn for a person. A text of a journal cannot move its cursor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from raysharded.display.plain_text import masked, printable


class PlainConsole(Console):
    """Rich's console without control characters, bidi marks and passwords of URLs in what it shows.

    Names are shown unchanged although they may resemble rich's markup. Rich's own sequences, which move the cursor and
    colour, are segments of another kind, or are added later.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control is None:
                yield Segment(printable(masked(segment.text)), segment.style)
            else:
                yield segment
