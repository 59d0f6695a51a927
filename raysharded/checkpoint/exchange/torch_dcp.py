"""Deprecated: `raysharded.checkpoint.interop.dcp.torch_dcp`."""

from raysharded.checkpoint.interop.dcp.torch_dcp import *  # noqa: F403
from raysharded.deprecation import warn_of_old_module

warn_of_old_module(__name__)
