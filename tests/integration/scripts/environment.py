"""Writes this worker's environment to DIRECTORY/RANK.json; with --fail rank 1 then raises under
torch's `record`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    directory = Path(sys.argv[1])
    report = {"environment": dict(os.environ), "threads": torch.get_num_threads()}
    report |= {"arguments": sys.argv[2:], "main": sys.modules["__main__"].__spec__ is not None}
    written = directory / f"{os.environ['RANK']}.new"
    written.write_text(json.dumps(report))
    written.rename(directory / f"{os.environ['RANK']}.json")
    if "--fail" in sys.argv and os.environ["RANK"] == "1":
        raise ValueError("no such colour: octarine")


if __name__ == "__main__":
    main()
