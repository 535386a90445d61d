"""Trains as `island_steps.py` does, with torchft's DiLoCo; `island_link.py` starts it on each node.

It needs torchft, which is no dependency: `pip install torchft`.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import timedelta

import torch
from island_steps import BATCH
from torch import nn
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]
from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found]
from training_ranks import BLOCKS, SAMPLES, Block, adam

TIMEOUT = timedelta(seconds=300)
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
"""As our defaults."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("out", help="the file of the steps' ends")
    parser.add_argument("--address", required=True, help="of this node")
    parser.add_argument("--lighthouse", required=True, help="torchft's coordinator")
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--width", type=int, default=800)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.1)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--overlap", type=int, default=0)
    options = parser.parse_args()
    store = TCPStore(options.address, 0, is_master=True, wait_for_workers=False)
    x = torch.randn(SAMPLES, options.width, generator=torch.Generator().manual_seed(1))
    targets = x.roll(1, 1)
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(options.width) for _ in range(BLOCKS)])
    blocks, count = list(model), options.fragments
    parts = [blocks[i * BLOCKS // count : (i + 1) * BLOCKS // count] for i in range(count)]
    fragments = [nn.Sequential(*part) for part in parts]
    inner = adam(model.parameters())
    outer = [
        torch.optim.SGD(part.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
        for part in fragments
    ]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=options.nodes,
        use_async_quorum=False,
        init_sync=False,  # all begin with the same seed
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=options.address,
        store_port=store.port,
        lighthouse_addr=options.lighthouse,
        replica_id=f"island-{options.node}",
        hostname=options.address,
    )
    share, ends = BATCH // options.nodes, []
    with DiLoCo(
        manager,
        fragments,
        inner,
        outer,
        sync_every=options.every,
        pin_memory=False,
        fragment_sync_delay=options.overlap,
    ):
        for step in range(options.steps):
            first = (step * BATCH + options.node * share) % (SAMPLES - share)
            time.sleep(options.pause)
            inner.zero_grad()
            batch = slice(first, first + share)
            nn.functional.mse_loss(model(x[batch]), targets[batch]).backward()
            inner.step()
            ends.append((time.time(), share))
    with open(options.out, "w") as file:
        json.dump(ends, file)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
