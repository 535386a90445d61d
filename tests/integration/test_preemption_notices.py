"""Each cloud's notices over real HTTP, from servers that behave and servers that do not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from elasticzero.errors import UserError
from elasticzero.launcher.preemption import providers
from elasticzero.launcher.preemption.metadata import MetadataError, MetadataServer
from elasticzero.launcher.preemption.providers import Advice, Cloud
from elasticzero.launcher.preemption.watcher import PreemptionWatcher, address_variable
from elasticzero.launcher.protocol.view import PreemptionNotice
from elasticzero.launcher.retry import RetryPolicy
from tests.clouds import PATIENCE_S, Aws, Azure, Gcp, Metadata, Reply, Request

PLAYED: tuple[type[Metadata], ...] = (Aws, Gcp, Azure)
NOBODY = "http://127.0.0.1:9"
"""No metadata server stands there."""
TROUBLES = {
    "busy": Reply(503, "Service Unavailable"),
    "garbage": Reply(200, "<html>welcome to the hotel's network</html>"),
    "an empty answer": Reply(200, ""),
    "another shape": Reply(200, '["surprise"]'),
    "redirect": Reply(302, "", {"Location": "http://127.0.0.1:9/elsewhere"}),
    "no answer": "drop",
    "forbidden": Reply(403, ""),
}


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for cloud in providers.CLOUDS.values():
        monkeypatch.setattr(cloud, "every_s", 0.05)


@pytest.fixture
def aws() -> Iterator[Aws]:
    with Aws() as server:
        yield server


@pytest.fixture
def gcp() -> Iterator[Gcp]:
    with Gcp() as server:
        yield server


@pytest.fixture
def azure() -> Iterator[Azure]:
    with Azure() as server:
        yield server


def cloud_of(server: Metadata) -> Cloud:
    return providers.CLOUDS[server.choice](server.url)


def left_s(notice: object) -> float:
    """How long the notice gives, from when it was heard."""
    assert isinstance(notice, PreemptionNotice) and notice.by_s is not None, notice
    assert abs(notice.received_s - time.monotonic()) < PATIENCE_S
    return notice.by_s - notice.received_s


def notify(server: Metadata) -> None:
    """The cloud takes this machine away, after 30 s."""
    match server:
        case Aws():
            server.interrupt(30)
        case Gcp():
            server.preempt()
        case Azure():
            server.schedule("Preempt", 30)


class Ears:
    """What a watch told."""

    def __init__(self) -> None:
        self.notices: list[tuple[str, float | None]] = []
        self.lines: list[str] = []
        self._changed = threading.Condition()

    def leave(self, reason: str, by_s: float | None) -> None:
        with self._changed:
            self.notices.append((reason, by_s))
            self._changed.notify_all()

    def tell(self, text: str) -> None:
        with self._changed:
            self.lines.append(text)
            self._changed.notify_all()

    def wait(self, so: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(so, PATIENCE_S), (self.notices, self.lines)

    def heard(self, text: str) -> bool:
        return any(text in line for line in self.lines)


@pytest.fixture
def ears() -> Ears:
    return Ears()


def watch(choice: str, ears: Ears, *servers: Metadata) -> PreemptionWatcher:
    """A watch that can reach these servers and no others."""
    environment = {address_variable(name): NOBODY for name in providers.CLOUDS}
    for server in servers:
        environment |= server.environment
    return PreemptionWatcher(choice, ears.leave, ears.tell, environment)


def test_aws_says_nothing_until_there_is_a_notice_and_then_when(aws: Aws) -> None:
    cloud = cloud_of(aws)
    assert cloud.poll() is None
    aws.interrupt(100)
    notice = cloud.poll()
    assert 90 <= left_s(notice) <= 101
    assert isinstance(notice, PreemptionNotice) and notice.reason.startswith(
        "AWS spot interruption in "
    )
    assert aws.issued == 1, "the token is kept"


def test_aws_tokens_are_renewed_when_refused_and_when_old(aws: Aws) -> None:
    cloud = providers.Aws(aws.url)
    assert cloud.poll() is None
    aws.tokens.clear()
    assert cloud.poll() is None
    assert aws.issued == 2
    cloud._renew_s = time.monotonic()
    assert cloud.poll() is None
    assert aws.issued == 3


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_the_time_left_is_told_by_the_servers_clock(aws: Aws, ahead_s: float) -> None:
    aws.ahead_s = ahead_s
    aws.interrupt(100)
    assert 90 <= left_s(cloud_of(aws).poll()) <= 101


def test_aws_a_notice_without_a_good_time_is_a_notice(aws: Aws) -> None:
    cloud = cloud_of(aws)
    for moment in (None, "soon", 17, "1990-01-01T00:00:00Z", "2999-01-01T00:00:00"):
        aws.action = {"action": "stop", "time": moment}
        possible = (0, pytest.approx(providers.AWS_NOTICE_S))
        assert left_s(cloud.poll()) in possible


def test_aws_a_recommendation_is_only_told(aws: Aws, ears: Ears) -> None:
    aws.recommended = True
    assert isinstance(cloud_of(aws).poll(), Advice)
    with watch("aws", ears, aws):
        ears.wait(lambda: ears.heard("AWS recommends"))
    assert not ears.notices


def test_gcp_a_waiting_request_is_answered_at_once(gcp: Gcp, ears: Ears) -> None:
    with watch("gcp", ears, gcp):
        gcp.wait(2)
        assert gcp.requests[-1].query["wait_for_change"] == "true"
        assert gcp.requests[-1].query["last_etag"] == "e0"
        before_s = time.monotonic()
        gcp.preempt()
        ears.wait(lambda: ears.notices)
        assert time.monotonic() - before_s < providers.LONG_POLL_S / 2, (
            "not when the long request ends"
        )
    reason, by_s = ears.notices[0]
    assert reason == "GCP preemption in 30 s"
    assert by_s is not None and before_s <= by_s - providers.GCP_NOTICE_S <= time.monotonic()


def test_azure_hears_of_its_own_machine_only(azure: Azure) -> None:
    cloud = cloud_of(azure)
    azure.schedule("Preempt", 40, "vmss_1", "vmss_33")
    azure.schedule("Freeze", 40)
    assert cloud.poll() is None
    azure.schedule("Preempt", 40, "vmss_1", "VMSS_3")
    notice = cloud.poll()
    assert 30 <= left_s(notice) <= 41
    assert isinstance(notice, PreemptionNotice) and notice.reason.startswith(
        "Azure spot eviction in "
    )


def test_azure_what_has_begun_leaves_no_time(azure: Azure) -> None:
    azure.schedule("Preempt", None, status="Started")
    assert left_s(cloud_of(azure).poll()) == 0


def test_azure_a_reboot_in_three_days_is_heeded_when_it_comes_near(azure: Azure) -> None:
    cloud = cloud_of(azure)
    azure.schedule("Reboot", 3 * 86400)
    assert isinstance(cloud.poll(), Advice)
    azure.events.clear()
    azure.schedule("Reboot", 60)
    assert 50 <= left_s(cloud.poll()) <= 61


def test_azure_a_slow_first_answer_is_waited_for(azure: Azure, ears: Ears) -> None:
    azure.first_s = 1.5
    azure.schedule("Preempt", 30)
    with watch("azure", ears, azure):
        ears.wait(lambda: ears.notices)
    assert not ears.heard("trouble")


@pytest.mark.parametrize("played", PLAYED)
@pytest.mark.parametrize("trouble", list(TROUBLES))
def test_no_trouble_is_taken_for_a_notice(played: type[Metadata], trouble: str) -> None:
    with played() as server:
        cloud = cloud_of(server)
        server.trouble = TROUBLES[trouble]
        with pytest.raises(MetadataError, match=server.url):
            cloud.poll()
        with pytest.raises(MetadataError, match=server.url):
            cloud.probe()
        server.trouble = None
        assert cloud.poll() is None
        notify(server)
        assert isinstance(cloud.poll(), PreemptionNotice)


@pytest.mark.parametrize("played", PLAYED)
def test_a_notice_after_trouble_is_heard(
    played: type[Metadata], ears: Ears, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = RetryPolicy(first_pause_s=0.1, max_pause_s=0.1)
    monkeypatch.setattr("elasticzero.launcher.preemption.watcher.RETRY", quick)
    with played() as server, watch(server.choice, ears, server):
        server.trouble = Reply(503)
        ears.wait(lambda: ears.heard("fails, so a notice may be missed"))
        notify(server)
        server.trouble = None
        ears.wait(lambda: ears.notices)
        ears.wait(lambda: ears.heard("answers again"))
    assert len([line for line in ears.lines if "may be missed" in line]) == 1


@pytest.mark.parametrize("played", PLAYED)
def test_auto_finds_the_cloud(played: type[Metadata], ears: Ears) -> None:
    with played() as server, watch("auto", ears, server):
        ears.wait(lambda: ears.heard("watches for preemption notices of"))
        notify(server)
        ears.wait(lambda: ears.notices)
    name = ears.lines[0].rpartition(" ")[2]
    assert name.lower() == server.choice
    assert ears.notices[0][0].startswith(name)


def test_auto_does_not_take_one_cloud_for_another(ears: Ears) -> None:
    with Azure() as azure:
        everywhere = {address_variable(name): azure.url for name in providers.CLOUDS}
        with PreemptionWatcher("auto", ears.leave, ears.tell, everywhere):
            ears.wait(lambda: ears.lines)
    assert ears.lines == ["this node watches for preemption notices of Azure"]


def test_auto_says_that_there_is_no_cloud(ears: Ears) -> None:
    with watch("auto", ears):
        ears.wait(lambda: ears.heard("no cloud's metadata server answers"))
    assert len(ears.lines) == 1


def test_none_asks_nobody(aws: Aws, ears: Ears) -> None:
    with watch("none", ears, aws):
        pass
    assert not aws.requests and not ears.lines


def test_a_notice_is_told_once_and_its_withdrawal_too(azure: Azure, ears: Ears) -> None:
    with watch("azure", ears, azure):
        azure.schedule("Preempt", 30)
        ears.wait(lambda: ears.notices)
        azure.wait(len(azure.requests) + 2)
        azure.events.clear()
        ears.wait(lambda: ears.heard("Azure has withdrawn its notice"))
    assert len(ears.notices) == 1


@pytest.mark.parametrize("played", PLAYED)
def test_a_server_that_does_not_answer_holds_up_no_end(played: type[Metadata], ears: Ears) -> None:
    """GCP's long request is such a case in daily life; here nobody answers at all."""
    silent = threading.Event()

    def never(_: Request) -> Reply:
        silent.wait(PATIENCE_S)
        return Reply(404)

    with played() as server:
        server.reply = never
        with watch(server.choice, ears, server):
            server.wait(1)
            before_s = time.monotonic()
        assert time.monotonic() - before_s < 4.0, "a request alone is given up after 5 s"
        silent.set()
    assert not [t for t in threading.enumerate() if t.name == "elasticzero-preemption"]


def test_a_server_that_is_slow_is_given_up(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = threading.Event()

    def reply(request: Request) -> Reply:
        silent.wait(30.0)
        return Reply(404)

    monkeypatch.setattr(aws, "reply", reply)
    with pytest.raises(MetadataError, match="did not answer"):
        MetadataServer(aws.url).get("/latest/api/token", {}, timeout_s=0.1)


def test_proxies_are_passed_over(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, NOBODY)
    aws.interrupt(30)
    assert isinstance(cloud_of(aws).poll(), PreemptionNotice)


@pytest.mark.parametrize(
    "url", ["", "https://10.0.0.1", "169.254.169.254", "http://", "http://a:b"]
)
def test_a_bad_address_is_the_users_mistake(url: str, ears: Ears) -> None:
    with pytest.raises(UserError, match="http://HOST"):
        MetadataServer(url)
