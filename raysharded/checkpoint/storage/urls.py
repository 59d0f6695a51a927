"""URLs of storages: how a path is appended to one."""

from __future__ import annotations

from raysharded.locations import scheme_of as scheme_of

THROUGH_FSSPEC = "fsspec+"
"""What a URL begins with if fsspec is to open the rest, whatever its scheme."""


def join_url(base: str, *parts: str) -> str:
    """`base` with `parts` appended to its path, single `/` between them; without a trailing `/`.

    An `s3://` URL may end in options (`?endpoint_url=...`), which stay at the end. Everywhere else `?` is a character
    like others. This is the one way to append to a storage's URL: `f"{url}/{key}"` is wrong where there are options.
    """
    path, mark, options = base.partition("?") if scheme_of(base) == "s3" else (base, "", "")
    head = path if path.endswith("://") else path.rstrip("/")
    joined = head + ("" if head.endswith("://") or not parts else "/") + "/".join(part.strip("/") for part in parts)
    return (joined or "/") + mark + options
