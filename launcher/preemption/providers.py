"""Polls each cloud's metadata server for notices that this machine will be taken away.

| cloud | what is polled | notice |
|---|---|---|
| AWS | `spot/instance-action`, every 5 s, with a token of IMDSv2; 404 until there is one | 2 min |
| GCP | `instance/preempted`, a request that is answered when it changes | 30 s |
| Azure | `scheduledevents`, every second; lists the whole set's machines by name | 30 s or more |
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Protocol
from urllib.parse import urlencode

from elasticzero.launcher.preemption.metadata import MetadataError, MetadataResponse, MetadataServer
from elasticzero.launcher.protocol.view import PreemptionNotice

ADDRESS = "http://169.254.169.254"
"""Address at which all three answer: link-local, never proxied."""
AWS_NOTICE_S, GCP_NOTICE_S = 120.0, 30.0
AZURE_LEAD_S = 120.0
"""Seconds before an event at which it becomes a notice; before that a line is printed, for a reboot
because of a failing disk may be announced days before."""
TOKEN_TTL_S = 21600
TOKEN = re.compile(r"[A-Za-z0-9_+/=.~-]{1,1024}")
MACHINE = re.compile(r"[\w.-]{1,256}")
LONG_POLL_S = 60
FIRST_AZURE_CALL_S = 150.0
"""Seconds for the first answer: Azure begins to watch for events when it is first asked, and
answers after up to two minutes."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Holds a line worth printing that is no notice."""

    text: str


PollResult = PreemptionNotice | Advice | None


class Cloud(Protocol):
    """Reads one cloud's notices that this machine will be taken away."""

    name: str
    every_s: float
    """Seconds from one poll to the next."""

    def probe(self) -> None:
        """Returns if this machine is one of its own; raises `MetadataError` if not, or if no server
        answers."""

    def poll(self) -> PollResult:
        """Returns the present notice or advice; raises `MetadataError`."""

    def close(self) -> None:
        """Ends a poll that waits; callable from any thread."""


class Aws:
    """Reads spot interruptions of EC2; a rebalance recommendation is only printed."""

    name = "AWS"
    every_s = 5.0

    def __init__(self, url: str) -> None:
        self._server = MetadataServer(url)
        self._token: str | None = None
        self._renew_s = 0.0

    def probe(self) -> None:
        self._fresh_token()

    def poll(self) -> PollResult:
        response = self._get("/latest/meta-data/spot/instance-action")
        if response.status == 200:
            value = response.json()
            action = value.get("action")
            if action not in ("terminate", "stop", "hibernate"):
                raise MetadataError(f"{response.url} names no action: {response.text:.80}")
            left_s = _left_s(_iso_time(value.get("time")), response, AWS_NOTICE_S)
            what = "hibernation" if action == "hibernate" else "interruption"
            return _notice(f"AWS spot {what}", left_s, response)
        response.expect(404)
        advice = self._get("/latest/meta-data/events/recommendations/rebalance")
        if advice.status == 200:
            return Advice(
                "AWS recommends to leave this machine, for it may be interrupted soon; training "
                "goes on until it says that it will be"
            )
        advice.expect(404)
        return None

    def close(self) -> None:
        self._server.close()

    def _get(self, path: str) -> MetadataResponse:
        token = self._token
        if token is None or time.monotonic() >= self._renew_s:
            token = self._fresh_token()
        response = self._server.get(path, {"X-aws-ec2-metadata-token": token})
        if response.status == 401:
            token = self._fresh_token()
            response = self._server.get(path, {"X-aws-ec2-metadata-token": token})
        return response

    def _fresh_token(self) -> str:
        self._token = None
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
        response = self._server.get("/latest/api/token", headers, method="PUT").expect(200)
        token = response.text.strip()
        if not TOKEN.fullmatch(token):
            raise MetadataError(f"{response.url} gave no token: {token:.80}")
        granted = response.headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
        ttl_s = int(granted) if granted.isdecimal() else TOKEN_TTL_S
        self._token, self._renew_s = token, response.at_s + ttl_s / 2
        return token


