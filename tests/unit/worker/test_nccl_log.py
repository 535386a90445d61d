"""What NCCL's own log says of the network, and how a worker comes by it.

The lines are those of logs that people have shown, shortened to what a case needs; each has its
source beside it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticzero.ipc.messages import NetworkTaken
from elasticzero.worker import join, nccl_log
from elasticzero.worker.nccl_log import FastDevice, Network, fast_devices, parse, warning

# https://github.com/NVIDIA/nccl/issues/1267: NCCL 2.19 without any RDMA device
SOCKETS = """\
NCCL version 2.19.3+cuda12.3
instance-8g-96c-4:101707:101889 [0] NCCL INFO NET/IB : No device found.
instance-8g-96c-4:101707:101889 [0] NCCL INFO NET/Socket : Using [0]ens7:10.128.0.33<0>
instance-8g-96c-4:101707:101889 [0] NCCL INFO Using non-device net plugin version 0
instance-8g-96c-4:101707:101889 [0] NCCL INFO Using network Socket
"""
# https://github.com/NVIDIA/nccl-tests/issues/185
ROCE = """\
NCCL version 2.19.3+cuda12.3
dgxh100-4:460770:460842 [0] NCCL INFO NET/IB : Using [0]mlx5_10:1/RoCE [1]mlx5_11:1/RoCE [RO]; \
OOB enp220s0np0:11.1.128.136<0>
dgxh100-4:460770:460842 [0] NCCL INFO Using network IB
"""
# https://github.com/NVIDIA/nccl/issues/1357: the plugin of HPC-X
PLUGIN = """\
qh100-gpu19:49357:49418 [3] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB/SHARP [1]mlx5_1:1/IB/SHARP \
[2]mlx5_4:1/IB/SHARP [3]mlx5_5:1/IB/SHARP [RO]; OOB ibp25s0:10.20.0.119<0>
qh100-gpu19:49357:49418 [3] NCCL INFO Using network IBext
"""
# https://github.com/NVIDIA/nccl/issues/302: one port of five is of another kind
MIXED = """\
info-19:5330:5330 [3] NCCL INFO NET/IB : Using [0]mlx5_1:1/IB [1]mlx5_3:1/IB [2]mlx5_0:1/IB \
[3]mlx5_2:1/RoCE [4]mlx5_4:1/IB ; OOB eth0:10.100.62.64<0>
info-19:5330:5330 [3] NCCL INFO Using network IB
"""
# https://github.com/NVIDIA/nccl/issues/1538 has the last line; the first is how
# https://github.com/NVIDIA/nccl/blob/v2.23.4-1/src/transport/net_ib.cc shows two cards as one
MERGED = """\
bigo:1884:2298 [0] NCCL INFO NET/IB : Using [0]={[0] mlx5_2:1/RoCE, [1] mlx5_3:1/RoCE} \
[1]={[2] mlx5_0:1/RoCE, [3] mlx5_1:1/RoCE} [RO]; OOB bond0.526:169.136.106.9<0>
bigo:1884:2298 [0] NCCL INFO Using network IBext_v8
"""
# https://github.com/NVIDIA/nccl/issues/707: each connection reads and writes the GPUs' memory; as
# in the next one, the line of the network itself stands far above them
DIRECT = """\
10-90-43-152:120890:121560 [0] NCCL INFO Using network IB
10-90-43-152:120890:121560 [0] NCCL INFO Channel 01 : 2[c7000] -> 0[87000] [receive] via \
NET/IB/5/GDRDMA
10-90-43-152:120890:121560 [0] NCCL INFO Channel 01 : 0[87000] -> 2[c7000] [send] via \
NET/IB/5/GDRDMA
"""
# https://github.com/NVIDIA/nccl/issues/1814: connections by the memory of the host
BY_HOST = """\
hostname-test:986:1254 [6] NCCL INFO Using network IBext_v8
hostname-test:986:1254 [6] NCCL INFO Channel 00/0 : 6[6] -> 38[6] [receive] via NET/IBext_v8/1
"""
# https://github.com/NVIDIA/nccl/issues/1597
EFA = """\
8h200-3:6310:6318 [0] NCCL INFO NET/OFI Selected Provider is efa (found 16 nics)
8h200-3:6310:6318 [0] NCCL INFO NET/OFI Skipping NCCL_PROTO checks on P5en + RDMA
8h200-3:6310:6318 [0] NCCL INFO Using network Libfabric
"""
# https://github.com/aws/aws-ofi-nccl/issues/24 has the last line: the older name of the plugin
OLD_EFA = """\
ip-172-32-38-1:21471:22316 [7] NCCL INFO NET/OFI Selected Provider is efa
ip-172-32-38-1:21471:22316 [7] NCCL INFO Using network AWS Libfabric
ip-172-32-38-1:21471:22316 [7] NCCL INFO Ring 00 : 7 -> 8 [send] via NET/AWS Libfabric/0
"""
# https://github.com/NVIDIA/nccl/blob/master/src/plugin/net.cc: NCCL 2.27 and newer say it twice
ASSIGNED = """\
node-0-0:152:152 [0] NCCL INFO NCCL version 2.27.3+cuda12.9
node-0-0:152:386 [0] NCCL INFO NET/OFI No eligible providers were found
node-0-0:152:386 [0] NCCL INFO NET/IB : Using [RO]; OOB eth0:10.0.4.51<0>
node-0-0:152:386 [0] NCCL INFO Initialized NET plugin Socket
node-0-0:152:386 [0] NCCL INFO Assigned NET plugin Socket to comm
"""
# tcpxo_transport_fastrak.txt of a public lab on two a3-megagpu-8g, which shows no more of the lines
TCPXO = """\
NCCL INFO Using network FasTrak
NCCL INFO Initializing network FasTrak, version: 1.0.17
"""
# https://github.com/NVIDIA/nccl/issues/1519: Google's plugin for plain sockets
FAST_SOCKET = """\
nathan-h100-1:14492:14492 [0] NCCL INFO NCCL version 2.20.5+cuda12.4
nathan-h100-1:14492:14605 [0] NCCL INFO NET/FastSocket : Using [0]enp0s12:10.0.0.6<0>
nathan-h100-1:14492:14605 [0] NCCL INFO Using network FastSocket
"""
# https://github.com/NVIDIA/nccl/issues/1358: two GPUs of one machine
ALONE = """\
LIUCC13-AC-01:106:121 [1] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via P2P/direct pointer
"""

CASES = {
    "sockets": (SOCKETS, Network(name="sockets", kind="sockets", version="2.19.3")),
    "RoCE": (ROCE, Network(name="RoCE", kind="rdma", version="2.19.3")),
    "plugin": (PLUGIN, Network(name="InfiniBand", kind="rdma")),
    "mixed": (MIXED, Network(name="InfiniBand", kind="rdma")),
    "merged": (MERGED, Network(name="RoCE", kind="rdma")),
    "direct": (DIRECT, Network(name="InfiniBand", kind="rdma", gpu_direct=True)),
    "by host": (BY_HOST, Network(name="InfiniBand", kind="rdma", gpu_direct=False)),
    "EFA": (EFA, Network(name="EFA", kind="rdma")),
    "old EFA": (OLD_EFA, Network(name="EFA", kind="rdma", gpu_direct=False)),
    "assigned": (ASSIGNED, Network(name="sockets", kind="sockets", version="2.27.3")),
    "TCPXO": (TCPXO, Network(name="TCPXO", kind="rdma")),
    "FastSocket": (FAST_SOCKET, Network(name="sockets", kind="sockets", version="2.20.5")),
    "alone": (ALONE, None),
    "another": ("h:1:2 [0] NCCL INFO Using network UCX\n", Network(name="UCX", kind="other")),
    "nothing": ("", None),
}
ACTIVE = "4: ACTIVE\n"
ROWS = tuple(FastDevice(name=f"rdmap{n}s0", network="EFA") for n in range(6))


@pytest.mark.parametrize("case", CASES)
def test_the_log_tells_which_network_is_taken(case: str) -> None:
    text, expected = CASES[case]
    assert parse(text) == expected
    assert parse(text.replace("\n", "\r\n")) == expected, "each line may end otherwise"


def device(folder: Path, name: str, driver: str, *, layer: str, state: str = ACTIVE) -> None:
    """A device as the kernel shows it."""
    port = folder / name / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(state)
    (port / "link_layer").write_text(f"{layer}\n")
    (folder / "drivers" / driver).mkdir(parents=True, exist_ok=True)
    (folder / name / "device").mkdir()
    (folder / name / "device" / "driver").symlink_to(folder / "drivers" / driver)


def test_devices_with_an_active_port_count(tmp_path: Path) -> None:
    device(tmp_path, "mlx5_0", "mlx5_core", layer="InfiniBand")
    device(tmp_path, "mlx5_1", "mlx5_core", layer="Ethernet")
    device(tmp_path, "mlx5_2", "mlx5_core", layer="InfiniBand", state="1: DOWN\n")
    device(tmp_path, "rdmap0s6", "efa", layer="Unspecified")
    networks = {active.name: active.network for active in fast_devices(tmp_path)}
    assert networks == {"mlx5_0": "InfiniBand", "mlx5_1": "RoCE", "rdmap0s6": "EFA"}
    assert fast_devices(tmp_path / "none") == ()


def test_sockets_beside_a_better_network_are_warned_of() -> None:
    sockets = Network(name="sockets", kind="sockets")
    line = warning(sockets, ROWS, {}, verbs=False)
    assert line == (
        "NCCL takes sockets between nodes, though this machine has EFA (rdmap0s0, rdmap1s0, "
        "rdmap2s0, rdmap3s0 and 2 more): give the container the devices, which it does not see at "
        "/dev/infiniband; see docs/fast-networks.md"
    )
    assert "aws-ofi-nccl" in warning(sockets, ROWS, {}, verbs=True)
    infiniband = (FastDevice(name="mlx5_0", network="InfiniBand"),)
    assert "has InfiniBand (mlx5_0): NCCL needs libibverbs" in warning(
        sockets, infiniband, {}, verbs=True
    )


@pytest.mark.parametrize("variables", [{"NCCL_IB_DISABLE": "1"}, {"NCCL_NET": "Socket"}])
def test_sockets_that_the_user_chose_are_no_fault(variables: dict[str, str]) -> None:
    sockets = Network(name="sockets", kind="sockets")
    assert not warning(sockets, ROWS, variables, verbs=True)
    assert warning(sockets, ROWS, {"NCCL_IB_DISABLE": "0"}, verbs=True)


def test_a_fast_network_is_no_fault() -> None:
    assert not warning(Network(name="RoCE", kind="rdma"), ROWS, {}, verbs=True)
    assert not warning(Network(name="sockets", kind="sockets"), (), {}, verbs=True)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A process that has made no communicator, and whose user has asked for no log."""
    monkeypatch.setattr(nccl_log, "_asked", False)
    monkeypatch.setattr(nccl_log, "CONFIGURATION", (str(tmp_path / "nccl.conf"),))
    for name in (*nccl_log.VARIABLES, "NCCL_CONF_FILE"):
        monkeypatch.delenv(name, raising=False)
    yield


