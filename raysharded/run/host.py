"""Deprecated: `raysharded.run.hosted.driver_actor`. For drivers of 0.1 that Ray restarts."""

from raysharded.deprecation import warn_of_old_module
from raysharded.run.hosted.driver_actor import *  # noqa: F403

warn_of_old_module(__name__)
