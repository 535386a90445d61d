"""Which exceptions mean that another rank has gone away."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from elasticzero.errors import OperatorError, RetryError, is_peer_error

GLOO = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by "
    "peer [127.0.0.1]:28390. This is typically caused by a remote worker crashing."
)


def caused_by(error: Exception) -> Exception:
    raised = ValueError("in the script")
    raised.__cause__ = error
    return raised


@pytest.mark.parametrize(
    ("error", "peer"),
    [
        pytest.param(dist.DistBackendError("timed out"), True, id="of a backend"),
        pytest.param(dist.DistNetworkError("timed out"), True, id="of the network"),
        pytest.param(dist.DistStoreError("timed out"), True, id="of the store"),
        pytest.param(RuntimeError(GLOO), True, id="of gloo, which has no type"),
        pytest.param(RetryError("rank 3 is at another call"), True, id="of this project"),
        pytest.param(caused_by(RuntimeError(GLOO)), True, id="as the cause of another"),
        pytest.param(
            RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, id="a shape"
        ),
        pytest.param(ValueError(GLOO), False, id="its words in a script's own error"),
        pytest.param(OperatorError("no disk"), False, id="of the environment"),
    ],
)
def test_an_error_that_a_lost_peer_causes(error: Exception, peer: bool) -> None:
    assert is_peer_error(error) == peer


def test_causes_in_a_circle_end() -> None:
    first, second = ValueError("one"), ValueError("two")
    first.__cause__, second.__cause__ = second, first
    assert not is_peer_error(first)
