"""Token stores: the format.

**Format `raysharded.token-store`, version 1.** A token store is a folder, local or at any URL, with shards and one
index. It is made for reading any tokens of a shard with one ranged request, whose bytes can be checked without others.

1. The index `tokens.json` is a JSON object with `format` = "raysharded.token-store", `version` = 1, `tokenizer` (an id:
   "bytes", or "sha256:" and the digest of the tokenizer's file), `vocab_size`, `token_bytes` (1 to 4), `page_tokens`,
   `num_tokens` and `shards`: a list of objects with `name`, `num_tokens` and `id`. The token stream is the shards'
   tokens in this order. It MAY have `end_of_document`, the token that ends every document. The index is written last:
   a folder without it is no store.
2. A shard is a header of 4,096 bytes, then pages. The header is the 8 bytes `RAYTOKEN`, the length of a JSON text as 4
   bytes (little-endian, as all numbers), that text, and zeros. The text is an object with `format`, `version`,
   `tokenizer`, `vocab_size`, `token_bytes`, `page_tokens`, `num_tokens` and `id`.
3. A page has `page_tokens` tokens of `token_bytes` bytes, the last page of a shard the rest, and then its digest of 16
   bytes. Token t of a shard is therefore at byte `4096 + t * token_bytes + (t // page_tokens) * 16`.
4. `id` is the BLAKE3 digest (32 bytes, in hex) of the text `tokenizer vocab_size token_bytes page_tokens`, with single
   spaces, a line end, and all bytes of the tokens.
5. A page's digest is the first 16 bytes of the keyed BLAKE3 digest of its tokens' bytes, under the key `id`. The first
   8 are XORed with the page's number. A page of another shard, or of another place in it, does not fit.
6. Every token MUST be less than `vocab_size`.

Tokens are stored as they are, in the least number of bytes. Compressed pages would need an index of all pages, which
for 10^12 tokens has gigabytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from raysharded.errors import DataError

Bytes: TypeAlias = npt.NDArray[np.uint8]

FORMAT = "raysharded.token-store"
VERSION = 1
INDEX = "tokens.json"
MAGIC = b"RAYTOKEN"
HEADER_BYTES = 4096
DIGEST_BYTES = 16
PAGE_TOKENS = 2048
_REPACK = "Write it again with `raysharded data pack`."


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """The properties that all shards of a store share."""

    tokenizer: str
    vocab_size: int
    page_tokens: int = PAGE_TOKENS
    end_of_document: int | None = None
    """The token after each document; None if it is not known."""

    @property
    def token_bytes(self) -> int:
        """The least number of bytes that holds every token below `vocab_size`."""
        return max(1, -(-(self.vocab_size - 1).bit_length() // 8))

    @property
    def page_bytes(self) -> int:
        """Bytes of a whole page, with its digest."""
        return self.page_tokens * self.token_bytes + DIGEST_BYTES

    def fields(self) -> dict[str, Any]:
        """The fields that an index and a header have."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "tokenizer": self.tokenizer,
            "vocab_size": self.vocab_size,
            "token_bytes": self.token_bytes,
            "page_tokens": self.page_tokens,
        }

    def hasher(self) -> blake3:
        """The hasher of a shard's id, which is to be fed with the bytes of the tokens."""
        about = f"{self.tokenizer} {self.vocab_size} {self.token_bytes} {self.page_tokens}\n"
        return blake3(about.encode())


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One shard of a store."""

    name: str
    num_tokens: int
    id: str
    """Hex digits of the digest of its contents."""

    @property
    def key(self) -> bytes:
        return bytes.fromhex(self.id)

    def num_pages(self, kind: Kind) -> int:
        return -(-self.num_tokens // kind.page_tokens)

    def size_bytes(self, kind: Kind) -> int:
        return HEADER_BYTES + self.num_tokens * kind.token_bytes + self.num_pages(kind) * DIGEST_BYTES

    def byte_range(self, kind: Kind, pages: range) -> tuple[int, int]:
        """(offset, size) of the pages in the shard."""
        start = HEADER_BYTES + pages.start * kind.page_bytes
        stop = min(HEADER_BYTES + pages.stop * kind.page_bytes, self.size_bytes(kind))
        return start, stop - start


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """Contents of `tokens.json`."""

    kind: Kind
    shards: tuple[Shard, ...]

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def digest(self) -> str:
        """Digest of the store's contents: of the ids of its shards."""
        return blake3("\n".join(shard.id for shard in self.shards).encode()).hexdigest()

    def to_json(self) -> bytes:
        shards = [{"name": s.name, "num_tokens": s.num_tokens, "id": s.id} for s in self.shards]
        end = self.kind.end_of_document
        ends = {} if end is None else {"end_of_document": end}
        body = {**self.kind.fields(), **ends, "num_tokens": self.num_tokens, "shards": shards}
        return json.dumps(body, indent=1).encode() + b"\n"


