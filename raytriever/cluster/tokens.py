"""The token that closes a Ray cluster to strangers, and the variables that travel to a job sealed with it.

Ray writes the ``env_vars`` of a runtime environment into a log file and, for a moment, into the process list of every
node. So a job's secrets are sent as one encrypted value, which only processes that hold the cluster's token can open.
"""

import base64
import hashlib
import json
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from raytriever.errors import UserError

SEALED_VARIABLE = "RAYTRIEVER_SEALED_ENVIRONMENT"
OPENING_HOOK = "raytriever.cluster.tokens.open_environment"  # Ray calls it as a worker process starts


def cluster_token(file: Path | None = None) -> str | None:
    """The token in ``file``, else where Ray looks: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ``~/.ray/auth_token``.

    None where there is no token. Raises ``UserError`` for a file that is named and can't be read or holds none.
    """
    if file is None:
        if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
            return token
        if path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
            file = Path(path)
        else:
            file = Path.home() / ".ray" / "auth_token"
            if not file.exists():
                return None
    try:
        token = file.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(
            f"The cluster's token can't be read from {file}: {reason}. Give the file that the cluster was started with"
            " (--token-file, or RAY_AUTH_TOKEN_PATH)."
        ) from error
    if not token or len(token.split()) > 1:
        raise UserError(
            f"{file} holds no token: one line was expected, such as `ray get-auth-token --generate` writes."
        )
    return token


def seal(variables: Mapping[str, str], token: str) -> str:
    """``variables`` as one text that shows neither names nor values (Fernet: AES-128 in CBC mode, HMAC-SHA-256)."""
    from cryptography.fernet import Fernet

    return Fernet(_key(token)).encrypt(json.dumps(dict(variables)).encode()).decode()


def open_environment(environment: MutableMapping[str, str] | None = None) -> None:
    """Puts the sealed variables into the environment, where there are any; the sealed text stays as it is.

    Raises ``UserError`` where this process has no token, or another one than they were sealed with.
    """
    environment = os.environ if environment is None else environment
    sealed = environment.get(SEALED_VARIABLE)
    if not sealed:
        return
    from cryptography.fernet import Fernet, InvalidToken

    token = cluster_token()
    if token is None:
        raise UserError("The job's variables (--env) are sealed with the cluster's token, and this node has none.")
    try:
        environment.update(json.loads(Fernet(_key(token)).decrypt(sealed)))
    except InvalidToken as error:
        raise UserError(
            "The job's variables (--env) were sealed with another token than this node's. Start all nodes with the"
            " token that jobs are submitted with."
        ) from error


def _key(token: str) -> bytes:
    return base64.urlsafe_b64encode(hashlib.sha256(b"raytriever environment\0" + token.encode()).digest())
