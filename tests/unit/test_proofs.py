"""Secrets that are derived, and proofs: what one is valid for is valid for nothing else."""

from __future__ import annotations

import hashlib
import hmac

from hypothesis import given
from hypothesis import strategies as st

from elasticzero.security.proofs import proof, run_secret

TOKEN = "the-job's-own-password"
FIELDS = st.lists(st.text("ab:1", max_size=3), max_size=4)


def test_a_proof_is_the_hmac_of_its_parts_with_their_lengths() -> None:
    message = b"7:request3:GET2:/x"
    expected = hmac.new(TOKEN.encode(), message, hashlib.sha256).digest()
    assert proof(TOKEN, "request", "GET", b"/x") == expected


@given(FIELDS, FIELDS)
def test_two_lists_of_fields_never_make_one_proof(fields: list[str], others: list[str]) -> None:
    assert (proof(TOKEN, "a", *fields) == proof(TOKEN, "a", *others)) == (fields == others)


def test_each_run_has_a_secret_and_the_first_one_has_the_token() -> None:
    """A job of the release before is in its first run."""
    assert run_secret(TOKEN, 0) == run_secret(TOKEN, 1) == TOKEN
    derived = [run_secret(TOKEN, run) for run in range(1, 20)]
    assert len(set(derived)) == len(derived)
    assert run_secret(TOKEN, 2) != run_secret(TOKEN + "x", 2)
    assert all(secret.isalnum() and len(secret) == 64 for secret in derived[1:])
