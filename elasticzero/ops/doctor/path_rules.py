"""Judges whether what leaves this machine for another node is encrypted on the way.

Pure: what the probes have read is text of `ip`, and files of /sys/class/net. A machine sees its own
end alone. What its host, its cloud or a switch does with the packets it does not see, and then that
is said. Rules, the first that applies:
 WG1  The route stays on this machine: nothing leaves it.
 WG2  The route leaves by an interface of WireGuard, or of IPsec (xfrm, vti): it is encrypted.
 WG3  The kernel's IPsec policy for the two addresses demands ESP: it is encrypted, whatever the
      interface.
 WG4  The policy is for a part of the packets, or the interface leads to what another program
      (tun), the host (veth and the like) or another kind of tunnel does with them: that cannot be
      seen.
 WG5  A plain interface: nothing here encrypts, unless the policies cannot be read, or Cilium takes
      packets from it to an interface of its own.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elasticzero.ops.doctor.facts import PathFacts, PrivateNetworkFacts
from elasticzero.ops.doctor.finding import Finding

TOPIC = "path"
ENCRYPTING = {"wireguard": "WireGuard", "xfrm": "IPsec", "vti": "IPsec", "vti6": "IPsec"}
"""Kinds of interfaces that encrypt all that leaves by them."""
INTO_HOST = ("veth", "netkit", "ipvlan", "ipvtap", "macvlan", "macvtap")
"""Kinds of interfaces by which a container's packets come to its host."""
PLAIN = ("ether", "infiniband", "bond", "bridge", "dummy", "ifb", "team", "vlan", "vrf")
"""Kinds of interfaces that send packets as they are, or pass them on to others that do."""
CILIUM = "cilium_wg"
"""Beginning of the name of Cilium's WireGuard interface, to which its own programs lead packets,
and no route does."""
LINK_TYPES = {"1": "ether", "32": "infiniband", "772": "loopback"}
"""Kinds by the number in /sys/class/net/…/type, for interfaces that have a device."""
EXAMPLE = "docs/security.md has an example of WireGuard"
_SELECTOR = re.compile(r"src (\S+) dst (\S+)(.*)")


@dataclass(frozen=True, slots=True)
class IpsecPolicy:
    """Holds one of the kernel's policies for packets that leave: what is to be done with them."""

    source: str
    target: str
    priority: int
    demands_esp: bool
    is_partial: bool
    """True if it is for a port, a protocol, a mark or an interface, and not for all packets."""

    def covers(self, source: str, target: str) -> bool:
        return _within(source, self.source) and _within(target, self.target)


def judge_path(facts: PathFacts) -> Finding:
    """Judges whether packets to another node are encrypted on the way (WG1 to WG5)."""
    host = facts.host
    interface = interface_of_route(facts.route) or facts.interface
    if not interface:
        advice = "mend the route, or give --peer another address of that node"
        return _finding("note", f"no route to {host} can be seen", advice)
    kinds = link_kinds(facts.links, facts.sysfs)
    kind = kinds.get(interface, "")
    if kind == "loopback":
        return _finding("ok", f"{host} is this machine: nothing leaves it")
    leaves = f"packets to {host} leave by {interface}"
    if kind in ENCRYPTING:
        return _finding("ok", f"{leaves}, which encrypts them: {ENCRYPTING[kind]}")
    policy = policy_for(facts.policies, facts.source, facts.address)
    if policy is not None and policy.demands_esp and not policy.is_partial:
        return _finding("ok", f"{leaves}, and the kernel's policy for them demands IPsec (ESP)")
    if (reason := _unseen(facts, kind, kinds, policy)) is not None:
        return _finding(
            "note",
            f"{leaves}; whether they are encrypted cannot be seen: {reason}",
            "look there, for the collectives of the workers have no encryption of their own",
        )
    tunnels = [name for name, other in kinds.items() if other in ENCRYPTING]
    advice = (
        f"give --host the address of {tunnels[0]} on every node, and --require-private-network "
        f"{tunnels[0]}"
        if tunnels
        else f"run jobs in a network that is yours alone, or over WireGuard: {EXAMPLE}"
    )
    return _finding("note", f"{leaves} as they are: nothing on this machine encrypts them", advice)


def judge_private_network(facts: PrivateNetworkFacts) -> Finding:
    """Judges whether a node would start in its private network."""
    topic = "private network"
    if not facts.error:
        text = f"other nodes reach this one at {facts.address}, which is in {facts.network}"
        return Finding(topic=topic, level="ok", text=text)
    what, _, step = facts.error.partition("; ")
    return Finding(topic=topic, level="problem", text=what, advice=step)


