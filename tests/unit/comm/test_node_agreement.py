"""The ranks of a node apply a step together or not at all, whoever is told of a lost peer first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from elasticzero.comm.node_agreement import PREFIX, NodeAgreement
from elasticzero.errors import is_peer_error

VALUES = torch.tensor([2.5, 0.0, float("nan")], dtype=torch.float64)


@pytest.fixture
def ranks(tmp_path: Path) -> list[NodeAgreement]:
    return [NodeAgreement(tmp_path, "g7") for _ in range(3)]


def begin(ranks: list[NodeAgreement]) -> None:
    for rank in ranks:
        rank.begin()


def test_a_rank_without_the_result_takes_what_another_has_committed(
    ranks: list[NodeAgreement],
) -> None:
    begin(ranks)
    ranks[0].offer(VALUES)
    ranks[0].commit()
    decision = ranks[1].learn()
    assert decision is not None
    assert torch.equal(decision, VALUES) or decision.isnan()[2]
    assert decision[:2].tolist() == VALUES[:2].tolist()
    ranks[1].commit()
    ranks[2].offer(VALUES)
    ranks[2].commit()


def test_a_step_that_one_rank_gives_up_is_applied_by_none(ranks: list[NodeAgreement]) -> None:
    begin(ranks)
    assert ranks[1].learn() is None
    ranks[0].offer(VALUES)
    with pytest.raises(dist.DistBackendError) as error:
        ranks[0].commit()
    assert is_peer_error(error.value)
    assert ranks[2].learn() is None


def test_a_decision_is_of_one_global_batch(ranks: list[NodeAgreement]) -> None:
    begin(ranks)
    ranks[0].offer(VALUES)
    ranks[0].commit()
    begin(ranks)
    assert ranks[1].learn() is None
    begin(ranks)
    ranks[1].offer(VALUES[:1])
    ranks[1].commit()
    assert (decision := ranks[2].learn()) is not None
    assert decision.tolist() == [2.5]


def test_nothing_of_an_earlier_generation_counts(
    tmp_path: Path, ranks: list[NodeAgreement]
) -> None:
    begin(ranks)
    ranks[0].offer(VALUES)
    ranks[0].commit()
    later = NodeAgreement(tmp_path, "g8")
    later.begin()
    assert later.learn() is None
    assert [path.name for path in tmp_path.iterdir()] == [f"{PREFIX}g8"]
    for rank in [*ranks, later]:
        rank.close()
