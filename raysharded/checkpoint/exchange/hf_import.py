"""Deprecated: `raysharded.checkpoint.interop`."""

from raysharded.checkpoint.interop import import_huggingface as import_huggingface
from raysharded.deprecation import warn_of_old_module

warn_of_old_module(__name__)