class Library:
    """Writes a log as NCCL does: it opens the file by its name, and by libc's buffered stream, one
    line at a time, for as long as the process lives."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._libc.fopen.restype = ctypes.c_void_p
        name = os.environ["NCCL_DEBUG_FILE"].encode()
        self._stream = ctypes.c_void_p(self._libc.fopen(name, b"w"))
        assert self._stream
        self._libc.setlinebuf(self._stream)

    def write(self, text: str) -> None:
        self._libc.fputs(text.encode(), self._stream)


@pytest.mark.usefixtures("fresh")
def test_the_log_is_read_and_leaves_nothing_behind() -> None:
    """NCCL goes on to write into what it has opened; that takes no memory, and fails nothing."""
    before, files = dict(os.environ), set(os.listdir("/proc/self/fd"))
    with nccl_log.setup_log() as log:
        assert {name: os.environ[name] for name in nccl_log.ASKED} == nccl_log.ASKED
        library = Library()
        library.write(ROCE)
        assert log.network() == CASES["RoCE"][1]
    assert dict(os.environ) == before
    (left,) = set(os.listdir("/proc/self/fd")) - files
    for _ in range(100):
        library.write(ROCE)
    assert os.stat(f"/proc/self/fd/{left}").st_size == 0
    assert log.network() is None


@pytest.mark.usefixtures("fresh")
def test_a_second_communicator_asks_for_nothing() -> None:
    """NCCL has read its variables by then."""
    for is_first in (True, False):
        with nccl_log.setup_log() as log:
            assert ("NCCL_DEBUG" in os.environ) == is_first
            assert log.network() is None, "nothing was written"


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("name", nccl_log.VARIABLES)
def test_a_log_that_the_user_asked_for_is_left_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "WARN")
    before = dict(os.environ)
    with nccl_log.setup_log() as log:
        assert dict(os.environ) == before
        assert log.network() is None
    assert dict(os.environ) == before


@pytest.mark.usefixtures("fresh")
def test_a_log_that_a_file_asks_for_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "nccl.conf").write_text("NCCL_DEBUG=WARN\n")
    with nccl_log.setup_log():
        assert "NCCL_DEBUG" not in os.environ


@pytest.mark.usefixtures("fresh")
def test_without_a_file_in_memory_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would write to standard output."""

    def refuse(*_: object) -> int:
        raise OSError(38, "no such call")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with nccl_log.setup_log() as log:
        assert "NCCL_DEBUG" not in os.environ
        assert log.network() is None


