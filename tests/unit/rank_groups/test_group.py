"""A group's process group is referred to from one place alone."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from elasticzero.errors import is_peer_error
from elasticzero.rank_groups.group import ALONE
from tests.support.fake_groups import fake_group


def test_a_group_that_has_ended_is_a_lost_peer_to_who_still_uses_it() -> None:
    group = fake_group(2, "a row")
    assert (str(group.process_group), len(group.ranks)) == ("a row", 2)
    assert str(group.take()) == "a row"
    with pytest.raises(dist.DistBackendError, match="of a row is closed") as raised:
        _ = group.process_group
    assert is_peer_error(raised.value)


def test_a_process_alone_has_no_process_group() -> None:
    with pytest.raises(dist.DistBackendError, match="of a process alone is closed"):
        _ = ALONE.process_group
