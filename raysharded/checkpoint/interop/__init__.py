"""Import, export, read, write and compare checkpoints of other libraries.

Names are loaded on first use. `diff.diff` compares two checkpoints of any library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# `diff` is not exported: the name would be the function before `raysharded.checkpoint.interop.diff` is imported, and
# the module after.
_EXPORTS = {
    "export_dcp": "raysharded.checkpoint.interop.dcp.exporter",
    "import_dcp": "raysharded.checkpoint.interop.dcp.importer",
    "RayshardedReader": "raysharded.checkpoint.interop.dcp.reader",
    "RayshardedWriter": "raysharded.checkpoint.interop.dcp.writer",
    "export_huggingface": "raysharded.checkpoint.interop.huggingface.exporter",
    "export_peft": "raysharded.checkpoint.interop.huggingface.adapter",
    "import_huggingface": "raysharded.checkpoint.interop.huggingface.importer",
    "place_of": "raysharded.checkpoint.interop.locations",
    "NameMap": "raysharded.checkpoint.interop.names",
}

if TYPE_CHECKING:
    from raysharded.checkpoint.interop.dcp.exporter import export_dcp as export_dcp
    from raysharded.checkpoint.interop.dcp.importer import import_dcp as import_dcp
    from raysharded.checkpoint.interop.dcp.reader import RayshardedReader as RayshardedReader
    from raysharded.checkpoint.interop.dcp.writer import RayshardedWriter as RayshardedWriter
    from raysharded.checkpoint.interop.huggingface.adapter import export_peft as export_peft
    from raysharded.checkpoint.interop.huggingface.exporter import export_huggingface as export_huggingface
    from raysharded.checkpoint.interop.huggingface.importer import import_huggingface as import_huggingface
    from raysharded.checkpoint.interop.locations import place_of as place_of
    from raysharded.checkpoint.interop.names import NameMap as NameMap

__all__ = [
    "NameMap",
    "RayshardedReader",
    "RayshardedWriter",
    "export_dcp",
    "export_huggingface",
    "export_peft",
    "import_dcp",
    "import_huggingface",
    "place_of",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