class Gcp:
    """Reads notices of Compute Engine; the request waits at the server until the answer changes."""

    name = "GCP"
    every_s = 1.0

    def __init__(self, url: str) -> None:
        self._server = MetadataServer(url)
        self._etag: str | None = None
        """Tag of the answer FALSE; from then on the request waits for a change."""

    def probe(self) -> None:
        response = self._preempted({})
        if response.headers.get("metadata-flavor") != "Google":
            raise MetadataError(f"{response.url} is no metadata server of GCP")

    def poll(self) -> PollResult:
        query: dict[str, Any] = {}
        if self._etag is not None:
            query = {"wait_for_change": "true", "timeout_sec": LONG_POLL_S, "last_etag": self._etag}
        try:
            response = self._preempted(query)
        except MetadataError:
            self._etag = None
            raise
        text = response.text.strip().upper()
        if text == "TRUE":
            return _notice("GCP preemption", GCP_NOTICE_S, response)
        if text != "FALSE":
            raise MetadataError(
                f"{response.url} answered neither TRUE nor FALSE: {response.text:.80}"
            )
        self._etag = response.headers.get("etag")
        return None

    def close(self) -> None:
        self._server.close()

    def _preempted(self, query: Mapping[str, Any]) -> MetadataResponse:
        path = "/computeMetadata/v1/instance/preempted"
        if query:
            path += f"?{urlencode(query)}"
        timeout_s = LONG_POLL_S + 15.0 if query else 5.0
        headers = {"Metadata-Flavor": "Google"}
        return self._server.get(path, headers, timeout_s=timeout_s).expect(200)


class Azure:
    """Reads scheduled events of this machine. They are not acknowledged: that would shorten the
    notice of every machine that the event names."""

    name = "Azure"
    every_s = 1.0
    kinds: Mapping[str, str] = {
        "Preempt": "Azure spot eviction",
        "Terminate": "Azure termination",
        "Reboot": "Azure reboot",
        "Redeploy": "Azure redeployment",
    }
    """Kinds of events that take the machine away; `Freeze` passes within seconds."""

    def __init__(self, url: str) -> None:
        self._server = MetadataServer(url)
        self._machine: str | None = None
        self._asked = False

    def probe(self) -> None:
        self._machine = self._name()

    def poll(self) -> PollResult:
        machine = self._machine = self._machine or self._name()
        timeout_s = 10.0 if self._asked else FIRST_AZURE_CALL_S
        response = self._get("/metadata/scheduledevents?api-version=2020-07-01", timeout_s)
        self._asked = True
        events = response.json().get("Events")
        if not isinstance(events, list):
            raise MetadataError(f"{response.url} lists no events: {response.text:.80}")
        result = [self._event(event, machine, response) for event in events]
        notices = [one for one in result if isinstance(one, PreemptionNotice)]
        others = [one for one in result if isinstance(one, Advice)]
        return min(notices, key=lambda n: n.by_s or 0.0) if notices else next(iter(others), None)

    def close(self) -> None:
        self._server.close()

    def _event(self, event: Any, machine: str, response: MetadataResponse) -> PollResult:
        if not isinstance(event, dict) or event.get("EventType") not in self.kinds:
            return None
        names = event.get("Resources")
        if not isinstance(names, list) or machine.lower() not in [str(n).lower() for n in names]:
            return None
        what = self.kinds[event["EventType"]]
        begins = event.get("NotBefore")
        if event.get("EventStatus") == "Started" or not begins:
            return _notice(what, 0.0, response)
        left_s = _left_s(_mail_time(begins), response, float("inf"))
        if left_s == float("inf"):
            return _notice(what, 30.0, response)  # the shortest that Azure promises
        if left_s > AZURE_LEAD_S:
            return Advice(f"{what} at {begins}: this node leaves {AZURE_LEAD_S:.0f} s before")
        return _notice(what, left_s, response)

    def _name(self) -> str:
        path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        response = self._get(path, 5.0)
        name = response.text.strip()
        if not MACHINE.fullmatch(name):
            raise MetadataError(f"{response.url} gave no name of this machine: {name:.80}")
        return name

    def _get(self, path: str, timeout_s: float) -> MetadataResponse:
        return self._server.get(path, {"Metadata": "true"}, timeout_s=timeout_s).expect(200)


CLOUDS: Mapping[str, Callable[[str], Cloud]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


def _notice(what: str, left_s: float, response: MetadataResponse) -> PreemptionNotice:
    """Returns a notice whose time counts from the answer that gave it.

    Args:
        what: What the provider will do.
        left_s: Seconds from the answer until then.
        response: The answer.
    """
    return PreemptionNotice(
        reason=f"{what} in {left_s:.0f} s", received_s=response.at_s, by_s=response.at_s + left_s
    )


def _left_s(moment: datetime | None, response: MetadataResponse, most_s: float) -> float:
    """Returns the seconds from an answer to a moment, by the server's own clock.

    Args:
        moment: The moment; None: it is not given, and `most_s` is returned.
        response: The answer.
        most_s: The highest value that is returned; the lowest is 0.
    """
    if moment is None:
        return most_s
    return min(max(0.0, moment.timestamp() - response.clock_s), most_s)


def _iso_time(text: Any) -> datetime | None:
    with suppress(ValueError, TypeError):
        return _in_utc(datetime.fromisoformat(text))
    return None


def _mail_time(text: Any) -> datetime | None:
    """Returns the Unix time of a text such as `Mon, 19 Sep 2016 18:29:47 GMT`."""
    with suppress(ValueError, TypeError):
        return _in_utc(parsedate_to_datetime(text))
    return None


def _in_utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
