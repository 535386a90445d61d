"""What the ranks' store sends, and what it takes for the other end's."""

from __future__ import annotations

import random

import pytest

from elasticzero.comm.store.wire import (
    HEADER,
    Message,
    Seal,
    Session,
    WireError,
    framed,
    generation_secret,
    packed,
    size_of,
    unpacked,
)

MESSAGES = [
    Message(0),
    Message(255, -1, (b"",)),
    Message(3, (1 << 63) - 1, (b"key", b"", bytes(300))),
    Message(1, -(1 << 63), tuple(bytes([i]) * i for i in range(40))),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_read_as_it_was_written(message: Message) -> None:
    assert unpacked(packed(message)) == message


@pytest.mark.parametrize("seed", range(400))
def test_any_other_bytes_are_a_message_or_a_wire_error(seed: int) -> None:
    """Bytes are changed, cut off and added; nothing else is raised, and nothing is made up."""
    draw = random.Random(seed)
    payload = bytearray(packed(draw.choice(MESSAGES)))
    for _ in range(draw.randint(1, 4)):
        match draw.randrange(3):
            case 0 if payload:
                payload[draw.randrange(len(payload))] = draw.randrange(256)
            case 1:
                del payload[draw.randrange(len(payload) + 1) :]
            case _:
                payload += draw.randbytes(draw.randint(1, 9))
    try:
        message = unpacked(bytes(payload))
    except WireError:
        return
    assert packed(message) == bytes(payload)


@pytest.mark.parametrize("number", [1 << 63, -(1 << 63) - 1])
def test_a_number_of_more_than_64_bits_is_refused_where_it_is_given(number: int) -> None:
    with pytest.raises(ValueError, match="no such number"):
        packed(Message(1, number))


def frame(seal: Seal, payload: bytes) -> tuple[bytes, bytes]:
    sent = framed(seal, payload)
    size, tag = size_of(sent[: HEADER.size])
    assert sent[HEADER.size :] == payload and size == len(payload)
    return tag, payload


def test_a_seal_opens_its_messages_once_and_in_their_order() -> None:
    key = b"key of this direction"
    sender, other = Seal(key), Seal(b"key of the other direction")
    first, second = frame(sender, b"same"), frame(sender, b"same")
    assert first != second
    receiver = Seal(key)
    receiver.check(*first)
    receiver.check(*second)
    for wrong in (first, second):
        with pytest.raises(WireError):
            Seal(b"key of the other direction").check(*wrong)
    with pytest.raises(WireError):
        Seal(key).check(*second)
    replayed = Seal(key)
    replayed.check(*first)
    with pytest.raises(WireError):
        replayed.check(*first)
    with pytest.raises(WireError):
        Seal(key).check(first[0], b"sama")
    with pytest.raises(WireError):
        Seal(key).check(*frame(other, b"same"))


def test_a_proof_is_of_one_generation_connection_rank_and_end() -> None:
    secret = generation_secret("token", "password")
    same = Session.of(secret, b"server", b"client", 1)
    assert same == Session.of(generation_secret("token", "password"), b"server", b"client", 1)
    others = [
        Session.of(generation_secret("token", "passwork"), b"server", b"client", 1),
        Session.of(generation_secret("tokem", "password"), b"server", b"client", 1),
        Session.of(generation_secret("", "tokenpassword"), b"server", b"client", 1),
        Session.of(secret, b"servev", b"client", 1),
        Session.of(secret, b"server", b"clienu", 1),
        Session.of(secret, b"server", b"client", 2),
    ]
    proofs = {p for s in [same, *others] for p in (s.client_proof, s.server_proof)}
    assert len(proofs) == 14


def test_a_size_that_no_message_has_is_refused_before_it_comes() -> None:
    with pytest.raises(WireError):
        size_of(b"\xff" * HEADER.size)
    with pytest.raises(ValueError, match="larger"):
        framed(None, bytes((256 << 20) + 1))
