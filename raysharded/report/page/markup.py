"""HTML in small parts.

All text from a journal passes through `text` on its way into HTML: no other function makes strings safe here. The other
functions take HTML, except for parameters called label or words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from raysharded.display.plain_text import masked, printable

MOST_ROWS = 300
"""Maximum number of rows of a table."""
_TALL = 25
"""Number of rows above which a table scrolls."""


def text(value: object) -> str:
    """The value as safe content, also in quoted attributes; without control characters, bidi marks, passwords of URLs
    and halves of surrogate pairs."""
    plain = printable(masked(str(value))).encode("utf-8", "replace").decode()
    return escape(plain, quote=True)


def class_of(name: str) -> str:
    """The style sheet's class of a part or a cost."""
    return name.replace(" ", "-")


def swatch(name: str) -> str:
    square = f'<rect class="{class_of(name)}" width="1" height="1"/>'
    return f'<svg class="swatch" viewBox="0 0 1 1" aria-hidden="true">{square}</svg>'


def bar(parts: Iterable[tuple[str, float]], kind: str, label: str) -> str:
    """Amounts side by side, over the whole width."""
    parts = list(parts)
    whole, x, rects = sum(amount for _, amount in parts), 0.0, []
    for name, amount in parts:
        wide = 1000 * amount / whole
        rects.append(f'<rect class="{name}" x="{x:.2f}" width="{wide:.2f}" height="10"/>')
        x += wide
    about = f'class="{kind}" viewBox="0 0 1000 10" preserveAspectRatio="none" role="img" aria-label="{text(label)}"'
    return f"<svg {about}>{''.join(rects)}</svg>"


def verdict(good: bool, words: str) -> str:
    return f'<span class="{"good" if good else "bad"}">{"✓" if good else "✗"} {text(words)}</span>'


def section(name: str, title: str, content: str) -> str:
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{title}</h2>{content}</section>'


def table(
    columns: Sequence[tuple[str, str]],
    rows: Sequence[Sequence[str]],
    *,
    attributes: Sequence[str] = (),
) -> str:
    """Rows of HTML cells; if there are very many, the newest. `columns`: (title, class). On narrow screens a row is a
    block, in which a number has its column's title before it."""
    shown = rows[-MOST_ROWS:]
    head = "".join(f'<th scope="col" class="{kind}">{title}</th>' for title, kind in columns)
    body = "".join(
        f"<tr {attributes[number] if attributes else ''}>"
        + "".join(f"<td{_about(*column)}>{cell}</td>" for column, cell in zip(columns, row, strict=True))
        + "</tr>"
        for number, row in enumerate(shown)
    )
    left = len(rows) - len(shown)
    note = f'<p class="note">And {left} more before.</p>' if left else ""
    named = any(title for title, _ in columns)
    head = f"<thead><tr>{head}</tr></thead>" if named else ""
    inside = f"<table>{head}<tbody>{body}</tbody></table>"
    tall = " tall" if len(shown) > _TALL else ""
    return f'<div class="scroll{tall}" role="group" aria-label="table" tabindex="0">{inside}</div>{note}'


def _about(title: str, kind: str) -> str:
    label = f' data-label="{text(title)}"' if kind == "number" else ""
    return f' class="{kind}"{label}'
