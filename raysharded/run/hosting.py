"""Deprecated: `raysharded.run.hosted.launch`. For drivers of 0.1 that Ray restarts."""

from raysharded.deprecation import warn_of_old_module
from raysharded.run.hosted.launch import *  # noqa: F403

warn_of_old_module(__name__)