def parse_index(data: bytes, where: str) -> Index:
    """The index in these bytes. Raises DataError with `where` if they are no index, or one of another version."""
    body = _parse(data, where)
    try:
        shards = tuple(
            Shard(name=_name(one["name"]), num_tokens=int(one["num_tokens"]), id=_id(one["id"]))
            for one in body["shards"]
        )
        index = Index(kind=_kind(body), shards=shards)
        total = int(body["num_tokens"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{where}: the index of a token store is damaged: {error!r}. {_REPACK}") from error
    if total != index.num_tokens or any(shard.num_tokens < 1 for shard in shards):
        raise DataError(
            f"{where}: the index of a token store promises {total} tokens, its shards have {index.num_tokens}. "
            f"{_REPACK}"
        )
    return index


def header_of(kind: Kind, num_tokens: int, shard_id: str) -> bytes:
    """The header of a shard."""
    text = json.dumps({**kind.fields(), "num_tokens": num_tokens, "id": shard_id}).encode()
    header = MAGIC + len(text).to_bytes(4, "little") + text
    if len(header) > HEADER_BYTES:
        raise DataError(f"the tokenizer's id has {len(kind.tokenizer)} characters: too long for a shard's header.")
    return header.ljust(HEADER_BYTES, b"\0")


def parse_header(data: bytes, where: str) -> tuple[Kind, int, str]:
    """(kind, number of tokens, id) of a shard from its first 4,096 bytes. Raises DataError."""
    if data[: len(MAGIC)] != MAGIC:
        raise DataError(
            f"{where}: not a shard of a token store: it begins with {data[:8]!r}. Restore it from its source."
        )
    length = int.from_bytes(data[8:12], "little")
    body = _parse(data[12 : 12 + length], where)
    try:
        return _kind(body), int(body["num_tokens"]), _id(body["id"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{where}: the shard's header is damaged: {error!r}. Restore it from its source.") from error


def digest(page: Bytes, number: int, key: bytes) -> bytes:
    """The digest of a page's tokens."""
    found = blake3(page.data, key=key).digest(DIGEST_BYTES)
    return (int.from_bytes(found[:8], "little") ^ number).to_bytes(8, "little") + found[8:]


def paged(tokens: Bytes, first_page: int, kind: Kind, key: bytes) -> Iterator[memoryview | bytes]:
    """The bytes of pages with their digests, from the bytes of the tokens."""
    size = kind.page_tokens * kind.token_bytes
    for number, at in enumerate(range(0, len(tokens), size), first_page):
        page = tokens[at : at + size]
        yield page.data
        yield digest(page, number, key)


def unpaged(data: Bytes, first_page: int, kind: Kind, key: bytes) -> Bytes | None:
    """The bytes of the tokens in whole pages, without digests; None if a page does not fit its digest."""
    size = kind.page_bytes
    num_whole = len(data) // size
    body, end = size - DIGEST_BYTES, num_whole * size
    pages, view = data[:end].reshape(num_whole, size), data.data
    found = b"".join([blake3(view[at : at + body], key=key).digest(DIGEST_BYTES) for at in range(0, end, size)])
    words = np.frombuffer(found, "<u8").reshape(num_whole, 2)
    expected = np.ascontiguousarray(pages[:, body:]).view("<u8")
    numbers = np.arange(first_page, first_page + num_whole, dtype=np.uint64)
    if not np.array_equal(words[:, 0] ^ numbers, expected[:, 0]) or not np.array_equal(words[:, 1], expected[:, 1]):
        return None
    rest = data[end:]
    tokens = np.empty(num_whole * body + max(len(rest) - DIGEST_BYTES, 0), dtype=np.uint8)
    tokens[: num_whole * body].reshape(num_whole, body)[:] = pages[:, :body]
    if len(rest):
        last, found = rest[:-DIGEST_BYTES], rest[-DIGEST_BYTES:].tobytes()
        if digest(last, first_page + num_whole, key) != found:
            return None
        tokens[num_whole * body :] = last
    return tokens


def to_bytes(tokens: npt.NDArray[Any], token_bytes: int) -> Bytes:
    """The tokens as `token_bytes` bytes each, little-endian."""
    words = np.ascontiguousarray(tokens, dtype="<u4").view(np.uint8).reshape(-1, 4)
    return np.ascontiguousarray(words[:, :token_bytes]).reshape(-1)


def from_bytes(data: Bytes, token_bytes: int) -> npt.NDArray[np.int64]:
    """The tokens from their bytes."""
    if token_bytes == 2:
        return data.view("<u2").astype(np.int64)
    columns = data.reshape(-1, token_bytes)
    tokens = columns[:, 0].astype(np.int64)
    for number in range(1, token_bytes):
        tokens |= columns[:, number].astype(np.int64) << (8 * number)
    return tokens


def _parse(data: bytes, where: str) -> Mapping[str, Any]:
    try:
        body = json.loads(data)
    except ValueError as error:
        raise DataError(f"{where}: damaged: {error}. Restore it from its source.") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise DataError(f"{where}: not of a token store. {_REPACK}")
    if body.get("version") != VERSION:
        raise DataError(
            f"{where}: version {body.get('version')!r} of the token store; this raysharded reads version {VERSION}. "
            "Upgrade raysharded, or pack the data again."
        )
    return body


def _kind(body: Mapping[str, Any]) -> Kind:
    end = body.get("end_of_document")
    kind = Kind(
        tokenizer=str(body["tokenizer"]),
        vocab_size=int(body["vocab_size"]),
        page_tokens=int(body["page_tokens"]),
        end_of_document=None if end is None else int(end),
    )
    if not (1 <= kind.vocab_size <= 1 << 32 and kind.page_tokens >= 1 and kind.token_bytes == body["token_bytes"]):
        raise ValueError(f"vocab_size {kind.vocab_size}, token_bytes {body['token_bytes']}")
    return kind


def _name(name: object) -> str:
    if not isinstance(name, str) or not name or "/" in name or name.startswith("."):
        raise ValueError(f"a shard called {name!r}")
    return name


def _id(text: object) -> str:
    if not isinstance(text, str) or len(bytes.fromhex(text)) != 32:
        raise ValueError(f"a shard's id {text!r}")
    return text
