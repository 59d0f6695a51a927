"""Deprecated: `raysharded.checkpoint.interop`."""

from raysharded.checkpoint.interop import import_dcp as import_dcp
from raysharded.deprecation import warn_of_old_module

warn_of_old_module(__name__)
