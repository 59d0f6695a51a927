"""Texts of others are made harmless, and URLs lose their passwords, on the way to a person."""

from __future__ import annotations

import io
import logging
import pickle
import re
import time
import unicodedata

import pytest
from rich.live import Live
from rich.text import Text

from raysharded import errors
from raysharded.display.plain_text import LOGGERS, has_password, indented, masked, masked_in, one_line, printable
from raysharded.journal.log import plain
from raysharded.locations import refuse_password
from raysharded.report.console import PlainConsole
from tests.paths import ROOT

TITLE, CLEAR, C1, BACK, BIDI = "\x1b]0;owned\x07", "\x1b[2J", "\x9b31m", "\b\b\r", "\u202egnp.exe\u2066\u200f\u061c"
HOSTILE = f"a{TITLE}b{CLEAR}c{C1}d{BACK}e{BIDI}f\u2028g\x85h\x00i\x7fj"


@pytest.mark.parametrize("make", [printable, one_line, indented])
def test_no_control_and_no_direction_mark_is_left(make: object) -> None:
    assert callable(make)
    found = make(HOSTILE)
    for character in found:
        assert unicodedata.category(character) not in ("Cc", "Cf", "Zl", "Zp"), repr(character)
    assert re.sub("[^a-j]", "", found.replace("owned", "").replace("gnp.exe", "")) == "abcdefghij"


def test_every_explicit_direction_mark_of_unicode_is_replaced() -> None:
    marks = [chr(code) for code in range(0x110000) if unicodedata.bidirectional(chr(code)) in EXPLICIT]
    assert len(marks) == 9
    assert set(printable("".join([*marks, "\u200e", "\u200f", "\u061c"]))) == {"\ufffd"}


EXPLICIT = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


def test_text_of_any_language_and_the_name_of_a_file_stay() -> None:
    for text in ("größe 模型 модель שלום مرحبا 🙂", "a\tb\nc", "~12345678▁█…", "\udcff\udcfe"):
        assert printable(text) == text


def test_bytes_of_a_name_that_are_a_control_after_all_are_replaced() -> None:
    for data in ("\x9b2J".encode(), "\u202e".encode(), b"\x9b2J"):
        name = data.decode("ascii", "surrogateescape")
        assert "\ufffd" in printable(name)
        assert printable(name).encode("utf-8", "surrogateescape") != data


def test_a_line_break_cannot_forge_a_line() -> None:
    assert one_line("gpt\nerror: all is lost\tnow") == "gpt error: all is lost now"
    assert indented("first\nerror: second") == "first\n  error: second"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sftp://me:secret@host/a", "sftp://me:***@host/a"),
        ("ftp://me:se@cret@host/a", "ftp://me:***@host/a"),
        ("https://secret@host/a", "https://***@host/a"),
        ("fsspec+s3://AKIA:secret@bucket/a", "fsspec+s3://AKIA:***@bucket/a"),
        ("simplecache::sftp://me:secret@host/a", "simplecache::sftp://me:***@host/a"),
        ("s3://b/p?endpoint_url=http://me:secret@host:9", "s3://b/p?endpoint_url=http://me:***@host:9"),
        ("1sftp://:secret@host", "1sftp://:***@host"),
        ("'sftp://me:secret@h/a' and sftp://you:secret@h fail", "'sftp://me:***@h/a' and sftp://you:***@h fail"),
        ("abfs://container@account.dfs.core.windows.net/a", "abfs://container@account.dfs.core.windows.net/a"),
        ("memory://a/b@c", "memory://a/b@c"),
        ("s3://bucket?region=a@b", "s3://bucket?region=a@b"),
        ("me:secret@host", "me:secret@host"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert masked(url) == shown
    assert has_password(url) == (url != shown)
    assert masked_in({"a": [url, {"b": (url, 1, None)}]}) == {"a": [shown, {"b": [shown, 1, None]}]}
    assert plain({"a": [url]}) == {"a": [shown]}, "nor is it in the journal"
    for kind in (errors.StorageError, errors.ConfigError, errors.CheckpointError):
        assert str(kind(url)) == shown
        assert str(pickle.loads(pickle.dumps(kind(url)))) == shown
    told = errors.TaskError(url, url)
    assert (str(told), told.user_traceback) == (shown, shown)


def test_hostile_texts_of_a_megabyte_are_masked_in_no_time() -> None:
    begun = time.process_time()
    for text in ("a" * 1_000_000 + "://@", "a://" * 250_000 + "@", "://" + "x@" * 500_000, "a:@" * 300_000 + "://"):
        masked(text)
        printable(text)
    assert time.process_time() - begun < 5


def test_a_url_with_a_password_is_refused_where_it_would_be_written_to_a_file() -> None:
    with pytest.raises(errors.ConfigError, match=r"sftp://me:\*\*\*@host has a password in it\. A file\. Leave it out"):
        refuse_password("sftp://me:secret@host", "A file.", errors.ConfigError)
    refuse_password("abfs://container@account/a", "A file.", errors.ConfigError)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_console_shows_hostile_texts_harmlessly_and_still_moves_its_own_cursor(terminal: bool) -> None:
    out = io.StringIO()
    console = PlainConsole(file=out, force_terminal=terminal, width=200)
    with Live(Text(HOSTILE), console=console, auto_refresh=False) as live:
        live.update(Text(HOSTILE + " sftp://me:secret@host", style="red"), refresh=True)
    console.print(f"[bold]{HOSTILE}[/bold]")
    told = out.getvalue()
    for sequence in (TITLE, CLEAR, C1, "\x9b", "\b", "\u202e", "\u2066", "\u2028", "\x00", "secret"):
        assert sequence not in told, repr(sequence)
    assert ("\x1b[" in told) == terminal, "rich's own sequences"
    assert "[bold]" in told


def test_a_message_of_a_logger_is_harmless_for_every_handler(caplog: pytest.LogCaptureFixture) -> None:
    for name in LOGGERS:
        log = logging.getLogger(name)
        try:
            raise ValueError(f"sftp://me:secret@host{TITLE}")
        except ValueError:
            log.warning("run %s:\n%s", HOSTILE, "sftp://me:secret@host", exc_info=True)
    assert len(caplog.messages) == len(LOGGERS)
    for harmful in ("secret", "\x1b", "\x9b", "\u202e"):
        assert harmful not in caplog.text
    assert "\n  sftp://me:***@host" in caplog.text


def test_every_logger_of_the_library_is_made_harmless() -> None:
    found = set()
    for path in (ROOT / "raysharded").rglob("*.py"):
        text = path.read_text()
        found |= set(re.findall(r'getLogger\("(raysharded[^"]*)"\)', text))
        found |= set(re.findall(r'^EVENTS_LOG = "(.*)"', text, re.MULTILINE))
    assert found - {"raysharded"} == set(LOGGERS)  # "raysharded" itself: only handlers are added to it
