"""The kubelet that plays for tests gives containers what the documentation of Kubernetes says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.kubernetes.environment import (
    INDEX_ANNOTATION,
    Mounts,
    PodFields,
    command,
    environment,
    expand,
    service_variables,
)
from tests.support.kubernetes.image import parse_dockerfile
from tests.support.kubernetes.job import Invalid
from tests.support.kubernetes.probes import Health, Kind, Probe, probes_of

FIELDS = PodFields(
    name="train-2-abcde",
    uid="1f0c",
    ip="127.1.2.3",
    node="node-7",
    labels={"app": "train"},
    annotations={INDEX_ANNOTATION: "2"},
)


def test_references_are_replaced_as_kubernetes_does() -> None:
    variables = {"A": "1", "B_2": "two"}
    assert expand("$(A)-$(B_2)", variables) == "1-two"
    assert expand("$(NONE) $A ${A} $", variables) == "$(NONE) $A ${A} $"
    assert expand("$$(A) $$$(A)", variables) == "$(A) $1"


def test_a_variable_sees_those_above_it_only() -> None:
    env = [
        {"name": "EARLY", "value": "$(LATE)"},
        {
            "name": "INDEX",
            "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX_ANNOTATION}']"}},
        },
        {"name": "UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": "LATE", "value": "$(INDEX)-$(UID)"},
        {"name": "EMPTY"},
    ]
    assert environment({"env": env}, FIELDS, {}) == {
        "EARLY": "$(LATE)",
        "INDEX": "2",
        "UID": "1f0c",
        "LATE": "2-1f0c",
        "EMPTY": "",
        "JOB_COMPLETION_INDEX": "2",
    }


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", "train-2-abcde"),
        ("metadata.labels['app']", "train"),
        ("status.podIP", "127.1.2.3"),
        ("spec.nodeName", "node-7"),
    ],
)
def test_fields_of_a_pod(path: str, value: str) -> None:
    assert FIELDS.value(path) == value


def test_what_is_not_played_is_refused() -> None:
    with pytest.raises(Invalid, match=r"status\.hostIPs"):
        FIELDS.value("status.hostIPs")
    with pytest.raises(Invalid, match="envFrom"):
        environment({"envFrom": []}, FIELDS, {})
    with pytest.raises(Invalid, match="resourceFieldRef"):
        environment({"env": [{"name": "A", "valueFrom": {"resourceFieldRef": {}}}]}, FIELDS, {})
    with pytest.raises(Invalid, match="only httpGet"):
        probes_of({"livenessProbe": {"exec": {"command": ["true"]}}})


def test_values_of_secrets_and_config_maps() -> None:
    def refer(kind: str, name: str, key: str, **options: Any) -> dict[str, Any]:
        return {"name": "A", "valueFrom": {kind: {"name": name, "key": key, **options}}}

    objects = {("Secret", "token"): {"token": "s3cret"}}
    values = environment({"env": [refer("secretKeyRef", "token", "token")]}, FIELDS, objects)
    assert values["A"] == "s3cret"
    absent = environment({"env": [refer("secretKeyRef", "x", "y", optional=True)]}, FIELDS, objects)
    assert "A" not in absent
    with pytest.raises(Invalid, match="no y in ConfigMap x"):
        environment({"env": [refer("configMapKeyRef", "x", "y")]}, FIELDS, objects)


def test_services_set_variables() -> None:
    """A Service `elasticzero-http` would set what an option of the agent is read from."""
    variables = service_variables({"elasticzero-http": {"": 80}})
    assert variables["ELASTICZERO_HTTP_PORT"].startswith("tcp://")
    assert variables["ELASTICZERO_HTTP_SERVICE_PORT"] == "80"


def test_command_and_arguments_replace_those_of_the_image() -> None:
    def run(**container: Any) -> list[str]:
        return command(container, ["entry"], ["default"], {"A": "1"})

    assert run() == ["entry", "default"]
    assert run(args=["$(A)"]) == ["entry", "1"]
    assert run(command=["other"]) == ["other"]
    assert run(command=["other"], args=["$(B)"]) == ["other", "$(B)"]


def test_paths_of_mounts_are_found_in_texts() -> None:
    mounts = Mounts({"/tmp": "/v/t", "/app": "/v/a", "/app/train.py": "/src/t.py"})
    assert mounts.on_host("/tmp") == "/v/t"
    assert mounts.on_host("/tmp/x:/app/y") == "/v/t/x:/v/a/y"
    assert mounts.on_host("--dir=/app/train.py") == "--dir=/src/t.py"
    assert mounts.on_host("/tmpfile /x/tmp /applet s3://bucket/app") == (
        "/tmpfile /x/tmp /applet s3://bucket/app"
    )


DOCKERFILE = """
# FROM nothing
FROM python:3.11-slim AS build
ENTRYPOINT ["wrong"]
FROM python:3.11-slim
COPY --from=build /opt/x /opt/x
COPY --chown=1:1 examples /app/examples
WORKDIR /app
ENV PATH=/opt/x/bin:$PATH \\
    HOME=/tmp
