"""Deprecated: `raysharded.checkpoint.interop`."""

from raysharded.checkpoint.interop import export_huggingface as export_huggingface
from raysharded.deprecation import warn_of_old_module

warn_of_old_module(__name__)
