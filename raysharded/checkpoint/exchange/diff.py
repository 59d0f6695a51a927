"""Deprecated: `raysharded.checkpoint.interop.diff`."""

from raysharded.checkpoint.interop.diff import *  # noqa: F403
from raysharded.deprecation import warn_of_old_module

warn_of_old_module(__name__)
