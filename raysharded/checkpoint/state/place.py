"""Where a checkpoint is: one URI for its folder, taken apart into a storage above it and the folder's name."""

from __future__ import annotations

import os

from raysharded.checkpoint.format.signing import SigningKey, signing_key_from_environment
from raysharded.checkpoint.storage import Storage, open_storage
from raysharded.checkpoint.storage.urls import join_url, scheme_of
from raysharded.errors import ConfigError
from raysharded.locations import local_path

Uri = str | os.PathLike[str]


def key_or_default(key: SigningKey | None) -> SigningKey | None:
    """The key given, or else the one in the environment, if there is one. Raises ConfigError for what is no key."""
    require_key(key)
    return key if key is not None else signing_key_from_environment()


def require_key(key: SigningKey | None) -> None:
    """Raises ConfigError for what is no key."""
    if key is not None and not isinstance(key, SigningKey):
        raise ConfigError(
            f"key is a {type(key).__qualname__} and no SigningKey. Give SigningKey(secret), its secret as bytes, or "
            "SigningKey.from_file(path)."
        )


def text_of(uri: Uri) -> str:
    """The URI as text. Raises ConfigError for what is neither text nor a path."""
    text = os.fspath(uri) if isinstance(uri, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise ConfigError(f"uri={uri!r}: give the checkpoint's folder, as text or a path.")
    return text


def storage_above(uri: Uri) -> tuple[Storage, str]:
    """(the storage of what is above the folder, the folder's name). Touches nothing. Raises as `split`."""
    above, name = split(uri)
    return open_storage(above), name


def split(uri: Uri) -> tuple[str, str]:
    """(URL of what is above the folder, its name). Options of an s3:// URL stay with what is above.

    Raises ConfigError if there is nothing above, as for "s3://bucket", and as `text_of` and `local_path`.
    """
    text = join_url(text_of(uri))
    here = local_path(text)
    if here is not None:
        above, _, name = here.rpartition("/")
        return above or "/", _named(name, text)
    path, mark, options = text.partition("?") if scheme_of(text) == "s3" else (text, "", "")
    above, _, name = path.rpartition("/")
    return above + mark + options, _named("" if above.endswith(("/", ":")) else name, text)


def _named(name: str, uri: str) -> str:
    if name in ("", ".", ".."):
        raise ConfigError(
            f"{uri!r} does not name a checkpoint's folder below another place. Give one, such as "
            f"{join_url(uri, 'my-checkpoint')!r}."
        )
    return name
