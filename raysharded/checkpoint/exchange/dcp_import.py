"""Deprecated: `raysharded.checkpoint.interop.dcp.importer`."""

from raysharded.checkpoint.interop.dcp.importer import *  # noqa: F403
from raysharded.deprecation import warn_of_old_module

warn_of_old_module(__name__)
