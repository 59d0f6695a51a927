"""The cause of a worker's death in one line, from Ray's text. Pure.

Ray sees a worker's socket close, and mostly no exit code: its text is a paragraph of possibilities and advice.
"""

from __future__ import annotations

import re

from raysharded.display.plain_text import brief

_DETAIL = re.compile(r"Worker exit detail: (.*?)(?: Some common causes|$)")
_SILENT = re.compile(r"Worker unexpectedly exits with a connection error code \d+\. ?(.*?)\.?")
_EXIT = re.compile(r"Worker exits unexpectedly\. Worker exits with an exit code (-?\d+)\. ?(.*)")
_MEMORY = re.compile(r"Memory on the node \(.*?\) was ([0-9.]+GB used / [0-9.]+GB limit)")
_SIGTERM = "The process receives a SIGTERM."
_LONGEST = 200


def cause_of_death(error: BaseException) -> str:
    """The fate of a worker, from Ray's error. Known causes are in plain words; otherwise Ray's own are kept."""
    text = " ".join(str(error).split())
    if "running low on memory" in text:
        usage = _MEMORY.search(text)
        return f"Ray killed its process because its node ran low on memory{f': {usage[1]}' if usage else ''}"
    if "was killed by `ray.kill`" in text:
        return "its process was killed by `ray.kill`"
    detail = _DETAIL.search(text)
    if detail is None:
        return f"{type(error).__name__}: {brief(text, 300)}"
    return _of_detail(detail[1])


def is_from_outside(error: BaseException) -> bool:
    """Whether Ray ended the worker, or knows who did: it did not just see its socket close, or its interpreter exit."""
    detail = _DETAIL.search(" ".join(str(error).split()))
    if detail is None:
        return True
    code = _EXIT.fullmatch(detail[1])
    return _SILENT.fullmatch(detail[1]) is None and (code is None or code[2] == _SIGTERM)


def _of_detail(detail: str) -> str:
    if silent := _SILENT.fullmatch(detail):
        more = "" if silent[1] in ("", "End of file") else f" ({silent[1]})"
        return f"its process ended silently: killed (SIGKILL, the kernel's memory killer), or crashed{more}"
    if code := _EXIT.fullmatch(detail):
        if code[2] == _SIGTERM:
            return "its process was ended by SIGTERM"
        return f"its process exited with code {code[1]}{f': {brief(code[2], _LONGEST)}' if code[2] else ''}"
    return f"its process died: {brief(detail, _LONGEST)}"
