"""Text of others on its way to a person: made harmless for terminals and logs, without passwords.

Run folders, journals, manifests and the names of folders may be a stranger's. A terminal executes escape sequences, a
line break forges a line, and a bidi mark reorders what a person reads. Every output of raysharded passes through this
module at its boundary: the command line's `echo`, the console of tables and live views, the loggers, the writers of
metrics. HTML has another boundary, `report/page/markup.py`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

_REPLACEMENT = "\ufffd"
_CONTROLS = (*range(32), *range(127, 160))
_MARKS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Characters that change the direction of text: Unicode TR 9, explicit formatting characters."""
_BREAKS = (0x2028, 0x2029)
_HARMLESS = {code: _REPLACEMENT for code in (*_CONTROLS, *_MARKS, *_BREAKS) if code not in (9, 10)}
_BYTES = re.compile("[\udc80-\udcff]+")
_SPACES = re.compile(r"[\t\n]+")
_USER = re.compile(r'(?<![A-Za-z0-9+.-])([A-Za-z0-9+.-]+)://([^/?#\s"\\]*)@')
_NAMELESS = frozenset(("http", "https"))
"""Schemes whose user, without a password, is a token. Elsewhere it is a name: `abfs://container@account`."""
_WHERE = re.compile(r" \(Raised in [^()]*\)$")
"""The workers that raised an error, at the end of its message."""
_SENTENCES = re.compile(r"(?<=[.!?]) (?=[A-Z])")
"""Places between two sentences."""
_LONG_WORD = re.compile(r"\S{40,}")
"""A path or URL that is too long to be read."""
_LONG_PATH = re.compile(r"(?<!\S)(?=\S{40})/(?:[^/\s]+/)+([^/\s]{1,60})(?!\S)")
"""A file's path that is too long to be read."""
_ENDS = 16
"""Characters of its beginning, and of its end, that are shown."""


def printable(text: str) -> str:
    """The text without characters that a terminal executes, or that reorder text; tabs and line feeds stay.

    Bytes that are no text, of a file's name, stay unless they are controls of an eight-bit terminal.
    """
    return _BYTES.sub(_decoded, text).translate(_HARMLESS)


def one_line(text: str) -> str:
    """The text as `printable`, on one line: for names, and cells of a table."""
    return _SPACES.sub(" ", printable(text))


def indented(text: str) -> str:
    """The text as `printable`; its further lines are indented, so that none passes for a separate line."""
    return printable(text).replace("\n", "\n  ")


def brief(text: str, limit: int = 160) -> str:
    """A message on one line of at most `limit` characters: its first sentences. The journal has the full message.

    Of a sentence that is too long, long paths are shortened, and then its middle is left out: the cause stands at the
    end.
    """
    line = _without_workers(text, limit)
    return line if len(line) <= limit else _first_sentences(line, _with_short_words, _without_middle, limit)


def brief_error(text: str, limit: int = 160) -> str:
    """As `brief`, for an error of the user's code, which begins with its place and with what is wrong.

    Of a sentence that is too long, long paths are reduced to the file's name, and then its end is left out.
    """
    line = _without_workers(text, limit)
    return line if len(line) <= limit else _first_sentences(line, _with_file_names, _without_end, limit)


def _without_workers(text: str, limit: int) -> str:
    """The text on one line, without the workers that raised it if it is too long."""
    line = " ".join(text.split())
    return _WHERE.sub("", line) if len(line) > limit else line


def _first_sentences(line: str, shorten: Callable[[str], str], cut: Callable[[str, int], str], limit: int) -> str:
    first, *others = _SENTENCES.split(line)
    if len(first) > limit - 4:
        first = shorten(first)
    if len(first) > limit - 4:
        return cut(first, limit)
    for sentence in others:
        if len(first) + len(sentence) + 5 > limit:
            return f"{first} ..."
        first = f"{first} {sentence}"
    return first


def masked(text: str) -> str:
    """The text without the passwords of the URLs in it: `sftp://user:***@host/folder`."""
    return _USER.sub(_without_password, text) if "://" in text and "@" in text else text


def masked_in(value: Any) -> Any:
    """A value of JSON with every text in it as `masked`."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, dict):
        return {key: masked_in(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [masked_in(one) for one in value]
    return value


def has_password(url: str) -> bool:
    """True if a URL holds a password."""
    return masked(url) != url


def secure_logs() -> None:
    """Make the messages of raysharded's loggers harmless, whichever handlers show them."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_plain)


LOGGERS = tuple(
    f"raysharded.{name}"
    for name in (
        "adapters",
        "checkpoint",
        "cluster",
        "data",
        "driver",
        "driver.events",
        "host",
        "job",
        "metrics",
        "worker",
    )
)
"""Every logger of raysharded. A filter concerns its own logger's messages alone, not those of loggers below it."""


def _plain(record: logging.LogRecord) -> bool:
    """A filter that changes a message, and the text of an error beside it, but rejects none."""
    told = record.getMessage()
    harmless = indented(masked(told))
    if harmless != told:
        record.msg, record.args = harmless, ()
    if record.exc_info and record.exc_info[0] is not None and not record.exc_text:
        record.exc_text = printable(masked(logging.Formatter().formatException(record.exc_info)))
    return True


def _without_middle(sentence: str, limit: int) -> str:
    """The beginning and the end of a sentence, cut between words; or the ends of a single word."""
    tail = (limit - 5) // 2
    head = limit - 5 - tail
    first, last = sentence[:head].rpartition(" ")[0], sentence[-tail:].partition(" ")[2]
    return f"{first or sentence[:head]} ... {last or sentence[-tail:]}"


def _without_end(sentence: str, limit: int) -> str:
    """The beginning of a sentence, cut between words; or of a single word."""
    head = sentence[: limit - 4]
    return f"{head.rpartition(' ')[0] or head} ..."


def _with_short_words(sentence: str) -> str:
    return _LONG_WORD.sub(lambda word: f"{word[0][:_ENDS]}...{word[0][-_ENDS:]}", sentence)


def _with_file_names(sentence: str) -> str:
    return _LONG_PATH.sub(r".../\1", sentence)


def _without_password(found: re.Match[str]) -> str:
    user, colon, _ = found[2].partition(":")
    if not colon:
        return f"{found[1]}://***@" if found[1].lower() in _NAMELESS and user else found[0]
    return f"{found[1]}://{user}:***@"


def _decoded(found: re.Match[str]) -> str:
    """Bytes as Python keeps them in names, unchanged unless they are controls; then as text, without these."""
    again = found[0].encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    plain = "".join(_REPLACEMENT if 0xDC80 <= ord(character) <= 0xDC9F else character for character in again)
    return found[0] if plain.translate(_HARMLESS) == again else plain