@pytest.mark.usefixtures("fresh")
def test_a_failed_setup_leaves_the_environment_as_it_was() -> None:
    before = dict(os.environ)
    with pytest.raises(RuntimeError, match="no peer"), nccl_log.setup_log():
        raise RuntimeError("no peer")
    assert dict(os.environ) == before


def test_a_single_node_is_not_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_log, "fast_devices", lambda: ROWS)
    monkeypatch.delenv("NCCL_IB_DISABLE", raising=False)
    monkeypatch.delenv("NCCL_NET", raising=False)
    sockets = Network(name="sockets", kind="sockets", version="2.27.3")
    assert not nccl_log.message(sockets, 1).warning
    told = nccl_log.message(sockets, 2)
    assert told.warning
    assert (told.network, told.version, told.gpu_direct) == ("sockets", "2.27.3", None)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("text", [DIRECT, ""], ids=["read", "nothing"])
def test_a_worker_tells_its_agent_what_it_has_read(text: str) -> None:
    """Once the ranks are connected; a log that says nothing changes nothing."""
    told: list[NetworkTaken] = []
    link: Any = SimpleNamespace(send=told.append, assignment=SimpleNamespace(nodes=2))
    groups: Any = object()

    def set_up() -> Any:
        Library().write(text)
        assert not told
        return groups

    assert join._connect_and_tell(link, set_up) is groups
    expected = [NetworkTaken(network="InfiniBand", gpu_direct=True)] if text else []
    assert told == expected
