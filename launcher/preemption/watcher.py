"""Watches for the notice that this machine will be taken away, in a thread of its own.

Whatever a metadata server does, slow, broken or gone, training does not notice.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType

from elasticzero.errors import one_line
from elasticzero.launcher.preemption.metadata import MetadataError
from elasticzero.launcher.preemption.providers import ADDRESS, CLOUDS, Advice, Cloud, PollResult
from elasticzero.launcher.protocol.view import PreemptionNotice
from elasticzero.launcher.retry import RetryPolicy, retry_call

RETRY = RetryPolicy(first_pause_s=0.5, max_pause_s=5.0, spread=1.0)
"""Pauses between tries to read from a server that does not answer."""
FAILURES_BEFORE_REPORT = 3
"""Number of failures in a row that are worth a line."""
CLOSE_S = 2.0


def address_variable(choice: str) -> str:
    """Returns the environment variable that names another address of a cloud's metadata server."""
    return f"ELASTICZERO_{choice.upper()}_METADATA_URL"


def cloud_named(choice: str, environment: Mapping[str, str]) -> Cloud:
    """Returns the cloud of one of the names in `CLOUDS`; raises `UserError` for a bad address."""
    return CLOUDS[choice](environment.get(address_variable(choice)) or ADDRESS)


class PreemptionWatcher:
    """Watches for the notices of one cloud, in a thread of its own, until it is closed."""

    def __init__(
        self,
        choice: str,
        on_notice: Callable[[str, float | None], None],
        log_line: Callable[[str], None],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Prepares to watch.

        Args:
            choice: A name in `CLOUDS`; `auto`: the first that answers a request; `none`: no cloud.
            on_notice: Called with the reason, and the deadline on the monotonic clock.
            log_line: Receives lines for people.
            environment: Variables that may name other addresses of metadata servers.

        Raises:
            UserError: An address in the environment is invalid.
        """
        names = {"auto": tuple(CLOUDS), "none": ()}.get(choice, (choice,))
        self._clouds = [cloud_named(name, environment) for name in names]
        self._chosen = choice not in ("auto", "none")
        self._on_notice, self._log_line = on_notice, log_line
        self._stop = threading.Event()
        self._notice: PreemptionNotice | None = None
        self._advised = ""
        self._failing = False
        self._thread = threading.Thread(
            target=self._run, name="elasticzero-preemption", daemon=True
        )

    def __enter__(self) -> PreemptionWatcher:
        if self._clouds:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._stop.set()
        for cloud in self._clouds:
            cloud.close()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            cloud = self._clouds[0] if self._chosen else self._detect_cloud()
            if cloud is not None:
                self._watch(cloud)
        except Exception as error:  # noqa: BLE001 - the top of a thread: training goes on without it
            if not self._stop.is_set():
                self._log_line(
                    f"this node no longer watches for preemption notices: {one_line(error)}"
                )

    def _detect_cloud(self) -> Cloud | None:
        """Returns the cloud to which this machine belongs."""
        for cloud in self._clouds:
            with suppress(MetadataError):
                if not self._stop.is_set():
                    cloud.probe()
                    return cloud
        if not self._stop.is_set():
            self._log_line(
                "no cloud's metadata server answers: preemption notices are not watched for; "
                "SIGTERM makes this node leave"
            )
        return None

    def _watch(self, cloud: Cloud) -> None:
        self._log_line(f"this node watches for preemption notices of {cloud.name}")
        while not self._stop.is_set():
            result = retry_call(
                cloud.poll,
                RETRY,
                retryable=lambda error: isinstance(error, MetadataError),
                closed=self._stop,
                on_failure=partial(self._report_failures, cloud),
            )
            if self._failing:
                self._failing = False
                self._log_line(f"the metadata server of {cloud.name} answers again")
            self._handle(cloud, result)
            self._stop.wait(cloud.every_s)

    def _report_failures(self, cloud: Cloud, failures: int, error: BaseException) -> None:
        """Reports once that the server has failed several times in a row.

        Args:
            cloud: The provider.
            failures: Number of failures in a row.
            error: The last failure.
        """
        if failures < FAILURES_BEFORE_REPORT or self._failing:
            return
        self._failing = True
        self._log_line(
            f"the metadata server of {cloud.name} fails, so a notice may be missed; it is read "
            f"again and again ({one_line(error)})"
        )

    def _handle(self, cloud: Cloud, result: PollResult) -> None:
        """Passes a notice on once; one that is withdrawn later changes nothing."""
        if isinstance(result, PreemptionNotice):
            if self._notice is None:
                self._on_notice(result.reason, result.by_s)
            self._notice = result
        elif self._notice is not None:
            self._notice = None
            self._log_line(
                f"{cloud.name} has withdrawn its notice; this node leaves all the same, and may be "
                "started again"
            )
        elif isinstance(result, Advice) and result.text != self._advised:
            self._advised = result.text
            self._log_line(result.text)
