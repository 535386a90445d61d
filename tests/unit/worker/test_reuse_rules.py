"""Whether a worker's process may outlive its generation: one line a rule."""

from __future__ import annotations

from typing import Any

import pytest

from elasticzero.worker.reuse_rules import Leftovers, reason_not_to_reuse

MIB = 1 << 20


@pytest.mark.parametrize(
    ("leftovers", "why"),
    [
        ({}, None),
        ({"script_groups": 1}, "1 process group(s) of the script's own are left"),
        ({"released": False}, "an operation hangs in a process group"),
        ({"threads": ("reader", "b", "c", "d")}, "threads still run: reader, b, c"),
        ({"children": (12, 13)}, "child processes are left: 12, 13"),
        ({"cuda_error": "out of memory"}, "CUDA reports an error: out of memory"),
        ({"resident_bytes": 9000 * MIB}, None),
        ({"resident_bytes": 800 * MIB, "first_resident_bytes": 300 * MIB}, None),
        (
            {"resident_bytes": 813 * MIB, "first_resident_bytes": 300 * MIB},
            "memory grew from 300 to 813 MiB",
        ),
        ({"resident_bytes": 14 * MIB << 10, "first_resident_bytes": 10 * MIB << 10}, None),
        (
            {"resident_bytes": 16 * MIB << 10, "first_resident_bytes": 10 * MIB << 10},
            "memory grew from 10240 to 16384 MiB",
        ),
    ],
)
def test_what_speaks_against_keeping_a_process(leftovers: dict[str, Any], why: str | None) -> None:
    assert reason_not_to_reuse(Leftovers(**leftovers)) == why
