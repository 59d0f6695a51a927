"""Standard streams that cannot end a command: closed, without a reader, or unable to encode a character."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import select
import stat
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

import typer

from raysharded.display.raylet_output import open_null_device

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_UNREAD = frozenset((errno.EPIPE, errno.EBADF, errno.ECONNRESET, errno.ESHUTDOWN))
"""Errors of a stream that nobody reads any more; of a terminal also EIO."""
_ERRORS = "raysharded.substitute"
_SUBSTITUTES = str.maketrans("…▁▂▃▄▅▆▇█", "~12345678")


class OutputError(OSError):
    """Standard output cannot be written for a reason that its user should know: a full disk."""


class _Outlet(io.FileIO):
    """The file of a standard stream. Once nobody reads it any more, its output is dropped."""

    def __init__(self, number: int, *, strict: bool) -> None:
        """`strict`: raise OutputError for other failures; otherwise output is dropped then, too."""
        super().__init__(number, "w", closefd=False)
        self._strict = strict
        self.unread = False

    def write(self, data: ReadableBuffer, /) -> int:
        everything = memoryview(data).cast("B")
        rest = everything
        while rest and not self.unread:
            try:
                done = super().write(rest)
            except OSError as error:
                if self._strict and not self._is_unread(error):
                    raise OutputError(error.errno, error.strerror) from None
                self.unread = True
                break
            if done is None:  # a non-blocking pipe that is full
                select.select([], [self.fileno()], [])
            rest = rest[done or 0 :]
        return len(everything)

    def _is_unread(self, error: OSError) -> bool:
        hung_up = error.errno == errno.EIO and stat.S_ISCHR(os.fstat(self.fileno()).st_mode)
        return hung_up or error.errno in _UNREAD


def secure() -> None:
    """Replace standard output and standard error by streams that no write can fail on, but a full disk's.

    Closed streams are opened on the null device first. Every write is passed on at once.
    """
    open_null_device()
    codecs.register_error(_ERRORS, _substituted)
    sys.stdout, sys.stderr = _secured(sys.stdout, 1, strict=True), _secured(sys.stderr, 2, strict=False)


@contextlib.contextmanager
def own_stdout() -> Iterator[None]:
    """A context in which all output goes to standard error, also that of started processes and of the user's code.

    For commands with --json, whose standard output has JSON alone.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def leave_if_unread(wait_s: float = 0.0) -> None:
    """End the command, successfully, if nobody reads standard output: for commands that only show.

    Waits up to `wait_s` for that.
    """
    outlet = getattr(sys.stdout, "buffer", None)
    if not isinstance(outlet, _Outlet):
        if wait_s:
            select.select([], [], [], wait_s)
        return
    poll = select.poll()
    poll.register(outlet.fileno(), 0)  # errors are always reported
    if outlet.unread or poll.poll(wait_s * 1000):
        raise typer.Exit


def _secured(stream: TextIO | None, number: int, *, strict: bool) -> TextIO:
    if stream is not None:
        stream.flush()
    return io.TextIOWrapper(
        _Outlet(number, strict=strict),  # it writes all of it, as a buffered file does
        encoding="utf-8" if stream is None else stream.encoding,
        errors=_ERRORS,
        write_through=True,
    )


def _substituted(error: UnicodeError) -> tuple[str | bytes, int]:
    """Bytes for characters that an encoding does not have.

    Characters that rich draws with have a substitute of the same width. A file's name that is no text keeps its bytes.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_SUBSTITUTES)
    return b"".join(_escaped(character) for character in text), error.end


def _escaped(character: str) -> bytes:
    is_byte = 0xDC80 <= ord(character) <= 0xDCFF  # of a name, as Python decodes it
    return character.encode("ascii", "surrogateescape" if is_byte else "backslashreplace")
