"""Deprecated: `raysharded.checkpoint.interop`."""

from raysharded.checkpoint.interop import NameMap as NameMap
from raysharded.deprecation import warn_of_old_module

warn_of_old_module(__name__)
