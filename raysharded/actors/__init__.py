"""Computing: the workers.

Torch lives here, Ray does not. `process_group` alone makes process groups.
"""

from __future__ import annotations

if __name__ != "raysharded.actors":
    raise ImportError(
        f"this package was imported as {__name__!r}, which would make a second copy of every class in it. "
        "Import it as `raysharded.actors`; the `actors` link at the top of the repository is for reading only."
    )
