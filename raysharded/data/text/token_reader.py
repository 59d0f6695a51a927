"""Random access to the tokens of many files within a bounded amount of memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from raysharded.data.text.files import File
from raysharded.data.text.token_file import TokenFile, Tokens
from raysharded.errors import DataError

_MAX_OPEN_FILES = 64


class TokenReader:
    """Reader of tokens by (file, offset). It keeps the last used row groups decoded and the last used files open.

    Any thread may call it; one reads at a time. Raises DataError as `TokenFile` does.
    """

    def __init__(self, files: Sequence[File], num_tokens: npt.NDArray[np.int64], cache_bytes: int) -> None:
        """`num_tokens[f]`: expected size of file f. At least one row group is kept, for any `cache_bytes`."""
        self._files = files
        self._num_tokens = num_tokens
        self._cache_bytes = cache_bytes
        self._open: OrderedDict[int, TokenFile] = OrderedDict()
        self._groups: OrderedDict[tuple[int, int], Tokens] = OrderedDict()
        self.cached_bytes = 0
        """Size of the cached row groups."""
        self._lock = threading.Lock()

    def read(self, number: int, offset: int, out: npt.NDArray[np.int64]) -> None:
        """Fill `out` with the tokens of file `number` from `offset` on."""
        done = 0
        with self._lock:
            starts = self._file(number).row_group_starts
            while done < len(out):
                group = int(np.searchsorted(starts, offset + done, side="right")) - 1
                tokens = self._group(number, group)[offset + done - int(starts[group]) :][: len(out) - done]
                out[done : done + len(tokens)] = tokens
                done += len(tokens)

    def _file(self, number: int) -> TokenFile:
        if number not in self._open:
            opened, expected = TokenFile(self._files[number]), int(self._num_tokens[number])
            if opened.header.num_tokens != expected:
                raise DataError(
                    f"{self._files[number].name}: it has {opened.header.num_tokens} tokens, but had {expected} when "
                    "the dataset was opened. Restore it; files must not change while a run uses them."
                )
            self._open[number] = opened
            if len(self._open) > _MAX_OPEN_FILES:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(number)
        return self._open[number]

    def _group(self, number: int, group: int) -> Tokens:
        key = (number, group)
        if key not in self._groups:
            self._groups[key] = self._file(number).read_row_group(group)
            self.cached_bytes += self._groups[key].nbytes
            while len(self._groups) > 1 and self.cached_bytes > self._cache_bytes:
                self.cached_bytes -= self._groups.popitem(last=False)[1].nbytes
        self._groups.move_to_end(key)
        return self._groups[key]
