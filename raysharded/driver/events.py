"""Deprecated: `raysharded.driver.state.events`."""

from raysharded.deprecation import warn_of_old_module
from raysharded.driver.state.events import *  # noqa: F403

warn_of_old_module(__name__)
