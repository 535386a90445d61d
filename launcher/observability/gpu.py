"""Reads memory and utilization of this node's GPUs, where nvidia-ml-py and a driver are installed.

The GPUs are read at each scrape, in the thread that answers it. This file stands alone because it
is the one door to NVML, a package that most nodes do not have.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from prometheus_client.core import GaugeMetricFamily

from elasticzero.launcher.observability.descriptions import MetricDescription

_GPU = ("gpu",)
USED = MetricDescription(
    "elasticzero_gpu_memory_used_bytes", "gauge", _GPU, "Memory of a GPU in use, by any process."
)
TOTAL = MetricDescription("elasticzero_gpu_memory_total_bytes", "gauge", _GPU, "Memory of a GPU.")
UTILIZATION = MetricDescription(
    "elasticzero_gpu_utilization_ratio",
    "gauge",
    _GPU,
    "Share of the last moment in which a kernel ran on a GPU, as NVML measures it.",
)
GPU_METRICS = (USED, TOTAL, UTILIZATION)


class GpuCollector:
    """Gives a registry the metrics of all GPUs of this node; none where they cannot be read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tried = False
        self._library: Any = None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Reads the GPUs."""
        library = self._nvml()
        if library is None:
            return
        families = {
            metric: GaugeMetricFamily(metric.name, metric.meaning, labels=metric.labels)
            for metric in GPU_METRICS
        }
        for index in range(library.nvmlDeviceGetCount()):
            with suppress(library.NVMLError):
                handle = library.nvmlDeviceGetHandleByIndex(index)
                readings: dict[MetricDescription, Callable[[Any], float]] = {
                    USED: lambda device: library.nvmlDeviceGetMemoryInfo(device).used,
                    TOTAL: lambda device: library.nvmlDeviceGetMemoryInfo(device).total,
                    UTILIZATION: lambda d: library.nvmlDeviceGetUtilizationRates(d).gpu / 100,
                }
                for metric, read in readings.items():
                    with suppress(library.NVMLError):  # a GPU in parts (MIG) has no utilization
                        families[metric].add_metric([str(index)], float(read(handle)))
        yield from families.values()

    def _nvml(self) -> Any:
        """Returns NVIDIA's library, initialized; None: it or the driver is missing."""
        with self._lock:
            if not self._tried:
                self._tried = True
                with suppress(ImportError):
                    library = importlib.import_module("pynvml")
                    with suppress(library.NVMLError):
                        library.nvmlInit()
                        self._library = library
            return self._library
