"""Reading and tokenizing of text on a Ray cluster, for `raysharded data pack --ray`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from types import TracebackType
from typing import Any, Self

import ray

from raysharded.data.text.part_tokens import PartTokens, Reading, Work
from raysharded.errors import ConfigError
from raysharded.ray_backend.cluster import connect

PARTS_AT_ONCE = 4096
"""Parts that Ray Data is given together: their list is in memory, 16 GiB of JSON Lines."""


class RayTasks:
    """Tasks of Ray Data, which read the inputs where they run and return tokens in the order of the parts.

    It connects to the cluster that a run would use, or starts one here. Ray Data needs pandas. Entering it raises
    ClusterError if no cluster answers at the address that is given, or none starts.
    """

    def __init__(self, reading: Reading) -> None:
        """Raises ConfigError without Ray Data."""
        try:
            import ray.data as ray_data
        except ImportError as error:
            raise ConfigError(f"pack on Ray needs Ray Data: {error}. Run `pip install 'ray[data]'`.") from error
        self._data: Any = ray_data  # its types are incomplete
        self._reading = reading
        self._started = not ray.is_initialized()

    def encode(self, work: Iterable[Work]) -> Iterator[PartTokens]:
        """The tokens of the parts, in their order."""
        context = self._data.DataContext.get_current()
        before = context.execution_options.preserve_order
        context.execution_options.preserve_order = True
        try:
            reading, left = self._reading, iter(work)

            def encode(row: dict[str, Any]) -> dict[str, Any]:
                found = reading.packed((row["file"], row["part"]))
                return {"documents": found.num_documents, "tokens": found.tokens, "tokenizer": found.tokenizer}

            while parts := [{"file": file, "part": part} for file, part in islice(left, PARTS_AT_ONCE)]:
                dataset = self._data.from_items(parts, override_num_blocks=len(parts))
                for row in dataset.map(encode).iter_rows():
                    yield PartTokens(int(row["documents"]), row["tokens"], row["tokenizer"])
        finally:
            context.execution_options.preserve_order = before

    def __enter__(self) -> Self:
        if self._started:
            connect()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._started:
            ray.shutdown()
