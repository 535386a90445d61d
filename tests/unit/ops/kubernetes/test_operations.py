"""The kubectl commands that scale a job, drain a machine and replace a member of etcd."""

from __future__ import annotations

import json
import shlex

import pytest

from elasticzero.errors import UserError
from elasticzero.ops.kubernetes.operations import (
    drain_script,
    replace_member_script,
    scale_script,
)


def test_the_job_is_told_before_its_pods_change() -> None:
    told, patched = (shlex.split(line) for line in scale_script("train", (2, 6), "ml"))
    assert told == [
        *("kubectl", "--namespace=ml", "exec", "job/train", "--"),
        *("elasticzero", "scale", "2:6"),
    ]
    assert patched[:5] == ["kubectl", "--namespace=ml", "patch", "job", "train"]
    patch = json.loads(patched[-1].removeprefix("--patch="))
    assert patch == {"spec": {"parallelism": 6, "completions": 6}}


@pytest.mark.parametrize("node", ["3", "3-d9d8c7b6-0a1b-4c2d-8e3f-001122334455"])
def test_a_drain_evicts_the_pod_and_closes_its_machine(node: str) -> None:
    uid, machine, drain = drain_script("train", node, "")
    assert uid == "JOB_UID=$(kubectl get job train '--output=jsonpath={.metadata.uid}')"
    assert machine.startswith("MACHINE=$(kubectl get pods ")
    assert ',batch.kubernetes.io/job-completion-index=3")' in machine
    assert drain == (
        "kubectl drain --delete-emptydir-data "
        '--pod-selector="batch.kubernetes.io/controller-uid=$JOB_UID" "$MACHINE"'
    )


@pytest.mark.parametrize("node", ["node-3", "", "gpu-machine"])
def test_a_node_is_named_as_status_names_it(node: str) -> None:
    with pytest.raises(UserError, match="INDEX-UID"):
        drain_script("train", node, "")


def test_a_member_is_removed_before_it_is_added() -> None:
    lines = replace_member_script("train", 0, 3, "", tls=True)
    commands = [shlex.split(line) for line in lines]
    assert lines[0].startswith("ID=$(kubectl exec train-etcd-1 --container=etcd -- etcdctl ")
    assert "--endpoints=https://train-etcd-1.train-etcd:2379,https://train-etcd-2" in lines[0]
    assert commands[1][-3:] == ["member", "remove", "$ID"]
    assert lines[2].startswith("for TRY in 1 2 3 ")
    add = "member add train-etcd-0 --peer-urls=https://train-etcd-0.train-etcd:2380 && break;"
    assert add in lines[2]
    assert json.loads(commands[3][-1].removeprefix("--patch=")) == {
        "data": {"initial-cluster-state": "existing"}
    }
    assert commands[4][1:4] == ["delete", "pvc", "data-train-etcd-0"]
    assert commands[5][1:] == ["delete", "pod", "train-etcd-0"]


@pytest.mark.parametrize(("index", "members"), [(3, 3), (-1, 3), (0, 1)])
def test_only_a_member_among_others_is_replaced(index: int, members: int) -> None:
    with pytest.raises(UserError, match="k8s replace-etcd-member"):
        replace_member_script("train", index, members, "", tls=False)
