"""How large the parts of a checkpoint may be. Writers keep to it; readers refuse what does not, before it costs them.

Far beyond what a model needs, and small enough that a manifest made to hurt is read in seconds, in a few GiB of memory.
"""

from __future__ import annotations

MAX_MANIFEST_BYTES = 1 << 28
MAX_VALUES = 1 << 22
"""Of a manifest: its commas and opening brackets, which are no fewer than its JSON values."""
MAX_DEPTH = 200
"""Of arrays and objects in one another: in the tree, the data position and the metadata."""
MAX_NUMBER = 1 << 62
"""Of every whole number but those in the tree, the data position and the metadata."""
MAX_DIGITS = 4300
"""Of those; Python reads no more (`sys.int_info.default_max_str_digits`)."""
MAX_TEXT = 4096
"""Characters of a tensor's name, or of another text."""
MAX_PATH_BYTES = 1000
"""As UTF-8; S3's keys have at most 1,024."""
MAX_PATH_PART_BYTES = 255
"""As on most file systems."""

MAX_INDEX_BYTES = 1 << 30
MAX_INDEX_FOOTER_BYTES = 1 << 20
MAX_INDEX_SLACK_BYTES = 1 << 26
"""What its pages may inflate to beyond what its rows and the tensors' names need."""
MAX_DIMS = 32
"""As in NumPy 1."""
MAX_CELLS = 1 << 24
"""Boxes, or tensors, times the largest number of dimensions (2 at least): so many offsets are held, and sizes."""
MAX_FILES = 1 << 16
MAX_TENSORS = 1 << 19

MAX_TENSOR_BYTES = 1 << 60
MAX_CHUNK_BYTES = 1 << 26
"""A chunk is checked as a whole, so a reader holds one."""
MAX_CHUNKS = 1 << 24
"""Of a file."""
