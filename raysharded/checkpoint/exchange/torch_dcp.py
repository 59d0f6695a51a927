"""Deprecated: `raysharded.checkpoint.interop`."""

from raysharded.checkpoint.interop import RayshardedReader as RayshardedReader, RayshardedWriter as RayshardedWriter
from raysharded.deprecation import warn_of_old_module

warn_of_old_module(__name__)
