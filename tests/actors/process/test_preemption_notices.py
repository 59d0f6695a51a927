"""Notices of the clouds' metadata services, from local servers; no behaviour of theirs harms training."""

from __future__ import annotations

import datetime
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest

from raysharded.actors.process import preemption_notices
from raysharded.actors.process.preemption_notices import Aws, Gcp, watch

WAIT_S = 20.0


class Metadata(http.server.BaseHTTPRequestHandler):
    """Speaks the protocols of AWS's (version 2) and Google's metadata servers; the class has the answers."""

    notice: ClassVar[str | None] = None
    """The body of the notice; None: there is none."""
    token: ClassVar[str] = "first"
    status: ClassVar[int] = 200
    """Status of every answer: 200, or an error."""
    tokens_given: ClassVar[int] = 0
    preempted: ClassVar[str] = "FALSE"
    changed: ClassVar[threading.Condition] = threading.Condition()

    def do_PUT(self) -> None:
        assert self.path == "/latest/api/token"
        assert int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) > 0
        type(self).tokens_given += 1
        self._answer(self.status, self.token)

    def do_GET(self) -> None:
        if self.status != 200:
            self._answer(self.status, "")
        elif self.path == "/latest/meta-data/spot/instance-action":
            if self.headers["X-aws-ec2-metadata-token"] != self.token:
                self._answer(401, "")
            else:
                self._answer(404 if self.notice is None else 200, self.notice or "")
        elif self.path.startswith("/computeMetadata/v1/instance/preempted?"):
            assert self.headers["Metadata-Flavor"] == "Google"
            with self.changed:
                if "last_etag=0" not in self.path:
                    self.changed.wait_for(lambda: f"last_etag={self.preempted}" not in self.path, WAIT_S)
            self._answer(200, self.preempted)
        else:
            self._answer(404, "")

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Metadata-Flavor", "Google")
        self.send_header("ETag", body)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Print nothing on stderr."""


@contextmanager
def serving() -> Iterator[tuple[str, type[Metadata]]]:
    """A separate server, and the class with its answers."""
    service = type("Service", (Metadata,), {"changed": threading.Condition()})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), service) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", service
        finally:
            server.shutdown()


def in_seconds(seconds: float) -> str:
    at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
    return json.dumps({"action": "terminate", "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")})


def test_aws_reports_how_long_a_spot_instance_has_and_nothing_before() -> None:
    with serving() as (url, service):
        ask = Aws(url)
        assert [ask(), ask()] == [None, None]
        service.notice = in_seconds(100)
        left_s = ask()
        assert left_s is not None
        assert 95 < left_s <= 100
        assert service.tokens_given == 1


def test_an_expired_token_is_requested_again() -> None:
    with serving() as (url, service):
        ask = Aws(url)
        assert ask() is None
        service.token = "second"
        service.notice = in_seconds(60)
        assert ask() is not None
        assert service.tokens_given == 2


@pytest.mark.parametrize("notice", ['{"action": "stop"}', '{"action": "stop", "time": "soon"}'])
def test_a_notice_without_a_time_is_a_notice_all_the_same(notice: str) -> None:
    with serving() as (url, service):
        service.notice = notice
        assert Aws(url)() == 120.0


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests in a second."""
    monkeypatch.setattr(preemption_notices, "_EVERY_S", 0.1)


@pytest.mark.usefixtures("often")
def test_google_reports_at_once_that_a_machine_is_preempted() -> None:
    told = threading.Event()
    heard: list[tuple[str, float]] = []

    def tell(reason: str, left_s: float) -> None:
        heard.append((reason, left_s))
        told.set()

    with serving() as (url, service):
        watch([Gcp("instance/preempted", "TRUE", 30.0, url)], tell)
        assert not told.wait(0.5)  # by then it hangs in the second question
        with service.changed:
            service.preempted = "TRUE"
            service.changed.notify_all()
        assert told.wait(WAIT_S)
    assert heard[0][1] == 30.0


def test_a_migration_for_maintenance_is_no_notice() -> None:
    assert preemption_notices._watched("gcp")[1][0] == "Google Cloud ends the machine for maintenance"
    with serving() as (url, service):
        service.preempted = "MIGRATE_ON_HOST_MAINTENANCE"
        assert Gcp("instance/preempted", "TERMINATE_ON_HOST_MAINTENANCE", 60.0, url)() is None


@pytest.mark.usefixtures("often")
def test_errors_of_the_service_and_of_ones_own_function_only_delay_the_notice() -> None:
    told = threading.Event()
    calls: list[int] = []

    def mine() -> float | None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("a bug")
        return None if len(calls) == 2 else 7.0

    with serving() as (url, service):
        service.status = 500
        aws, asked = Aws(url), threading.Event()

        def asking() -> float | None:
            try:
                return aws()
            except OSError:
                asked.set()
                raise

        heard: list[float] = []
        watch([asking, mine], lambda _, left_s: (heard.append(left_s), told.set())[1])  # type: ignore[func-returns-value]
        assert told.wait(WAIT_S)
        assert heard == [7.0]
        assert asked.wait(WAIT_S)
        told.clear()
        service.status, service.notice = 200, in_seconds(50)
        assert told.wait(WAIT_S)
        assert 40 < heard[1] <= 50


def test_a_service_that_hangs_or_is_not_there_is_an_error_soon() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
        port = silent.getsockname()[1]
        with pytest.raises(OSError):
            Aws(f"http://127.0.0.1:{port}")()
    with pytest.raises(OSError):
        Aws(f"http://127.0.0.1:{port}")()


def test_an_answer_that_is_not_googles_is_refused() -> None:
    class Other(Metadata):
        def send_header(self, keyword: str, value: str) -> None:
            if keyword != "Metadata-Flavor":
                super().send_header(keyword, value)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with pytest.raises(ValueError, match="not answered by Google"):
            Gcp("instance/preempted", "TRUE", 30.0, f"http://127.0.0.1:{server.server_port}")()
        server.shutdown()
