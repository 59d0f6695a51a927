"""One of two ranks whose `async_save` saves in a separate process: KIND FOLDER RANK.

Twice with one writer, over an existing checkpoint: the process has a copy of the writer each time.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from tests.checkpoint.interop.dcp_promises_ranks import expected_few, few, files_of, gathered
from tests.checkpoint.interop.dcp_promises_storages import Kind
from tests.checkpoint.interop.ranks import assert_same, dcp


def main(name: str, folder: Path, rank: int) -> None:
    store = FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    kind, place = Kind(name), folder / "c"
    writer = kind.writer(place, overwrite=True)
    files: list[set[str]] = []
    for seed in (1, 2):
        how = AsyncCheckpointerType.PROCESS
        future = dcp.async_save(few(seed), storage_writer=writer, async_checkpointer_type=how)
        assert isinstance(future.result(240), Metadata)
        assert_same(gathered(kind.load(few(0, 1), place)), expected_few(seed))
        files.append(files_of(kind, place))
        dist.barrier()
    assert files[0].isdisjoint(files[1])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