ENV OLD style here
ENTRYPOINT ["elasticzero"]
CMD ["--help"]
"""


def test_the_last_stage_of_a_dockerfile_counts() -> None:
    image = parse_dockerfile(DOCKERFILE, {"PATH": "/usr/bin"})
    assert image.entrypoint == ("elasticzero",)
    assert image.arguments == ("--help",)
    assert image.directory == "/app"
    assert image.copied == {"/app/examples": "examples"}
    assert image.environment == {"PATH": "/opt/x/bin:/usr/bin", "HOME": "/tmp", "OLD": "style here"}


def test_the_shell_form_of_an_entrypoint_is_refused() -> None:
    """It would run a shell, which passes no SIGTERM on."""
    with pytest.raises(Invalid, match="shell form"):
        parse_dockerfile("FROM x\nENTRYPOINT elasticzero\n", {})


def test_defaults_of_probes() -> None:
    get = {"httpGet": {"path": "/healthz", "port": "http"}}
    ports = [{"name": "http", "containerPort": 9400}]
    probes = probes_of({"ports": ports, "livenessProbe": get})
    assert probes == {"liveness": Probe(path="/healthz", port=9400)}
    (probe,) = probes.values()
    assert (probe.period_s, probe.timeout_s, probe.failure_threshold) == (10, 1, 3)


PROBES: dict[Kind, Probe] = {
    "startup": Probe(path="/", port=1, failure_threshold=2),
    "readiness": Probe(path="/", port=1, failure_threshold=2, success_threshold=2),
    "liveness": Probe(path="/", port=1, failure_threshold=2),
}


def observed(health: Health, kind: Kind, *results: bool) -> Health:
    for success in results:
        health.observe(kind, success=success)
    return health


def test_nothing_else_is_probed_before_the_start() -> None:
    health = Health(PROBES)
    assert [kind for kind in PROBES if health.runs(kind, deleting=False)] == ["startup"]
    observed(health, "startup", False, True)
    assert [kind for kind in PROBES if health.runs(kind, deleting=False)] == [
        "readiness",
        "liveness",
    ]
    assert not health.ready and health.killed_by is None


def test_a_container_that_does_not_start_is_killed() -> None:
    assert observed(Health(PROBES), "startup", False, False).killed_by == "startup"


def test_readiness_follows_its_thresholds_and_kills_nothing() -> None:
    health = observed(Health(PROBES), "startup", True)
    assert not observed(health, "readiness", True).ready
    assert observed(health, "readiness", True).ready
    assert observed(health, "readiness", False).ready
    assert not observed(health, "readiness", False, False, False).ready
    assert health.killed_by is None


def test_liveness_kills_after_failures_in_a_row() -> None:
    health = observed(Health(PROBES), "startup", True)
    assert observed(health, "liveness", False, True, False).killed_by is None
    assert observed(health, "liveness", False).killed_by == "liveness"


def test_a_pod_that_is_deleted_is_probed_for_readiness_only() -> None:
    health = observed(Health(PROBES), "startup", True)
    assert [kind for kind in PROBES if health.runs(kind, deleting=True)] == ["readiness"]


def test_without_probes_a_container_is_ready() -> None:
    assert Health({}).ready
