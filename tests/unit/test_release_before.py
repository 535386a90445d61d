"""What ranks of this release and of the one before compare is the same to both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from elasticzero.data.sampling import DataPosition, Mark, SkippedBatch
from elasticzero.serialization import encode
from tests.support.releases import unpack_release_before

USED: dict[str, Any] = {"dataset": 1, "epoch": 3, "offset": 5, "order": [20, 0, False]}
SKIPPED: dict[str, Any] = {"dataset": 0, "epoch": 1, "start": 16, "stop": 32}
NOW: dict[str, Any] = {"loop": 2, "epoch": 1, "offset": 64, "steps": 9, "order": [330, 0, True]}
SCRIPT = f"""
import json
from elasticzero.data.sampling import DataPosition, Mark, SkippedBatch
from elasticzero.serialization import encode
position = DataPosition(**{NOW}, others=(Mark(**{USED}),), skipped=(SkippedBatch(**{SKIPPED}),))
print(json.dumps(encode(position)))
"""


def test_positions_are_the_same_to_both_releases(root: Path, tmp_path: Path) -> None:
    """Ranks compare a digest of the encoded position; one that differs is set aside."""
    before = unpack_release_before(root, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | before,
        capture_output=True,
        text=True,
        check=True,
    )
    used, skipped = Mark(**USED), SkippedBatch(**SKIPPED)
    position = DataPosition(**NOW, others=(used,), skipped=(skipped,))
    assert json.loads(done.stdout) == encode(position)
