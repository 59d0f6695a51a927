"""Preemption notices of a cloud for its machine. Standard library alone.

A notice is a function that returns the seconds left, or None while there is no notice. A daemon thread polls each one;
errors in it do not affect training.

AWS: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html (instance metadata
service version 2; rebalance recommendations are ignored). Google Cloud:
https://cloud.google.com/compute/docs/instances/create-use-preemptible and .../getting-live-migration-notice.
"""

from __future__ import annotations

import datetime
import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from email.message import Message

_log = logging.getLogger("raysharded.worker")
_EVERY_S = 1.0
_SLOWEST_S = 10.0
"""Longest pause between requests to a service that does not answer."""
_TIMEOUT_S = 2.0
_HANG_S = 30
"""Seconds for which a request to Google Cloud waits for a change."""
_GCP_PREEMPTED_S = 30.0
_GCP_MAINTENANCE_S = 60.0
_AWS_DEFAULT_S = 120.0

SecondsLeft = Callable[[], float | None]
Tell = Callable[[str, float], None]
"""Called with the reason and the seconds left."""
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy: that is another machine


def watch(sources: Sequence[str | SecondsLeft], tell: Tell) -> None:
    """Watch all sources ("aws", "gcp" or custom functions) until the process ends; each reports at most once."""
    for source in sources:
        for name, seconds_left in _watched(source):
            threading.Thread(target=_ask, args=(name, seconds_left, tell), daemon=True, name=f"notice {name}").start()


def _watched(source: str | SecondsLeft) -> list[tuple[str, SecondsLeft]]:
    if source == "aws":
        return [("AWS takes the instance back", Aws())]
    if source == "gcp":
        return [
            ("Google Cloud preempts the machine", Gcp("instance/preempted", "TRUE", _GCP_PREEMPTED_S)),
            (
                "Google Cloud ends the machine for maintenance",
                Gcp("instance/maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", _GCP_MAINTENANCE_S),
            ),
        ]
    assert callable(source)
    return [(f"{getattr(source, '__name__', 'the notice')} says so", source)]


def _ask(name: str, seconds_left: SecondsLeft, tell: Tell) -> None:
    """Poll until there is a notice. Errors slow down the polling; the first of a series is logged."""
    pause_s = _EVERY_S
    while True:
        try:
            left_s = seconds_left()
            pause_s = _EVERY_S
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: training continues
            if pause_s == _EVERY_S:
                _log.info("no answer whether %s: %s: %s", name, type(error).__name__, error)
            left_s, pause_s = None, min(2 * pause_s, _SLOWEST_S)
        if left_s is not None:
            tell(name, max(0.0, left_s))
            return
        time.sleep(pause_s)


class Aws:
    """The interruption notice of a spot instance, as seconds left."""

    def __init__(self, base_url: str = "http://169.254.169.254") -> None:
        self._base_url = base_url
        self._token = ""

    def __call__(self) -> float | None:
        """Raises OSError or ValueError if the service does not answer as it should."""
        try:
            return self._look()
        except urllib.error.HTTPError as error:
            if error.code != 401:
                raise
            self._token = ""  # the token has expired
            return self._look()

    def _look(self) -> float | None:
        if not self._token:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
            self._token = _request(f"{self._base_url}/latest/api/token", headers, method="PUT")[0]
        url = f"{self._base_url}/latest/meta-data/spot/instance-action"
        try:
            action = json.loads(_request(url, {"X-aws-ec2-metadata-token": self._token})[0])
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise
        try:
            at = datetime.datetime.fromisoformat(action["time"])
            return (at - datetime.datetime.now(datetime.UTC)).total_seconds()
        except (KeyError, TypeError, ValueError):  # without a valid time it is still a notice
            return _AWS_DEFAULT_S


class Gcp:
    """A metadata value which means that the machine ends after `within_s` seconds."""

    def __init__(
        self, path: str, meaning: str, within_s: float, base_url: str = "http://metadata.google.internal"
    ) -> None:
        self._url, self._meaning, self._within_s = f"{base_url}/computeMetadata/v1/{path}", meaning, within_s
        self._etag = "0"

    def __call__(self) -> float | None:
        """Wait a while for a change. Raises OSError or ValueError if the service does not answer as it should."""
        url = f"{self._url}?wait_for_change=true&timeout_sec={_HANG_S}&last_etag={self._etag}"
        value, headers = _request(url, {"Metadata-Flavor": "Google"}, timeout_s=_HANG_S + _TIMEOUT_S)
        if headers.get("Metadata-Flavor") != "Google":
            raise ValueError(f"{self._url} was not answered by Google's metadata server")
        self._etag = headers.get("ETag") or "0"
        return self._within_s if value.strip() == self._meaning else None


def _request(
    url: str, headers: dict[str, str], *, method: str = "GET", timeout_s: float = _TIMEOUT_S
) -> tuple[str, Message]:
    request = urllib.request.Request(url, headers=headers, method=method)
    with _opener.open(request, timeout=timeout_s) as answer:
        return answer.read(65536).decode(), answer.headers
