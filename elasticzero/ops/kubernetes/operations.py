"""Writes the kubectl commands by which an operator changes a job on Kubernetes.

They are lines of a POSIX shell script, so that what is printed is what `--apply` runs.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from elasticzero.errors import UserError
from elasticzero.ops.kubernetes.etcd import CERTIFICATES, CLIENT, PEER, STATE_KEY
from elasticzero.ops.kubernetes.options import check_job_name

ADD_TRIES, ADD_PAUSE_S = 9, 3
"""Tries to add a member to etcd, which answers `unhealthy cluster` until its members have been
connected for 5 s."""


def scale_script(job: str, nnodes: tuple[int, int], namespace: str) -> list[str]:
    """Returns the commands that give a job MIN to MAX nodes, and as many pods as MAX.

    The job is told before the pods change, so that nodes that leave do not leave it with fewer than
    its old MIN.

    Args:
        job: name of the Job.
        nnodes: the fewest and the most nodes.
        namespace: the pods' namespace; empty: the namespace of the current context.
    """
    least, most = nnodes
    patch = json.dumps({"spec": {"parallelism": most, "completions": most}})
    return [
        _kubectl(namespace, "exec", f"job/{job}", "--", "elasticzero", "scale", f"{least}:{most}"),
        _kubectl(namespace, "patch", "job", job, "--type=merge", f"--patch={patch}"),
    ]


def drain_script(job: str, node: str, namespace: str) -> list[str]:
    """Returns the commands by which a node leaves, and its machine is cordoned.

    The pod that replaces it is another node, on another machine.

    Args:
        job: name of the Job.
        node: name of the node in `elasticzero status`, or the index of its pod.
        namespace: the pods' namespace; empty: the namespace of the current context.

    Raises:
        UserError: the text is neither.
    """
    index = node.partition("-")[0]
    if not index.isdigit():
        raise UserError(
            f"k8s drain {node}: INDEX-UID as in `elasticzero status`, or the pod's index, is "
            "expected"
        )
    uid = _kubectl(namespace, "get", "job", job, "--output=jsonpath={.metadata.uid}")
    label = "batch.kubernetes.io/controller-uid=$JOB_UID"
    machine = _kubectl(
        namespace,
        "get",
        "pods",
        "--field-selector=status.phase=Running",
        "--output=jsonpath={.items[0].spec.nodeName}",
    )
    index_label = f"batch.kubernetes.io/job-completion-index={index}"
    drain = _kubectl("", "drain", "--delete-emptydir-data")
    return [
        f"JOB_UID=$({uid})",
        f'MACHINE=$({machine} --selector="{label},{index_label}")',
        f'{drain} --pod-selector="{label}" "$MACHINE"',
    ]


def replace_member_script(
    name: str, index: int, members: int, namespace: str, *, tls: bool
) -> list[str]:
    """Returns the commands that replace a member of etcd whose volume is lost or damaged.

    Args:
        name: the name that the job was rendered with.
        index: index of the lost member's pod.
        members: number of members in all.
        namespace: the pods' namespace; empty: the namespace of the current context.
        tls: whether the members speak TLS.

    Raises:
        UserError: the name is invalid, or there is no such member or no other one left.
    """
    check_job_name(name, "k8s replace-etcd-member")
    if not 0 <= index < members or members < 3:
        raise UserError(
            f"k8s replace-etcd-member {index}: an index below --etcd-members {members}, of 3 or "
            "more, is expected: of one member nothing is left to join"
        )
    etcd, scheme = f"{name}-etcd", "https" if tls else "http"
    lost = f"{etcd}-{index}"
    peer = f"{scheme}://{lost}.{etcd}:{PEER}"
    others = ",".join(
        f"{scheme}://{etcd}-{n}.{etcd}:{CLIENT}" for n in range(members) if n != index
    )
    survivor = f"{etcd}-{0 if index else 1}"
    files = {"cacert": "ca.crt", "cert": "tls.crt", "key": "tls.key"}
    flags = [f"--{flag}={CERTIFICATES}/{file}" for flag, file in files.items()] if tls else []

    def etcdctl(*arguments: str) -> str:
        prefix = ("exec", survivor, "--container=etcd", "--", "etcdctl", f"--endpoints={others}")
        return _kubectl(namespace, *prefix, *flags, *arguments)

    find = f"{etcdctl('member', 'list')} | grep -F {peer} | cut -d, -f1"
    state = json.dumps({"data": {STATE_KEY: "existing"}})
    return [
        f"ID=$({find})",
        f'{etcdctl("member", "remove")} "$ID"',
        _tried(etcdctl("member", "add", lost, f"--peer-urls={peer}")),
        _kubectl(namespace, "patch", "configmap", etcd, "--type=merge", f"--patch={state}"),
        _kubectl(namespace, "delete", "pvc", f"data-{lost}", "--wait=false"),
        _kubectl(namespace, "delete", "pod", lost),
    ]


def _tried(command: str) -> str:
    """Returns a command that is tried again, for etcd takes no member within seconds of another
    change."""
    last = ADD_TRIES
    tries = " ".join(map(str, range(1, last + 1)))
    again = f'[ "$TRY" -lt {last} ]; sleep {ADD_PAUSE_S}'
    return f"for TRY in {tries}; do {command} && break; {again}; done"


def _kubectl(namespace: str, *arguments: str) -> str:
    chosen: Sequence[str] = ("kubectl", f"--namespace={namespace}") if namespace else ("kubectl",)
    return shlex.join([*chosen, *arguments])
