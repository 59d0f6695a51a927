"""Deprecated: `raysharded.checkpoint.interop.diff`."""

from raysharded.checkpoint.interop.diff import diff as diff
from raysharded.deprecation import warn_of_old_module

warn_of_old_module(__name__)
