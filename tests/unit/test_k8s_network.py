"""The NetworkPolicies close every port of every rendered pod to all but the pods that need it.

The ports come from the code: what it listens at, and the flags by which etcd is told to listen.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from elasticzero.launcher.options.table import DEFAULT_HTTP_PORT
from tests.unit.manifests import Manifest, flags_of, labels_of, pod_of, workloads
from tests.unit.renders import PLACES, arguments_of, printed

PRODUCT = ("elasticzero", "launcher", "checkpoint")
METHODS = ("listen", "create_server", "start_server", "bind")
"""Methods that open a port, whatever the object is."""
CALLS = ("TCPStore", "TorchStore", "HTTPServer", "ThreadingHTTPServer", "TCPServer", "EtcdServer")
"""Classes that open a port when they are made."""
NAMES = ("bound_socket",)
"""Functions of the project that make a socket which is to listen."""
HTTP, JOB, ELSEWHERE = "the HTTP port", "ports that the kernel chooses", "not in a rendered pod"
LISTENERS = {
    "launcher/http/server.py": HTTP,
    "launcher/agent/main.py": JOB,  # reserves rank 0's store; the etcd of its own needs no --etcd
    "launcher/store/membership.py": JOB,
    "elasticzero/comm/rendezvous.py": JOB,
    "elasticzero/comm/store/server.py": JOB,
    "elasticzero/comm/control_tree.py": JOB,
    "launcher/addresses.py": ELSEWHERE,  # the functions that the others call
    "launcher/agent/etcd_hosting.py": ELSEWHERE,  # pods are given an etcd by --etcd
    "launcher/store/etcd/server.py": ELSEWHERE,
    "launcher/local/command.py": ELSEWHERE,
    "launcher/torchrun/node.py": ELSEWHERE,  # pods run `elasticzero run`
    "launcher/torchrun/plugin.py": ELSEWHERE,
    "elasticzero/ops/doctor/service_probes.py": ELSEWHERE,  # tries a port, and closes it
    "elasticzero/ops/rehearse/command.py": ELSEWHERE,
}
"""Where a rendered pod listens, by the file that opens the port. The policies open the HTTP port to
the monitoring, and ports that the kernel chooses to the run's own pods alone: a file that is added
here says which of the two its ports are."""
OURS = "app.kubernetes.io/"
NAMESPACE_NAME = "kubernetes.io/metadata.name"


def opens_a_port(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr=name) as method) if name in METHODS:
            return "signature" not in ast.unparse(method.value)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in CALLS + NAMES
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in NAMES
        case _:
            return False


def test_every_file_that_opens_a_port_is_listed(root: Path) -> None:
    opening = {
        str(path.relative_to(root))
        for folder in PRODUCT
        for path in (root / folder).rglob("*.py")
        if any(map(opens_a_port, ast.walk(ast.parse(path.read_text()))))
    }
    assert opening == LISTENERS.keys()


def test_the_threat_model_has_every_file_that_opens_a_port_of_a_node(root: Path) -> None:
    table = (root / "docs" / "security.md").read_text()
    for file, kind in LISTENERS.items():
        if kind != ELSEWHERE:
            assert f"`{file}`" in table, file


@cache
def manifests_of(place: str, options: str = "") -> list[Manifest]:
    command = arguments_of(place)
    command[2:2] = options.split()
    return list(yaml.safe_load_all(printed(command)))


def policies_of(manifests: list[Manifest], labels: dict[str, str]) -> list[Manifest]:
    """The specs of the policies that select a pod with these labels."""
    specs = [m["spec"] for m in manifests if m["kind"] == "NetworkPolicy"]
    return [s for s in specs if s["podSelector"]["matchLabels"].items() <= labels.items()]


def listening_ports(workload: Manifest) -> set[int | None]:
    """The ports at which the containers listen; None: those that the kernel chooses."""
    ports: set[int | None] = set()
    for container in pod_of(workload)["containers"]:
        declared = {port["containerPort"] for port in container.get("ports", [])}
        if container["name"] in ("agent", "node"):
            assert declared == {DEFAULT_HTTP_PORT}
            ports |= {*declared, None}
            continue
        flags = flags_of(container)
        urls = [v for name, v in flags.items() if name.startswith("listen-")]
        told = {urlsplit(url).port for value in urls for url in value.split(",")}
        assert told == declared, "what etcd is told to listen at is what the pod declares"
        ports |= told
    return ports


@pytest.mark.parametrize("place", PLACES)
def test_every_port_of_every_pod_is_behind_a_policy(place: str) -> None:
    """A port is open to no pod that the job, its etcd and the monitoring do not have."""
    manifests = manifests_of(place)
    kinds = 0
    for workload in workloads(manifests):
        ports = listening_ports(workload)
        selecting = policies_of(manifests, labels_of(workload))
        if not ports:
            continue
        kinds += 1
        (spec,) = selecting
        assert spec["policyTypes"] == ["Ingress"]
        named = {p["port"] for rule in spec["ingress"] for p in rule.get("ports", [])}
        of_kernel = [rule for rule in spec["ingress"] if "ports" not in rule]
        assert named == ports - {None}, "each port has a rule, and no other has one"
        assert bool(of_kernel) == (None in ports)
        for rule in of_kernel:
            (peer,) = rule["from"]
            assert peer["podSelector"]["matchLabels"] == labels_of(workload)
    assert kinds == (2 if any(m["kind"] == "StatefulSet" for m in manifests) else 1)


@pytest.mark.parametrize("place", PLACES)
def test_no_rule_is_for_everybody(place: str) -> None:
    manifests = manifests_of(place)
    own_labels = [labels_of(workload) for workload in workloads(manifests)]
    rules = [r for m in manifests if m["kind"] == "NetworkPolicy" for r in m["spec"]["ingress"]]
    assert len(rules) >= 2
    for rule in rules:
        assert rule["from"], "an empty list is everybody"
        for peer in rule["from"]:
            if "namespaceSelector" in peer:
                assert peer == {
                    "namespaceSelector": {"matchLabels": {NAMESPACE_NAME: "monitoring"}}
                }
                (port,) = rule["ports"]
                assert port["port"] in (DEFAULT_HTTP_PORT, 2381), "ports with metrics alone"
                continue
            assert peer.keys() == {"podSelector"}, "the namespace is the job's"
            labels = peer["podSelector"]["matchLabels"]
            assert labels.keys() >= {f"{OURS}name", f"{OURS}part-of", f"{OURS}component"}
            assert any(labels.items() <= pod.items() for pod in own_labels), "a pod of ours"


@pytest.mark.parametrize(("namespace", "peers"), [("watch", {"watch"}), ("none", set())])
def test_the_monitorings_namespace_is_the_one_that_is_named(
    namespace: str, peers: set[str]
) -> None:
    manifests = manifests_of("base", f"--monitoring {namespace}")
    selectors = [
        peer["namespaceSelector"]["matchLabels"][NAMESPACE_NAME]
        for manifest in manifests
        if manifest["kind"] == "NetworkPolicy"
        for rule in manifest["spec"]["ingress"]
        for peer in rule["from"]
        if "namespaceSelector" in peer
    ]
    assert set(selectors) == peers
    assert len(selectors) == 2 * len(peers), "of agents and of etcd"
