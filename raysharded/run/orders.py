"""Deprecated: `raysharded.run.hosted.submission`. For drivers of 0.1 that Ray starts again."""

from raysharded.deprecation import warn_of_old_module
from raysharded.run.hosted.submission import *  # noqa: F403
from raysharded.run.hosted.submission import RunSubmission as Order  # noqa: F401

warn_of_old_module(__name__)
