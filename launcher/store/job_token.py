"""Agrees on the job's token: the password of all that agents serve but metrics and health.

Rules:
1. If a node was given a token, that one counts; the store then holds only its digest.
2. Otherwise the first node makes one and puts it into the store, for the others and for commands.
3. Nodes of one job use one token. A node that was given another one, or none where one is needed,
   does not join. Nor does any node where the record cannot be read.
4. The record in the store is written once. It stays when the job ends and begins again.
5. The record also says where the job's certificates come from (`TlsMode`), for all nodes and
   commands: with the first record the job has begun with it, and goes on with it. A record that
   does not say so is of a job without TLS. A node that was given another mode does not join.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field, replace

from elasticzero.errors import UserError
from elasticzero.launcher.protocol.documents import to_bytes
from elasticzero.launcher.secrets import TOKEN as VARIABLE
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.store.api import Condition, Entry, Store
from elasticzero.launcher.tls.credentials import TlsMode
from elasticzero.serialization import OMIT_DEFAULT, RecordError, decode, parse_json
from elasticzero.text import shown

KEY = "token"
MIN_LENGTH = 16
DIGEST_SHOWN = 16
"""Number of characters of the digest that are part of a world."""
HOW = f"--token-file FILE or the environment variable {VARIABLE}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Holds what the store has of the job's token."""

    digest: str
    """SHA-256 of the token, in hexadecimal."""
    token: str | None = field(default=None, repr=False)
    """The token itself where no node was given one."""
    tls: TlsMode = field(default="off", metadata=OMIT_DEFAULT)
    """Says where the certificates of the job come from."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """Holds the token of a node's job, and the store's record of it."""

    secret: Secret
    record: Record
    revision: int
    """Revision at which the record was written."""
    history: int = 0
    """Number of the store's history in which the token was agreed on."""

    @property
    def digest(self) -> str:
        """Returns enough of the digest to tell tokens apart."""
        return self.record.digest[:DIGEST_SHOWN]

    def at(self, revision: int) -> Agreed:
        """Returns the same, with the record written at another revision."""
        return replace(self, revision=revision)


def check_given(token: Secret | None) -> Secret | None:
    """Returns the token as it was given; raises `UserError`, without naming it, for one that cannot
    serve."""
    if token is not None and (len(token.reveal) < MIN_LENGTH or not _is_plain(token.reveal)):
        raise UserError(
            f"the job's token ({HOW}): at least {MIN_LENGTH} printable ASCII characters "
            "without spaces are expected; `openssl rand -hex 32` makes one"
        )
    return token


def agree_on_token(
    store: Store,
    node_token: Secret | None,
    tls: TlsMode | None = None,
    shared: Record | None = None,
) -> Agreed:
    """Returns the token of this node's job, and puts it into the store if none is there.

    Args:
        store: The job's part of etcd.
        node_token: The token that this node was given; None: none.
        tls: Where this node was told to take certificates from; None: it does as the others of its
            job. The first one makes them of the token if it was given one.
        shared: Record of the token that all islands of the job have; None: this job is no island,
            or the store is theirs in common.

    Raises:
        UserError: The job has another token, or does otherwise.
    """
    history = store.history.number
    candidate = node_token or Secret(secrets.token_urlsafe(32))
    is_given = node_token is not None
    if shared is not None and shared.token is not None:
        candidate = Secret(shared.token)
    record = shared or Record(
        digest=_digest(candidate),
        token=None if is_given else candidate.reveal,
        tls=tls or ("job" if is_given else "off"),
    )
    absent = Condition(key=KEY, mod_revision=0)
    while (entry := _entry(store)) is None:
        revision = store.write({KEY: to_bytes(record)}, conditions=[absent])
        if revision is not None:
            return Agreed(candidate, record, revision, history)
    stored = record_in(entry)
    if tls not in (None, stored.tls):
        raise UserError(
            f"--tls {tls} was given to this node, and the job has begun with --tls {stored.tls}; "
            "leave --tls out to do as the job's other nodes. To change it, stop them and delete "
            f"the key `{KEY}` of the job in etcd"
        )
    if node_token is None and stored.token is not None:
        return Agreed(Secret(stored.token), stored, entry.mod_revision, history)
    if node_token is not None and hmac.compare_digest(stored.digest, _digest(node_token)):
        return Agreed(node_token, stored, entry.mod_revision, history)
    wrong = "no token" if node_token is None else "another token than its other nodes"
    raise UserError(
        f"{wrong} was given to this node of the job; give all of them the same, by {HOW}. To "
        f"change a job's token, stop its nodes and delete the key `{KEY}` of the job in etcd"
    )


def token_for_operator(store: Store, operator_token: Secret | None) -> Secret | None:
    """Returns the token with which a command reads what the job's agents serve.

    None: it was not given, and the store has its digest alone. Raises `UserError` if the job has
    another one.
    """
    entry = _entry(store)
    record = record_in(entry) if entry is not None else None
    if record is None:
        return operator_token
    if operator_token is None:
        return Secret(record.token) if record.token is not None else None
    if not hmac.compare_digest(record.digest, _digest(operator_token)):
        raise UserError(f"the token given is not that of the job's nodes; check {HOW}")
    return operator_token


def stored_tls(store: Store) -> TlsMode:
    """Returns where the certificates of a job come from; raises `UserError` if that is not
    readable."""
    entry = _entry(store)
    return "off" if entry is None else record_in(entry).tls


def record_in(entry: Entry) -> Record:
    """Returns the record that an entry holds; raises `UserError`, which does not show what stands
    there, if it is none."""
    try:
        record = decode(Record, parse_json(entry.value, KEY), KEY)
        if not record.digest.isascii() or not _is_plain(record.token or ""):
            raise RecordError(f"{KEY}: printable ASCII characters without spaces were expected")
    except RecordError as error:
        raise UserError(
            f"the record of the job's token in etcd, the key `{KEY}` of the job, cannot be read "
            f"({shown(str(error)):.100}); stop the job's nodes, delete the key, and start again"
        ) from None
    return record


def is_record_of(entry: Entry, agreed: Agreed) -> bool:
    """Returns whether an entry holds the record of this token, with the job's mode; False if it
    cannot be read."""
    try:
        stored = record_in(entry)
    except UserError:
        return False
    return (stored.digest, stored.tls) == (agreed.record.digest, agreed.record.tls)


def _entry(store: Store) -> Entry | None:
    return store.read(KEY, limit=1).entries.get(KEY)


def _is_plain(text: str) -> bool:
    """Returns whether a header of HTTP can hold the text as it is."""
    return text.isascii() and text.isprintable() and " " not in text


def _digest(token: Secret) -> str:
    return hashlib.sha256(token.reveal.encode()).hexdigest()
