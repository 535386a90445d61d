"""Texts of a script that no document could hold."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from elasticzero.ipc.channel import Channel
from elasticzero.ipc.failure import Failed
from elasticzero.ipc.messages import Attached, Finished, Message, PrepareFailed
from elasticzero.launcher.protocol.documents import Report, to_bytes
from elasticzero.launcher.store.decoding import document
from elasticzero.launcher.workers.forking.client import ForkServer
from elasticzero.launcher.workers.group import MAX_TEXT, WorkerGroup
from elasticzero.launcher.workers.process import Worker
from elasticzero.launcher.workers.progress_monitor import WorkerProgress

LONG = "é" * 3_000_000
"""Too long for a line between worker and agent, too."""
FITS = "é" * 1_000_000
"""Too long for a document."""
NOW_S = 50.0
SHORT_BYTES = 1 << 17


class Node:
    """The group of one worker, whose process is the test."""

    def __init__(self, directory: Path) -> None:
        self.group = WorkerGroup(cast(ForkServer, None), generation=1, wakeup_fd=-1, first_rank=0)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        log = directory / "0.log"
        self.worker = Worker(0, 0, 1 << 29, Channel(ours), log, 0)
        self.end = Channel(theirs)
        self.group.workers.append(self.worker)
        progress = WorkerProgress(rank=0, pid=1 << 29, log=log, request_location=print)
        self.group.progress_monitor.add(progress)

    def receive(self, *messages: Message) -> list[object]:
        """Has the worker send messages, and returns what the group passes on of them."""
        received: list[object] = []

        def send() -> None:
            for message in messages:
                self.end.send(message)

        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(send)
            while len(received) < len(messages) and not (sending.done() and sending.exception()):
                received += [message for _, message in self.group.poll_messages(NOW_S, ())]
            sending.result()
        return received


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.end.close()
    made.worker.channel.close()


def test_an_error_of_any_length_fits_into_a_report(node: Node) -> None:
    """etcd refused the report, which was taken for an outage: the job stood still for ever."""
    place = 'Traceback (most recent call last):\n  File "train.py", line 7, in train\n'
    trace = f"{place}ValueError: {LONG}\n"
    failed = Failed(step=3, blame="user", message=f"ValueError: {LONG}", traceback=trace)
    _, told = node.receive(Attached(pid=1), failed)
    failure = node.group.failure
    assert failure is not None
    assert failure.message.startswith("ValueError: éé")
    assert failure.message.endswith("characters more)")
    assert failure.traceback.startswith(place), "the place in the script is kept"
    data = to_bytes(Report(incarnation="i", phase="stopped", failure=failure))
    assert len(data) < SHORT_BYTES
    assert document(Report, data).failure == failure
    assert isinstance(told, Failed) and len(told.message) < 2 * MAX_TEXT, "terminals show it too"


def test_reasons_of_any_length_are_shortened(node: Node) -> None:
    finished = Finished(step=3, reason=f"seen {FITS}")
    _, refused, ended = node.receive(
        Attached(pid=1), PrepareFailed(token="t", reason=FITS, final=False), finished
    )
    assert isinstance(refused, PrepareFailed) and len(refused.reason) < 2 * MAX_TEXT
    assert isinstance(ended, Finished) and ended.reason.startswith("seen é")
    assert len(node.group.view(NOW_S).end_reason) < 2 * MAX_TEXT


def test_a_text_of_usual_length_stays_as_it_is(node: Node) -> None:
    failed = Failed(step=3, blame="user", message="x" * MAX_TEXT, traceback="a\n" * 900)
    _, told = node.receive(Attached(pid=1), failed)
    assert told == failed
