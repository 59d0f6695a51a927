"""Size limits of a checkpoint's parts. Writers comply; readers reject larger parts before they cost memory or time.

The limits are far beyond what a model needs. A malicious manifest is read in seconds, in a few GiB of memory.
"""

from __future__ import annotations

MAX_MANIFEST_BYTES = 1 << 28
MAX_VALUES = 1 << 22
"""Commas and opening brackets of a manifest, which are no fewer than its JSON values."""
MAX_DEPTH = 200
"""Nesting depth of arrays and objects in the tree, the data position and the metadata."""
MAX_NUMBER = 1 << 62
"""Largest whole number outside the tree, the data position and the metadata."""
MAX_DIGITS = 4300
"""Digits of a whole number in tree, data or metadata; Python reads no more (`sys.int_info.default_max_str_digits`)."""
MAX_TEXT = 4096
"""Characters of a tensor's name or another text."""
MAX_PATH_BYTES = 1000
"""Bytes of a path as UTF-8; S3's keys have at most 1,024."""
MAX_PATH_PART_BYTES = 255
"""Bytes of a part of a path, as on most file systems."""

MAX_INDEX_BYTES = 1 << 30
MAX_INDEX_FOOTER_BYTES = 1 << 20
MAX_INDEX_SLACK_BYTES = 1 << 26
"""Inflated size of the index's pages beyond what its rows and the tensors' names need."""
MAX_DIMS = 32
"""Dimensions of a tensor, as in NumPy 1."""
MAX_CELLS = 1 << 24
"""Boxes, or tensors, times the largest number of dimensions (at least 2): the number of offsets held, and of sizes."""
MAX_FILES = 1 << 16
MAX_TENSORS = 1 << 19

MAX_TENSOR_BYTES = 1 << 60
MAX_CHUNK_BYTES = 1 << 26
"""Bytes of a chunk. A reader holds a whole chunk to check it."""
MAX_CHUNKS = 1 << 24
"""Chunks of a file."""
