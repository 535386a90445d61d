"""The regression, with captures as on a GPU that has room for them.

They are copied within their device, which is the CPU here, and go from there to shared memory while
training goes on, some at once, some after steps. With a number in `TESTER_BAD_FROM` no
capture of rank 1 from that step on can be finished in the first generation.
"""

import os
import random
import runpy
import time
from pathlib import Path

from elasticzero.checkpoint.ram import device_image
from elasticzero.checkpoint.ram.device_image import DeviceImage
from elasticzero.checkpoint.ram.store import ShardName, SnapshotStore
from elasticzero.errors import StorageError

LATEST_S = 0.1
finish_draft, await_written = SnapshotStore.finish_draft, DeviceImage.await_written
delays = random.Random(os.getpid())


def written_late(image: DeviceImage) -> None:
    time.sleep(delays.choice([0.0, delays.uniform(0.0, LATEST_S)]))
    await_written(image)


def finish_unless_bad(store: SnapshotStore, shard: ShardName, root: Path | None = None) -> None:
    bad = (shard.generation, shard.rank) == (1, 1)
    if bad and shard.step >= int(os.environ.get("TESTER_BAD_FROM", "1000")):
        raise StorageError("the snapshot is gone")
    finish_draft(store, shard, root)


device_image.room = lambda device, image_bytes: 1 << 40
DeviceImage.await_written = written_late  # type: ignore[assignment, method-assign]
SnapshotStore.finish_draft = finish_unless_bad  # type: ignore[assignment, method-assign]
runpy.run_path(str(Path(__file__).with_name("regression.py")), run_name="__main__")
