"""`elasticzero k8s render --patch` makes what kustomize makes, and says where a patch is wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from elasticzero.cli.main import parse
from elasticzero.errors import UserError
from elasticzero.ops.cli.k8s.commands import render_options, rendered_files
from elasticzero.ops.cli.k8s.patch_files import read_patches
from elasticzero.ops.kubernetes.options import RenderOptions
from elasticzero.ops.kubernetes.patches.apply import patched_manifests
from elasticzero.ops.kubernetes.render import render_manifests
from tests.unit.manifests import Manifest
from tests.unit.renders import kustomized
from tools import kubernetes_fields

RENDER = ("--image", "registry/image:1", "--nnodes", "2:4", "--checkpoints", "nfs", "--gpus", "8")
JOB = "apiVersion: batch/v1\nkind: Job\nmetadata: {name: NAME}\n"
POD = f"{JOB}spec:\n template:\n  spec:\n"
AGENT = f"{POD}   containers:\n   - name: agent\n"
ETCD = "apiVersion: apps/v1\nkind: StatefulSet\nmetadata: {name: NAME-etcd}\n"
SERVICE = "apiVersion: v1\nkind: Service\nmetadata: {name: NAME-agents}\n"

PATCHES = {
    "labels of the job": f"{JOB[:-2]}, labels: {{team: vision}}}}\n",
    "labels and annotations of the pods": f"{JOB}spec: {{template: {{metadata: "
    "{labels: {team: vision}, annotations: {cost: high}}}}\n",
    "an annotation less": f"{JOB}spec: {{template: {{metadata: "
    "{annotations: {prometheus.io/scrape: null}}}}\n",
    "a selector of nodes": f"{POD}   nodeSelector: {{pool: big}}\n",
    "tolerations, of which the list is replaced": f"{POD}   tolerations:\n"
    "   - {key: team, operator: Equal, value: vision, effect: NoSchedule}\n",
    "priority and the class of the runtime": f"{POD}   priorityClassName: high\n"
    "   runtimeClassName: nvidia\n   schedulerName: volcano\n",
    "variables, new and changed": f"{AGENT}     env:\n     - {{name: ELASTICZERO_JOB}}\n"
    "     - {name: NAME, value: $(ELASTICZERO_JOB)}\n"
    "     - {name: ELASTICZERO_STRATEGY, value: zero3}\n",
    "a variable of a secret in the place of a value": f"{AGENT}     env:\n"
    "     - name: ELASTICZERO_STRATEGY\n       value: null\n"
    "       valueFrom: {secretKeyRef: {name: s, key: k}}\n",
    "variables less": f"{AGENT}     env:\n     - {{name: ELASTICZERO_TEE, $patch: delete}}\n"
    "     - {name: ELASTICZERO_ZONE, $patch: delete}\n",
    "all variables replaced": f"{AGENT}     env:\n     - $patch: replace\n"
    "     - {name: A, value: b}\n",
    "a container before": f"{POD}   initContainers:\n   - name: fetch\n     image: busybox:1\n"
    "     command: [sh, -c, cp -r /from /to]\n     volumeMounts:\n"
    "     - {name: temporary, mountPath: /to}\n",
    "a container beside": f"{POD}   containers:\n   - {{name: proxy, image: proxy:1}}\n",
    "a service account and a pull secret": f"{POD}   serviceAccountName: trainer\n"
    "   imagePullSecrets: [{name: registry}]\n",
    "words of the agent": f"{AGENT}     args: [run, --precision, bf16, /app/train.py]\n",
    "rights": f"{AGENT}     securityContext: {{capabilities: {{add: [IPC_LOCK]}}}}\n",
    "resources": f"{AGENT}     resources: {{requests: {{cpu: null}}, limits: {{rdma/hca: 1}}}}\n",
    "another volume of the same name": f"{POD}   volumes:\n   - name: temporary\n"
    "     emptyDir: null\n     hostPath: {path: /mnt/scratch}\n",
    "a volume more": f"{POD}   volumes:\n   - {{name: data, nfs: {{server: s, path: /p}}}}\n"
    "   containers:\n   - name: agent\n     volumeMounts: [{name: data, mountPath: /data}]\n",
    "a volume less": f"{POD}   volumes:\n   - {{name: logs, $patch: delete}}\n   containers:\n"
    "   - name: agent\n     volumeMounts: [{mountPath: /var/log/elasticzero, $patch: delete}]\n",
    "no probe": f"{AGENT}     livenessProbe: null\n",
    "another probe": f"{AGENT}     livenessProbe: {{$patch: replace, tcpSocket: {{port: http}}}}\n",
    "no affinity, and constraints by their two keys": f"{POD}   affinity: null\n"
    "   topologySpreadConstraints:\n   - {topologyKey: rack, maxSkew: 2, "
    "whenUnsatisfiable: DoNotSchedule}\n   - {topologyKey: topology.kubernetes.io/zone, "
    "whenUnsatisfiable: ScheduleAnyway, maxSkew: 3}\n",
    "rules, of which the list is replaced": f"{JOB}spec:\n podFailurePolicy:\n  rules:\n"
    "  - {action: Ignore, onPodConditions: [{type: DisruptionTarget, status: 'True'}]}\n",
    "etcd's volumes, resources and machines": f"{ETCD}spec:\n replicas: 5\n template:\n"
    "  spec:\n   nodeSelector: {pool: etcd}\n   containers:\n   - name: etcd\n"
    "     resources: {limits: {memory: 2Gi}}\n volumeClaimTemplates:\n"
    " - metadata: {name: data}\n   spec: {storageClassName: fast, accessModes: [ReadWriteOnce]}\n",
    "a service": f"{SERVICE[:-2]}, annotations: {{a: b}}}}\nspec:\n type: ClusterIP\n ports:\n"
    " - {port: 9400, appProtocol: http}\n - {name: extra, port: 9500}\n",
    "a budget less": "apiVersion: policy/v1\nkind: PodDisruptionBudget\nmetadata: {name: NAME}\n"
    "$patch: delete\n",
    "an object's labels gone": f"{JOB[:-2]}, labels: {{$patch: delete}}}}\n",
    "each of an object's labels gone": f"{SERVICE[:-2]}, labels: {{app.kubernetes.io/name: null, "
    "app.kubernetes.io/part-of: null, app.kubernetes.io/instance: null, "
    "app.kubernetes.io/component: null}}\n",
    "two patches of one object": f"{POD}   nodeSelector: {{pool: big}}\n---\n"
    f"{POD}   nodeSelector: {{pool: null, zone: a}}\n",
}


@cache
def options() -> RenderOptions:
    return render_options(parse(["k8s", "render", "--name", "train", *RENDER, "/app/train.py"]))


def rendered(name: str, files: list[Path]) -> list[Manifest]:
    """What the command makes of files of patches."""
    plain = render_manifests(replace(options(), name=name))
    patched = patched_manifests(plain, read_patches(map(str, files)))
    return [m for part in patched.values() for m in part]


def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    return {(m["kind"], m["metadata"]["name"]): m for m in manifests}


def check_against_kustomize(
    texts: dict[str, str], place: Path, program: Callable[[str], str]
) -> None:
    """Compares renders, of a name each, with what one run of kustomize makes of all patches."""
    plain: list[Manifest] = []
    expected: dict[tuple[str, str], Manifest | None] = {}
    files: list[dict[str, str]] = []
    for number, text in enumerate(texts.values()):
        name = f"case{number}"
        documents = list(yaml.safe_load_all(text.replace("NAME", name)))
        file = place / f"{name}.yaml"
        file.write_text("---\n".join(f"{json.dumps(document)}\n" for document in documents))
        changed = by_name(documents)
        before, after = by_name(rendered(name, [])), by_name(rendered(name, [file]))
        assert {k: v for k, v in before.items() if k not in changed} == {
            k: v for k, v in after.items() if k not in changed
        }
        plain += [before[key] for key in changed]
        expected |= {key: after.get(key) for key in changed}
        for index, document in enumerate(documents):
            files.append({"path": f"{name}-{index}.json"})
            (place / f"{name}-{index}.json").write_text(json.dumps(document))
    (place / "plain.yaml").write_text("---\n".join(f"{json.dumps(m)}\n" for m in plain))
    kustomization = {"resources": ["plain.yaml"], "patches": files}
    (place / "kustomization.yaml").write_text(json.dumps(kustomization))
    made = by_name(kustomized(place, program))
    for key, manifest in expected.items():
        assert manifest == made.get(key), list(texts)[int(key[1].partition("-")[0][4:])]


def test_patches_make_what_kustomize_makes_of_them(
    tmp_path: Path, program: Callable[[str], str]
) -> None:
    assert len(PATCHES) >= 20
    check_against_kustomize(PATCHES, tmp_path, program)


def drawn_container(draw: random.Random) -> dict[str, Any]:
    """What a patch says of the agent's container."""
    names = ["ELASTICZERO_JOB", "ELASTICZERO_TEE", "POD_UID", "NEW", "OTHER"]
    env: list[dict[str, Any]] = []
    for name in draw.sample(names, draw.randint(1, 4)):
        value: dict[str, Any] = draw.choice([{"value": "x"}, {}, {"$patch": "delete"}])
        is_new = name in ("NEW", "OTHER")
        is_reference = name == "POD_UID"
        if is_new or (is_reference and "value" in value):
            value = {"value": "x", **({"valueFrom": None} if is_reference else {})}
        env.append({"name": name, **value})
    parts: dict[str, Any] = {
        "env": env,
        "args": draw.choice([None, [], ["run", "/x"]]),
        "livenessProbe": draw.choice([None, {"periodSeconds": 9, "timeoutSeconds": None}]),
        "resources": {"limits": {"memory": draw.choice([None, "1Gi"]), "x/y": 1}},
        "securityContext": {"capabilities": {draw.choice(["add", "drop"]): ["A"]}},
        "ports": [{"containerPort": draw.choice([9400, 9500]), "hostPort": 1}],
    }
    return {"name": "agent", **{key: parts[key] for key in draw.sample(list(parts), 3)}}