def _finding(level: Any, text: str, advice: str = "") -> Finding:
    return Finding(topic=TOPIC, level=level, text=text, advice=advice)


def _unseen(
    facts: PathFacts, kind: str, kinds: Mapping[str, str], policy: IpsecPolicy | None
) -> str | None:
    """Returns why it cannot be seen whether packets are encrypted; None: nothing encrypts them
    here.

    Args:
        facts: What was read.
        kind: Kind of the interface by which packets leave.
        kinds: Kinds of all interfaces.
        policy: The kernel's IPsec policy for them; None: there is none, or it cannot be read.
    """
    if policy is not None and policy.is_partial:
        return "IPsec is for a part of them alone (`ip xfrm policy`)"
    if kind in INTO_HOST:
        return (
            "this is a container, and its host may encrypt (Cilium: `cilium encrypt status`; "
            "Calico: `wireguardEnabled`)"
        )
    if kind == "tun":
        return "a program of this machine carries them on, as OpenVPN and Tailscale do"
    if kind not in PLAIN:
        return f"the interface is of the kind {kind or 'unknown'}"
    if any(name.startswith(CILIUM) for name in kinds):
        return "Cilium may lead them to its WireGuard interface (`cilium encrypt status`)"
    if facts.policies is None:
        return "reading the kernel's IPsec policies takes root and the command `ip`"
    return None


def interface_of_route(text: str | None) -> str:
    """Returns the interface in an answer of `ip -j route get`; empty if there is none in it."""
    for entry in _objects(text):
        if entry.get("type") == "local":
            return "lo"
        if isinstance(name := entry.get("dev"), str):
            return name
    return ""


def link_kinds(text: str | None, sysfs: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Returns the kind of each interface: what `ip -j -d link` says, or else /sys/class/net.

    Args:
        text: Answer of `ip -j -d link`; None: there is none.
        sysfs: Texts of the files of each interface, by its name; a folder has an empty text.
    """
    kinds = {name: _kind_of_files(files) for name, files in sysfs.items()}
    for entry in _objects(text):
        name, info = entry.get("ifname"), entry.get("linkinfo")
        kind = info.get("info_kind") if isinstance(info, dict) else entry.get("link_type")
        if isinstance(name, str) and isinstance(kind, str):
            kinds[name] = kind
    return kinds


def _kind_of_files(files: Mapping[str, str]) -> str:
    """Returns the kind of an interface by its files, of which drivers write some; empty: unknown.

    One end of a pair, as a container has it, is known by the number of its other end.
    """
    named = re.search(r"^DEVTYPE=(\S+)", files.get("uevent", ""), re.MULTILINE)
    number = files.get("type", "").strip()
    if named is not None and named[1] != "wlan":
        return named[1]
    if "tun_flags" in files:
        return "tun"
    if number == "772" or "device" in files:
        return LINK_TYPES.get(number, "")
    if files.get("iflink", "").strip() != files.get("ifindex", "").strip():
        return "veth"
    return ""


def policy_for(text: str | None, source: str, target: str) -> IpsecPolicy | None:
    """Returns the policy that the kernel applies to packets between two addresses; None: none.

    Args:
        text: Answer of `ip xfrm policy`; None: it cannot be read.
        source: This machine's address.
        target: The other one.
    """
    covering = [policy for policy in ipsec_policies(text or "") if policy.covers(source, target)]
    return min(covering, key=lambda policy: policy.priority, default=None)


def ipsec_policies(text: str) -> Iterator[IpsecPolicy]:
    """Yields the policies for packets that leave, from an answer of `ip xfrm policy`."""
    for block in re.split(r"^(?=src )", text, flags=re.MULTILINE):
        selector = _SELECTOR.match(block)
        direction = re.search(r"^\s+dir out\b(.*)$", block, re.MULTILINE)
        if selector is None or direction is None:
            continue
        templates = re.findall(r"proto (\w+).*", block[direction.end() :])
        optional = re.search(r"\blevel use\b", block) is not None
        priority = re.search(r"priority (\d+)", direction[1])
        narrowed = re.search(r"\b(mark|if_id|proto)\b", f"{selector[3]} {direction[1]}")
        narrowed = narrowed or re.search(r"^\s*(mark|if_id) ", block, re.MULTILINE)
        yield IpsecPolicy(
            source=selector[1],
            target=selector[2],
            priority=int(priority[1]) if priority else 0,
            demands_esp="esp" in templates and not optional,
            is_partial=narrowed is not None,
        )


def _within(address: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


def _objects(text: str | None) -> list[dict[str, Any]]:
    """Returns the objects in a list of JSON; none where the text is no such list."""
    try:
        values = json.loads(text or "")
    except (ValueError, RecursionError):
        return []
    return (
        [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []
    )
