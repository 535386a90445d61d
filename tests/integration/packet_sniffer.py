"""Keeps what passes on a cable between two networks, whoever sends it."""

from __future__ import annotations

import socket
import struct
import threading

MAX_PACKET_BYTES = 1 << 18
SOL_PACKET, PACKET_STATISTICS = 263, 6
ETHERNET_BYTES, IPV6_BYTES = 14, 40
IPV6, TCP, SYN = 0x86DD, 6, 0x02
NUMBERS = 1 << 32
"""Count of the numbers that TCP gives to bytes; then they begin again."""
POLL_S = 0.1
Ends = tuple[bytes, int, bytes, int]
"""Address and port of the sender of a TCP connection, and of the receiver."""


class Side:
    """What one side of a connection has sent. Parts may come again, and a later one first."""

    def __init__(self, first: int) -> None:
        """first: the number of the first byte."""
        self.first = first
        self._parts: dict[int, bytes] = {}
        """By the place of their first byte; the longest where some begin at one place."""

    def add(self, number: int, data: bytes) -> None:
        place = (number - self.first) % NUMBERS
        if place < NUMBERS // 2 and len(data) > len(self._parts.get(place, b"")):
            self._parts[place] = data

    def sent(self) -> bytes:
        """All bytes in their order; empty as long as the first one has not passed."""
        stream = bytearray()
        for place in sorted(self._parts) if 0 in self._parts else ():
            stream += self._parts[place][max(0, len(stream) - place) :]
        return bytes(stream)


class PacketSniffer:
    """Keeps the bytes that each side of each TCP connection over IPv6 sends."""

    def __init__(self, packets: socket.socket) -> None:
        """Begins to read.

        packets: receives the cable's packets; it is closed with this.
        """
        self._packets = packets
        self._packets.settimeout(POLL_S)
        self._lock = threading.Lock()
        self._newest: dict[Ends, Side] = {}
        self._sides: list[tuple[Ends, Side]] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._read, name="tester-sniffer")
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._packets.close()

    def count_lost(self) -> int:
        """Packets that the kernel has had no room for since the last call."""
        statistics = self._packets.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8)
        return int(struct.unpack("II", statistics)[1])

    def streams(self, ports: set[int] | None = None) -> list[bytes]:
        """What each side of each connection has sent; ports: of those to these ports alone."""
        with self._lock:
            return [
                stream
                for (_, source, _, target), side in self._sides
                if (ports is None or ports & {source, target}) and (stream := side.sent())
            ]

    def _read(self) -> None:
        while not self._closing.is_set():
            try:
                packet = self._packets.recv(MAX_PACKET_BYTES)
            except TimeoutError:
                continue
            self._take(packet)

    def _take(self, packet: bytes) -> None:
        """Adds what a TCP packet over IPv6 carries."""
        header = packet[ETHERNET_BYTES : ETHERNET_BYTES + IPV6_BYTES]
        is_ipv6 = int.from_bytes(packet[ETHERNET_BYTES - 2 : ETHERNET_BYTES]) == IPV6
        if not is_ipv6 or len(header) < IPV6_BYTES or header[6] != TCP:
            return
        segment = packet[ETHERNET_BYTES + IPV6_BYTES :][: int.from_bytes(header[4:6])]
        source, target, number = struct.unpack_from("!HHI", segment)
        ends = header[8:24], source, header[24:40], target
        data = segment[(segment[12] >> 4) * 4 :]
        with self._lock:
            side = self._newest.get(ends)
            if segment[13] & SYN:
                first = (number + 1) % NUMBERS
                if side is None or side.first != first:
                    self._newest[ends] = Side(first)
                    self._sides.append((ends, self._newest[ends]))
            elif side is not None and data:
                side.add(number, data)
