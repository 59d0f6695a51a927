"""Deprecated: `raysharded.checkpoint.interop`."""

from raysharded.checkpoint.interop import export_dcp as export_dcp
from raysharded.deprecation import warn_of_old_module

warn_of_old_module(__name__)
