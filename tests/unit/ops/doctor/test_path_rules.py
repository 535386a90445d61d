"""What is said of the way to another node, from what real machines print."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from elasticzero.launcher.options.private_network import FLAG, private_network
from elasticzero.ops.doctor.facts import PathFacts
from elasticzero.ops.doctor.path_probes import private_network_facts
from elasticzero.ops.doctor.path_rules import (
    interface_of_route,
    ipsec_policies,
    judge_path,
    judge_private_network,
    link_kinds,
    policy_for,
)

ROUTE = '[{"dst":"10.0.0.2","dev":"eth0","prefsrc":"10.0.0.1","flags":[],"uid":0,"cache":[]}]\n'
WG_ROUTE = '[{"dst":"10.8.0.2","dev":"wg0","prefsrc":"10.8.0.1","flags":[],"uid":0,"cache":[]}]'
LOCAL_ROUTE = (
    '[{"type":"local","dst":"10.0.0.1","dev":"lo","prefsrc":"10.0.0.1","flags":[],"uid":0,'
    '"cache":["local"]}]'
)
LO = '{"ifindex":1,"ifname":"lo","flags":["LOOPBACK","UP"],"mtu":65536,"link_type":"loopback"}'
ETH = (
    '{"ifindex":4,"ifname":"eth0","flags":["BROADCAST","MULTICAST","UP","LOWER_UP"],"mtu":1400,'
    '"link_type":"ether","address":"02:fc:00:00:00:01","parentbus":"virtio"}'
)
VETH = (
    '{"ifindex":2,"link":"lxc1","ifname":"eth0","flags":["BROADCAST","MULTICAST"],"mtu":1500,'
    '"link_type":"ether","linkinfo":{"info_kind":"veth"},"num_tx_queues":2}'
)
TUN = (
    '{"ifindex":2,"ifname":"eth0","flags":["POINTOPOINT","NOARP","UP"],"link_type":"none",'
    '"linkinfo":{"info_kind":"tun","info_data":{"type":"tun","pi":false,"persist":true}}}'
)
VXLAN = '{"ifindex":6,"ifname":"eth0","link_type":"ether","linkinfo":{"info_kind":"vxlan"}}'
WG = (
    '{"ifindex":5,"ifname":"wg0","flags":["POINTOPOINT","NOARP","UP","LOWER_UP"],"mtu":1420,'
    '"link_type":"none","linkinfo":{"info_kind":"wireguard"}}'
)
POLICIES = """\
src 10.0.0.2/32 dst 10.0.0.1/32 
\tdir in priority 0 ptype main 
\ttmpl src 10.0.0.2 dst 10.0.0.1
\t\tproto esp reqid 1 mode transport
src 10.0.0.1/32 dst 10.0.0.3/32 
\tdir out priority 0 ptype main 
\ttmpl src 10.0.0.1 dst 10.0.0.3
\t\tproto ah reqid 1 mode transport
src 0.0.0.0/0 dst 10.9.0.0/16 
\tdir out action block priority 0 ptype main 
src 10.0.0.1/32 dst 10.0.0.2/32 
\tdir out priority 0 ptype main 
\ttmpl src 10.0.0.1 dst 10.0.0.2
\t\tproto esp reqid 1 mode transport
src 0.0.0.0/0 dst 0.0.0.0/0 
\tsocket in priority 0 ptype main 
"""  # noqa: W291 - as `ip` prints it
PARTIAL = """\
src 10.0.0.0/24 dst 10.0.0.0/24 proto tcp dport 2379 
\tdir out priority 367231 ptype main 
\ttmpl src 0.0.0.0 dst 0.0.0.0
\t\tproto esp reqid 1 mode transport
"""  # noqa: W291 - as `ip` prints it
MARKED = """\
src 10.0.0.0/8 dst 10.0.0.0/8 
\tdir out priority 0 ptype main 
\tmark 0x3e00/0xff00 
\ttmpl src 10.0.0.1 dst 10.0.0.2
\t\tproto esp spi 0x00000003 reqid 1 mode tunnel
"""  # noqa: W291 - as `ip` prints it
OPTIONAL = """\
src 10.0.0.0/24 dst 10.0.0.0/24 
\tdir out priority 0 ptype main 
\ttmpl src 0.0.0.0 dst 0.0.0.0
\t\tproto esp reqid 0 mode transport
\t\tlevel use 
"""  # noqa: W291 - as `ip` prints it
SYSFS = {
    "lo": {"type": "772\n", "uevent": "INTERFACE=lo\nIFINDEX=1\n", "iflink": "1", "ifindex": "1"},
    "eth0": {
        "type": "1\n",
        "uevent": "INTERFACE=eth0\nIFINDEX=4\n",
        "iflink": "4\n",
        "ifindex": "4\n",
        "device": "",
    },
    "e0": {"type": "1", "uevent": "INTERFACE=e0\nIFINDEX=4", "iflink": "3\n", "ifindex": "4\n"},
    "br0": {
        "type": "1",
        "uevent": "DEVTYPE=bridge\nINTERFACE=br0\nIFINDEX=5\n",
        "iflink": "5",
        "ifindex": "5",
    },
    "tun7": {
        "type": "65534\n",
        "uevent": "INTERFACE=tun7\nIFINDEX=2\n",
        "iflink": "2",
        "ifindex": "2",
        "tun_flags": "0x1\n",
    },
    "wg0": {
        "type": "65534",
        "uevent": "DEVTYPE=wireguard\nINTERFACE=wg0\nIFINDEX=7\n",
        "iflink": "7",
        "ifindex": "7",
    },
    "wlan0": {
        "type": "1",
        "uevent": "DEVTYPE=wlan\nINTERFACE=wlan0\n",
        "iflink": "8",
        "ifindex": "8",
        "device": "",
    },
    "ipsec0": {"type": "65534", "uevent": "INTERFACE=ipsec0\n", "iflink": "9", "ifindex": "9"},
}
FACTS = PathFacts(
    host="node-b",
    address="10.0.0.2",
    source="10.0.0.1",
    route=ROUTE,
    interface="eth0",
    links=f"[{LO},{ETH}]",
    policies="",
)


def told(facts: PathFacts) -> tuple[str, str, str]:
    finding = judge_path(facts)
    return finding.level, finding.text, finding.advice


@pytest.mark.parametrize(
    ("changes", "level", "parts"),
    [
        ({}, "note", ["leave by eth0 as they are", "docs/security.md has an example"]),
        ({"route": LOCAL_ROUTE}, "ok", ["node-b is this machine"]),
        (
            {"route": WG_ROUTE, "links": f"[{LO},{ETH},{WG}]", "address": "10.8.0.2"},
            "ok",
            ["leave by wg0, which encrypts them: WireGuard"],
        ),
        ({"policies": POLICIES}, "ok", ["leave by eth0", "demands IPsec (ESP)"]),
        ({"policies": POLICIES, "links": f"[{VETH}]"}, "ok", ["demands IPsec (ESP)"]),
        ({"policies": POLICIES, "address": "10.0.0.3"}, "note", ["eth0 as they are"]),
        ({"policies": OPTIONAL}, "note", ["eth0 as they are"]),
        ({"policies": PARTIAL}, "note", ["cannot be seen: IPsec is for a part of them"]),
        ({"policies": MARKED}, "note", ["cannot be seen: IPsec is for a part of them"]),
        ({"policies": None}, "note", ["cannot be seen: reading", "takes root"]),
        ({"links": f"[{VETH}]"}, "note", ["cannot be seen: this is a container", "cilium"]),
        ({"links": f"[{TUN}]"}, "note", ["cannot be seen: a program of this machine"]),
        ({"links": f"[{VXLAN}]"}, "note", ["cannot be seen", "of the kind vxlan"]),
        ({"links": "[]"}, "note", ["cannot be seen", "of the kind unknown"]),
        (
            {"links": f"[{LO},{ETH},{WG.replace('wg0', 'cilium_wg0')}]"},
            "note",
            ["cannot be seen: Cilium may lead them"],
        ),
        (
            {"links": f"[{LO},{ETH},{WG}]"},
            "note",
            ["eth0 as they are", "give --host the address of wg0", "--require-private-network wg0"],
        ),
        ({"route": None, "interface": ""}, "note", ["no route to node-b", "mend the route"]),
        ({"route": None, "links": None, "sysfs": SYSFS}, "note", ["eth0 as they are"]),
        ({"route": None, "interface": "wg0", "links": None, "sysfs": SYSFS}, "ok", ["WireGuard"]),
        ({"route": None, "interface": "lo", "links": None, "sysfs": SYSFS}, "ok", ["this machine"]),
        ({"route": None, "interface": "e0", "links": None, "sysfs": SYSFS}, "note", ["container"]),
        (
            {"route": None, "interface": "tun7", "links": None, "sysfs": SYSFS},
            "note",
            ["a program of this machine"],
        ),
    ],
)
def test_what_is_said_of_a_path(changes: dict[str, object], level: str, parts: list[str]) -> None:
    facts = replace(FACTS, **changes)  # type: ignore[arg-type]
    actual, text, advice = told(facts)
    assert actual == level, text
    for part in parts:
        assert part in f"{text}; {advice}"
    if level == "note":
        assert advice


def test_kinds_of_interfaces_by_their_files() -> None:
    assert link_kinds(None, SYSFS) == {
        "lo": "loopback",
        "eth0": "ether",
        "e0": "veth",
        "br0": "bridge",
        "tun7": "tun",
        "wg0": "wireguard",
        "wlan0": "ether",
        "ipsec0": "",
    }
    named = '[{"ifname":"ipsec0","link_type":"none","linkinfo":{"info_kind":"xfrm"}}]'
    assert link_kinds(named, SYSFS)["ipsec0"] == "xfrm"


def test_policies_are_read_as_the_kernel_takes_them() -> None:
    assert [p.target for p in ipsec_policies(POLICIES)] == [
        "10.0.0.3/32",
        "10.9.0.0/16",
        "10.0.0.2/32",
    ]
    assert policy_for(POLICIES, "10.0.0.1", "10.0.0.4") is None
    assert policy_for(POLICIES, "10.0.0.2", "10.0.0.1") is None, "for packets that come"
    first = policy_for(PARTIAL + OPTIONAL, "10.0.0.1", "10.0.0.2")
    assert first is not None and not first.is_partial and not first.demands_esp
    assert policy_for(POLICIES, "fd00::1", "fd00::2") is None


def test_a_private_network_is_judged_before_the_node_starts() -> None:
    inside = private_network_facts(private_network(FLAG, "127.0.0.0/8"), "127.0.0.1", [])
    assert inside is not None
    finding = judge_private_network(inside)
    assert (finding.level, finding.advice) == ("ok", "")
    assert finding.text == "other nodes reach this one at 127.0.0.1, which is in 127.0.0.0/8"
    for host, endpoints in (("127.0.0.1", []), (None, []), (None, ["127.0.0.1:2379"])):
        outside = private_network_facts(private_network(FLAG, "203.0.113.0/24"), host, endpoints)
        assert outside is not None
        finding = judge_private_network(outside)
        assert finding.level == "problem" and finding.advice
        assert finding.text.startswith(f"{FLAG} 203.0.113.0/24: ")
    assert private_network_facts(None, "127.0.0.1", []) is None


TEXTS = [ROUTE, LOCAL_ROUTE, f"[{LO},{ETH},{VETH},{WG},{TUN}]", POLICIES, PARTIAL, MARKED]


def test_no_text_is_too_odd_to_judge() -> None:
    """`ip` of another release may print anything: there is a judgement, and no error."""
    odd = [
        "",
        "[]",
        "{}",
        "null",
        "7",
        '[{"dev":7}]',
        '["x"]',
        "[" * 2000,
        "src dst\n",
        "src a dst",
    ]
    odd += ['[{"ifname":null,"linkinfo":[]}]', '[{"ifname":"eth0","linkinfo":{"info_kind":3}}]']
    for text in TEXTS:
        odd += [text[:cut] for cut in range(0, len(text), 7)]
        odd += [text.replace(part, "�", 1) for part in ('"', "/", "src", "esp", ":")]
    for text in odd:
        for changes in ({"route": text}, {"links": text}, {"policies": text}):
            level, sentence, _ = told(replace(FACTS, **changes))  # type: ignore[arg-type]
            assert level in ("ok", "note") and sentence
        assert isinstance(interface_of_route(text), str)


def test_the_fixtures_are_json() -> None:
    for text in (ROUTE, WG_ROUTE, LOCAL_ROUTE, LO, ETH, VETH, TUN, VXLAN, WG):
        assert json.loads(text)
