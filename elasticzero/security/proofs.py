"""Computes proofs, by which a process shows that it has a secret without showing the secret.

Pure. A proof is an HMAC with SHA-256 (RFC 2104) under the secret. It covers a purpose, all that it
is to be valid for, and a nonce that the process which checks it has drawn. So nobody who reads it
on the network can use it for anything else, nor a second time.
"""

from __future__ import annotations

import hmac

LAST_RUN_WITH_THE_TOKEN = 1
"""The secret of runs up to this one is the job's token itself: see `run_secret`."""


def run_secret(token: str, run: int) -> str:
    """Returns the secret that the processes of one run of the job share.

    It is derived from the token, so that a process of an earlier run is a stranger to those of a
    later one. The secret of the first run is the token itself: nodes of the release before have no
    other, and their jobs are in their first run.

    Args:
        token: The job's token.
        run: Number of the run; one that is not stated counts as the first.
    """
    if run <= LAST_RUN_WITH_THE_TOKEN:
        return token
    return proof(token, "run", str(run)).hex()


def proof(secret: str, purpose: str, *fields: str | bytes) -> bytes:
    """Returns the proof that a process has a secret. It is valid for these fields alone: the length
    of each is part of the message, so that no two lists of fields make one message.

    Args:
        secret: The secret, which cannot be computed from the proof.
        purpose: What the proof is for; a proof for another purpose never equals it.
    """
    encoded = [part.encode() if isinstance(part, str) else part for part in (purpose, *fields)]
    message = b"".join(b"%d:%b" % (len(part), part) for part in encoded)
    return hmac.digest(secret.encode(), message, "sha256")