def drawn_patch(draw: random.Random) -> str:
    """A patch of random parts of the agents' Job."""
    parts: dict[str, Any] = {
        "containers": [drawn_container(draw)],
        "tolerations": draw.choice([None, [], [{"key": "a", "operator": "Exists"}]]),
        "nodeSelector": {"a": draw.choice([None, "b"]), "c": "d"},
        "securityContext": {"runAsUser": draw.choice([None, 5]), "fsGroup": 7},
        "initContainers": [{"name": "i", "image": "j", "env": [{"name": "A", "value": None}]}],
        "affinity": draw.choice([None, {"$patch": "delete"}, {"nodeAffinity": {}}]),
        "volumes": [{"name": "logs", "emptyDir": {"sizeLimit": draw.choice([None, "1Gi"])}}],
    }
    template: dict[str, Any] = {"spec": {k: parts[k] for k in draw.sample(list(parts), 3)}}
    if draw.random() < 0.5:
        template["metadata"] = {
            "labels": {"a": "b"},
            "annotations": {"$patch": "replace", "x": "y"},
        }
    head: dict[str, Any] = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "NAME"}}
    return yaml.safe_dump({**head, "spec": {"template": template}})


def test_random_patches_make_what_kustomize_makes_of_them(
    tmp_path: Path, program: Callable[[str], str]
) -> None:
    draw = random.Random(7)
    check_against_kustomize({str(n): drawn_patch(draw) for n in range(30)}, tmp_path, program)


