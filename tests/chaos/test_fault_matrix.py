"""Each fault alone, at each step of the protocol, for each strategy; on three nodes of one worker,
and with five workers, where not every rank is every other's neighbour; with survivors forked anew,
and with survivors that keep their processes.

make chaos                               # all cells; one job suffers a fault at each step in turn
CHAOS_CELLS=leader@restoring python -m pytest -m chaos tests/chaos -k 'node and zero2 and 5'

After each cell the job has recovered within what is promised; at its end every sample is in exactly
one committed step, the weights are those of an undisturbed run, each checkpoint is whole, and
nothing is left.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticzero.checkpoint.steps import catalog
from elasticzero.checkpoint.storage.disk import DiskDirectory
from elasticzero.launcher.local.cluster import on_loopback
from elasticzero.launcher.store.etcd.server import EtcdServer
from tests.chaos.matrix import (
    CELLS,
    FAULTS,
    SHAPES,
    STRATEGIES,
    SURVIVORS,
    Cell,
    cells_of,
    draw,
    parse,
)
from tests.chaos.networks import Networks, NoNetworks
from tests.chaos.stage import NPROC, Stage
from tests.integration.clusters import REGRESSION, story
from tests.integration.reference import steps_in, undisturbed
from tests.integration.test_elastic_training import check_samples, check_weights

SAVE_EVERY = 10
SAMPLE, SAMPLE_SEED = 6, 341


@pytest.fixture
def networks() -> Iterator[Networks]:
    try:
        made = Networks()
    except NoNetworks as error:
        pytest.skip(f"no network can be cut here: {error}")
    yield made
    made.close()


def play(
    strategy: str,
    shape: str,
    survivors: str,
    cells: list[Cell],
    tmp_path: Path,
    job: str,
    networks: Networks | None,
    seed: int = 0,
    epochs_a_cell: int = 3,
) -> None:
    """Train on one job through all these cells, and compare with an undisturbed run.

    epochs_a_cell: long enough for nodes to start meanwhile, on a busy machine too; training ends
    with the epoch in which the last cell does.
    """
    most_epochs = epochs_a_cell * len(cells) + 1
    checkpoints, holds = tmp_path / "checkpoints", tmp_path / "holds"
    holds.mkdir()
    nodes, save_every = SHAPES[shape], str(SAVE_EVERY)
    arguments = ["--nnodes", f"1:{len(nodes)}", "--lease-ttl", "2", "--settle", "30"]
    arguments += ["--keep-workers"] if survivors == "kept" else []
    arguments += ["--strategy", strategy, "--hang-timeout", "6", "--snapshot-every", "1"]
    arguments += ["--checkpoint-dir", str(checkpoints), "--checkpoint-every", save_every]
    arguments += ["--keep", "1"]
    arguments += [str(REGRESSION), "--epochs", str(most_epochs), "--pause", "0.1"]
    arguments += ["--holds", str(holds), "--save-every", save_every]
    first = [{NPROC: str(nproc)} for nproc in nodes[:-1]]
    place = networks.place if networks is not None else on_loopback
    address = networks.address if networks is not None else "127.0.0.1"
    with (
        EtcdServer(address=address) as etcd,
        story(
            tmp_path,
            etcd.endpoint,
            job,
            arguments,
            nodes=len(first),
            environments=first,
            place=place,
        ) as told,
    ):
        dice = random.Random(f"{seed} {strategy} {shape} {survivors} {cells}")
        stage = Stage(
            told,
            etcd,
            networks,
            strategy=strategy,
            shape=shape,
            holds=holds,
            steps=steps_in(10, most_epochs),
            cells=len(cells),
            dice=dice,
        )
        forming = cells[0].step == "forming"
        stage.form(cells[0] if forming else None)
        for i, cell in enumerate(cells[forming:], 1 + forming):
            stage.play(cell, len(cells) - i)
        epochs = stage.finish()
    check_samples(told.lineage, told.directory(), epochs=epochs)
    check_weights(checkpoints, undisturbed(global_batch=10, epochs=epochs))
    steps = catalog.steps(DiskDirectory(checkpoints))
    assert not [error for info in steps if (error := catalog.step_error(info.storage))]
    print(f"\n{strategy}, {shape}, {survivors}: {'; '.join(stage.done)}")


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("survivors", SURVIVORS)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_fault_at_every_step(
    strategy: str,
    shape: str,
    fault: str,
    survivors: str,
    tmp_path: Path,
    job: str,
    request: pytest.FixtureRequest,
) -> None:
    chosen_cells = parse(os.environ["CHAOS_CELLS"]) if "CHAOS_CELLS" in os.environ else CELLS
    cells = [cell for cell in cells_of(fault) if cell in chosen_cells]
    if not cells:
        pytest.skip("none of the cells that CHAOS_CELLS names")
    networks = request.getfixturevalue("networks") if fault == "cut" else None
    play(strategy, shape, survivors, cells, tmp_path, job, networks)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_drawn_sample(tmp_path: Path, job: str, request: pytest.FixtureRequest) -> None:
    """As many cells as fit into `make slow`."""
    seed = int(os.environ.get("CHAOS_SEED", SAMPLE_SEED))
    strategy, shape, survivors, cells = draw(seed, SAMPLE)
    cut = any(cell.fault == "cut" for cell in cells)
    networks = request.getfixturevalue("networks") if cut else None
    play(strategy, shape, survivors, cells, tmp_path, job, networks, seed, epochs_a_cell=2)
