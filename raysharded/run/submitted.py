"""Whether this process is a submitted Ray job."""

from __future__ import annotations

import json
import os

_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""In which Ray tells a job's entry point what it is."""


def in_submitted_job() -> bool:
    """Whether `ray job submit` started this process, or one above it."""
    return bool(submission_id())


def submission_id() -> str:
    """Of the submitted job; empty if this is none."""
    try:
        return str(json.loads(os.environ.get(_CONFIG, "{}")).get("metadata", {}).get("job_submission_id", ""))
    except (ValueError, AttributeError):
        return ""
