"""With this folder in PYTHONPATH, several ranks of NCCL may share one GPU.

NCCL before 2.30 refuses that of ranks of one host, and tells hosts apart by NCCL_HOSTID: so each
process becomes a host of its own, and its collectives go over sockets. From 2.30 on there is
NCCL_MULTI_RANK_GPU_ENABLE=1 for it.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

MODULE = "torch.distributed.distributed_c10d"


class HostPerProcess:
    """Has every process name its host before it sets up its first group."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == MODULE else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_wrap(module: Any) -> None:
            load(module)
            connect = module.init_process_group

            def name_and_connect(*args: Any, **options: Any) -> None:
                os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"
                connect(*args, **options)

            module.init_process_group = name_and_connect

        spec.loader.exec_module = load_and_wrap  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, HostPerProcess)
