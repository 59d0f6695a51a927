"""What commands write for people: whole or not at all."""

from __future__ import annotations

import os
import secrets

import typer

from raysharded.errors import StorageError


def write_page(path: str, page: str) -> None:
    """Put a page into a file, replacing what was there, and say so; for "-" on standard output.

    Raises StorageError if it cannot be written.
    """
    if path == "-":
        typer.echo(page, nl=False)
        return
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.write(page)
        os.replace(temporary, path)
    except OSError as error:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise StorageError(
            f"{path}: the page cannot be written: {error.strerror}. Give a file in a folder that you may write to."
        ) from error
    typer.echo(f"{path}: {len(page.encode()) / 1024:.0f} KiB; open it in any browser", err=True)
