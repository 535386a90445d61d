"""A whole agent, whose job trains, under the attacks of clients without the token.

python -m pytest -m slow tests/integration/test_attacked_agent.py --log-cli-level=INFO    # figures
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from elasticzero.launcher.local.cluster import Placement
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.integration.clusters import REGRESSION, story
from tests.integration.http_server import TOKEN
from tests.integration.http_stranger import ATTACKS
from tests.integration.test_agent_loop import port_of
from tests.integration.test_http_attacks import (
    MAX_MEMORY_BYTES,
    check_served,
    peak_bytes,
    started,
)

log = logging.getLogger(__name__)


def by_itself(node: str) -> Placement:
    """A process of its own: one that the tests fork has the memory of what they have imported."""
    return Placement(command_prefix=("env",))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_agent_stays_small_serves_the_token_and_keeps_its_lease(
    tmp_path: Path, job: str, etcd: EtcdServer
) -> None:
    """200 connections with heads of 6 MB took 3 GB, and the lease, so that the generation ended."""
    options = ["--nnodes", "1:1", "--lease-ttl", "5", "--tls", "off", str(REGRESSION)]
    token = {"ELASTICZERO_TOKEN": TOKEN}
    arguments = (tmp_path, etcd.endpoint, job, options)
    with story(*arguments, nodes=1, environments=[token], place=by_itself) as told:
        told.pause(1.5)
        told.wait_for_step(2)
        agent, port = told.node(0).process.pid, port_of(told, "node-0")
        peaks = {"nothing": peak_bytes(agent)}
        for attack in ATTACKS:
            Path(f"/proc/{agent}/clear_refs").write_text("5")  # its peak begins anew
            with started("http_stranger", str(port), attack):
                times_s = check_served(port, attack)
            peaks[attack] = peak_bytes(agent)
            log.info("%s: %d MiB, %.0f ms", attack, peaks[attack] >> 20, 1e3 * max(times_s))
        log.info("nothing: %d MiB", peaks["nothing"] >> 20)
        assert max(peaks.values()) < MAX_MEMORY_BYTES, peaks
        assert told.generation == 1, told.logs()
        told.wait_for_step(told.step + 1)
        assert told.wait_for_end() == {"node-0": 0}, told.logs()
    assert told.generation == 1