def test_a_job_set_is_merged_by_names(tmp_path: Path) -> None:
    """As the API server merges it; kustomize replaces the lists, whose keys it does not know."""
    file = tmp_path / "patch.yaml"
    container = "{name: agent, env: [{name: A, value: b}]}"
    template = f"{{spec: {{template: {{spec: {{containers: [{container}]}}}}}}}}"
    file.write_text(
        "kind: JobSet\nmetadata: {name: train}\n"
        f"spec: {{replicatedJobs: [{{name: node, template: {template}}}], suspend: true}}\n"
    )
    command = [
        "k8s",
        "render",
        "--name",
        "train",
        *RENDER,
        "--kind",
        "jobset",
        "--patch",
        str(file),
    ]
    manifests = [m for part in rendered_files(parse([*command, "/x.py"])).values() for m in part]
    (job_set,) = (m for m in manifests if m["kind"] == "JobSet")
    (replicated,) = job_set["spec"]["replicatedJobs"]
    (agent,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert agent["image"] == "registry/image:1"
    assert agent["env"][0] == {"name": "A", "value": "b"}
    assert "ELASTICZERO_JOB" in {entry["name"] for entry in agent["env"]}
    assert job_set["spec"]["suspend"] is True


MISTAKES = {
    "no YAML": ("kind: Job\n  metadata: x", ":2: not YAML: "),
    "a tab": ("kind: Job\n\tmetadata: x", ":2: not YAML: "),
    "an alias of itself": (f"{POD}   nodeSelector: &a {{b: *a}}", "a value is in itself"),
    "nothing": ("# nothing\n", "the file has no patch"),
    "a JSON patch": (
        "- {op: replace, path: /spec, value: 1}",
        ":1: a patch is an object with kind",
    ),
    "no kind": ("metadata: {name: NAME}", ":1: the patch has no kind"),
    "no name": ("kind: Job", ":1: the patch has no metadata.name"),
    "an unknown kind": ("kind: Jobb\nmetadata: {name: NAME}", ":1: .* kind Jobb .is Job meant"),
    "an unknown name": ("kind: Job\nmetadata: {name: trian}", ":2: .* Job trian .is train meant"),
    "another version": (
        "apiVersion: batch/v2\nkind: Job\nmetadata: {name: NAME}",
        ":1: .*batch/v1",
    ),
    "a namespace": (
        "kind: Job\nmetadata: {name: NAME, namespace: x}",
        ":2: no object .* namespace",
    ),
    "a field of a container": (f"{AGENT}     enviroment: []", ":9: .*enviroment, which Container"),
    "a field of a pod": (f"{POD}   nodeselector: {{}}", ":7: .*is nodeSelector meant"),
    "a field of the job": (f"{JOB}spec: {{paralelism: 2}}", ":4: .*is parallelism meant"),
    "a field of the object": (f"{JOB}spek: {{}}", ":4: the patch has the field spek, which Job"),
    "a number for a text": (
        f"{AGENT}     env:\n     - {{name: A, value: 1}}",
        ":10: .*env.A..value must",
    ),
    "a truth for a text": (f"{POD}   nodeSelector: {{gpu: true}}", ":7: .*true without quotes"),
    "a text for a number": (f"{JOB}spec: {{backoffLimit: many}}", ":4: .* a whole number"),
    "an object for a list": (f"{POD}   tolerations: {{}}", ":7: .*tolerations must be a list"),
    "a list for an object": (f"{POD}   affinity: []", ":7: .*affinity must have fields"),
    "a list for a map": (f"{POD}   nodeSelector: [a]", ":7: .*must have names and values"),
    "a container without a name": (
        f"{POD}   containers:\n   - {{image: x}}",
        ":8: .*0. has no name",
    ),
    "a container that is not there": (
        f"{POD}   containers:\n   - name: agnet\n     env: []",
        ":8: .*agnet. has no image .is agent meant",
    ),
    "a mount of no volume": (
        f"{AGENT}     volumeMounts:\n     - {{name: log, mountPath: /x}}",
        ":10: .*no volume of that name",
    ),
    "a volume that is mounted": (
        f"{POD}   volumes:\n   - {{name: logs, $patch: delete}}",
        ":6: .* mount logs",
    ),
    "a volume with two sources": (
        f"{POD}   volumes:\n   - {{name: logs, hostPath: {{path: /x}}}}",
        ":8: .*emptyDir and hostPath, of which it can have one",
    ),
    "a variable with two values": (
        f"{AGENT}     env:\n     - {{name: POD_UID, value: x}}",
        ":10: .*value and valueFrom",
    ),
    "a deletion of nothing": (
        f"{AGENT}     env:\n     - {{name: NONE, $patch: delete}}",
        ":10: .*NONE. is to be deleted, and is not there; there are POD_INDEX",
    ),
    "a field that must be there": (
        f"{POD}   topologySpreadConstraints:\n   - {{topologyKey: rack, maxSkew: 1}}",
        ":8: .*has no whenUnsatisfiable",
    ),
    "an unknown directive": (
        f"{POD}   affinity: {{$patch: remove}}",
        ":7: .*remove: one of delete",
    ),
    "another directive": (f"{POD}   $retainKeys: [a]", ":7: .*retainKeys is not taken"),
    "an entry that is replaced": (
        f"{AGENT}     env:\n     - {{name: A, $patch: replace}}",
        ":10: .*replace is for a list as a whole",
    ),
    "a whole object that is replaced": (f"{JOB}$patch: replace", ":4: .*not for a whole one"),
    "a key that is there twice": (
        f"{POD}   hostNetwork: true\n   hostNetwork: true",
        ":8: .*twice",
    ),
    "an entry that is there twice": (
        f"{AGENT}     env:\n     - {{name: A, value: b}}\n     - {{name: A, value: c}}",
        ":11: .*env.A. is there twice",
    ),
    "an empty entry": (f"{POD}   tolerations:\n   -", ":8: .*has no value"),
    "no container": (f"{AGENT}     $patch: delete", ":7: .*spec has no container left"),
    "no list of containers": (f"{POD}   containers: null", ":6: .*spec has no containers"),
    "no spec": (f"{JOB}spec: null", ":4: Job train must keep its spec"),
    "no metadata": (
        "kind: Job\nmetadata: {name: NAME, $patch: delete}",
        ":2: Job train must keep its metadata",
    ),
    "an entry that is no object": (f"{POD}   containers: [agent]", ":7: .*0. must have fields"),
    "metadata that is a list": ("kind: Job\nmetadata: [a]", ":1: the patch has no metadata.name"),
    "a key that is an object": ("? {a: b}\n: c", ":1: not YAML"),
    "a key that is no text": (f"{POD}   nodeSelector: {{1: a}}", ":7: .*the key 1"),
}


@pytest.mark.parametrize("title", MISTAKES)
def test_a_mistake_is_one_sentence_with_its_place(title: str, tmp_path: Path) -> None:
    text, message = MISTAKES[title]
    file = tmp_path / "patch.yaml"
    file.write_text(text.replace("NAME", "train"))
    with pytest.raises(UserError, match=message) as caught:
        rendered("train", [file])
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_second_document_has_its_own_lines(tmp_path: Path) -> None:
    file = tmp_path / "patch.yaml"
    file.write_text(f"{JOB}---\n{JOB}spek: 1\n".replace("NAME", "train"))
    with pytest.raises(UserError, match=r"patch\.yaml:8: "):
        rendered("train", [file])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("missing", None, "No such file"), ("bytes", b"\xff\xfe\x00", "not text")],
)
def test_a_file_that_cannot_be_read(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        rendered("train", [file])


def test_a_patch_that_says_nothing_changes_nothing(tmp_path: Path) -> None:
    """Whatever an object has, its own name alone leaves as it is."""
    plain = rendered("train", [])
    file = tmp_path / "patch.yaml"
    heads = [{"kind": m["kind"], "metadata": {"name": m["metadata"]["name"]}} for m in plain]
    file.write_text(yaml.safe_dump_all(heads))
    assert rendered("train", [file]) == plain


def test_a_render_is_a_patch_of_itself(tmp_path: Path) -> None:
    """Every field of a render is in the table, with its type."""
    plain = rendered("train", [])
    file = tmp_path / "patch.yaml"
    file.write_text(yaml.safe_dump_all(plain))
    assert rendered("train", [file]) == plain


def test_the_table_is_what_the_definitions_say() -> None:
    """`make manifests` writes it."""
    assert kubernetes_fields.PATH.read_text() == kubernetes_fields.text()
