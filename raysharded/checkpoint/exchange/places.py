"""Deprecated: `raysharded.checkpoint.interop.locations`."""

from raysharded.checkpoint.interop.locations import *  # noqa: F403
from raysharded.deprecation import warn_of_old_module

warn_of_old_module(__name__)
