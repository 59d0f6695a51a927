"""Credentials of a client: where boto3 found them, and whether it finds others by now.

A client keeps credentials of the environment or of a file as they were when it was made. Keys are exchanged meanwhile:
by a person, a mounted secret, a daemon that rewrites a file. So a refusal makes `Connection.renew` look them up anew.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import botocore.session
import botocore.utils
from botocore import exceptions as boto
from botocore.credentials import RefreshableCredentials

from raysharded.checkpoint.storage.s3.errors import (
    EXPIRED_CREDENTIALS,
    UNKNOWN_CREDENTIALS,
    InvalidConfiguration,
    code_of,
    is_denial,
    right_of,
    status_of,
)

Session = Any  # botocore has no types, here and below

_NOT_FOUND = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.TokenRetrievalError,
    boto.SSOError,
)
"""Failures on this machine, before any request."""
_OTHER_REASONS = frozenset({"QuotaExceeded", "RequestTimeTooSkewed"})

_KEPT = (
    "A running process keeps its environment: start it again with new ones. Keys in a file "
    "(AWS_SHARED_CREDENTIALS_FILE) are looked up again when the server refuses them."
)
_LOOKED_UP = "Renew them there: they are looked up again with every later try."


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Credentials as a session found them. Without any, `given` is None."""

    given: Any = field(repr=False)
    source: str
    """Their source, such as "the file ~/.aws/credentials, profile default"."""
    kept: bool
    """Whether they come from the environment, which a running process keeps."""

    @property
    def renews_itself(self) -> bool:
        """Whether botocore renews them before they expire: those of a role, which are new at each look-up."""
        return isinstance(self.given, RefreshableCredentials)

    def may_be_outdated(self, error: BaseException) -> bool:
        """Whether the request that failed may succeed with other credentials.

        AccessDenied is included: some servers answer so to a key that is disabled. So is a refused HEAD, whose answer
        has no code. Both are about a right if the credentials renew themselves.
        """
        code, status = code_of(error), status_of(error)
        if isinstance(error, _NOT_FOUND) or code in EXPIRED_CREDENTIALS | UNKNOWN_CREDENTIALS:
            return True
        refused = (status in (401, 403) and code not in _OTHER_REASONS) or (status, code) == (400, "400")
        return refused and not self.renews_itself

    def differ_from(self, others: Found) -> bool:
        """True if there are credentials, and their keys or token are not the others'. May refresh those of a role."""
        return self.given is not None and _keys(self.given) != _keys(others.given)

    def __str__(self) -> str:
        """Source and the last four characters of the access key's id; never a secret."""
        if self.given is None:
            return "none were found"
        return f"the access key that ends in {self.given.access_key[-4:]}, from {self.source}"

    def remedy(self, error: BaseException) -> str | None:
        """Remedy for a refusal of these credentials; None for other errors."""
        code = code_of(error)
        if code in EXPIRED_CREDENTIALS:
            said = "The credentials have expired"
        elif code in UNKNOWN_CREDENTIALS:
            said = "The server does not accept these credentials"
        elif is_denial(error):
            return f"Allow these credentials {right_of(error)} there: {self}."
        else:
            return None
        on_the_way = " Check too that no proxy changes the requests." if code == "SignatureDoesNotMatch" else ""
        return f"{said}: {self}. {_KEPT if self.kept else _LOOKED_UP}{on_the_way}"


def look_up(session: Session) -> Found:
    """The session's credentials. About 10 ms, or as long as a role's server takes.

    Raises BotoCoreError, or InvalidConfiguration where a file or program of the configuration is unusable.
    """
    try:
        given = session.get_credentials()
    except (OSError, ValueError) as error:
        raise InvalidConfiguration(f"credentials could not be looked up ({type(error).__name__}: {error})") from error
    method = given.method if given is not None else ""
    return Found(given=given, source=_source(session, method), kept=method == "env")


def new_session() -> Session:
    """A session of botocore that has looked up nothing yet. boto3's default session is not thread-safe."""
    session = botocore.session.Session()
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=instant)
    return session


def instant(written: Any) -> datetime:
    """A time of an answer. botocore takes two thirds of the CPU time of a listing for the times of its keys."""
    if isinstance(written, str) and written.endswith("Z"):
        with contextlib.suppress(ValueError):
            return datetime.fromisoformat(written)
    found: datetime = botocore.utils.parse_timestamp(written)
    return found


def _keys(credentials: Any) -> Any:
    return None if credentials is None else credentials.get_frozen_credentials()


def _source(session: Session, method: str) -> str:
    """The source in words. `method`: botocore's name of it."""
    variable, profile = session.get_config_variable, f"profile {session.profile or 'default'}"
    return {
        "env": "the environment (AWS_ACCESS_KEY_ID)",
        "shared-credentials-file": f"the file {variable('credentials_file')}, {profile}",
        "config-file": f"the file {variable('config_file')}, {profile}",
        "assume-role": f"the role of {profile}",
        "assume-role-with-web-identity": "the role of a web identity (AWS_WEB_IDENTITY_TOKEN_FILE)",
        "custom-process": f"credential_process of {profile}",
        "sso": f"the single sign-on of {profile}",
        "login": f"the login of {profile}",
        "container-role": "the container's role",
        "iam-role": "the machine's role",
    }.get(method, method)
