"""Deprecated: `raysharded.checkpoint.interop.names`."""

from raysharded.checkpoint.interop.names import *  # noqa: F403
from raysharded.deprecation import warn_of_old_module

warn_of_old_module(__name__)
