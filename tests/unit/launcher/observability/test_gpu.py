"""GPUs are among the metrics where NVIDIA's library is there, and nothing is missing without."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from elasticzero.launcher.observability.metrics import Metrics


class NVMLError(Exception):
    pass


class Library(ModuleType):
    """What is used of nvidia-ml-py, with two GPUs; the second, in parts, has no utilization."""

    NVMLError = NVMLError

    def nvmlInit(self) -> None:
        return None

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=100 + handle, total=1000)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        if handle == 1:
            raise NVMLError("not supported")
        return SimpleNamespace(gpu=75)


class NoDriver(Library):
    def nvmlInit(self) -> None:
        raise NVMLError("driver not loaded")


def gpu_samples() -> dict[tuple[str, str], float]:
    return {
        (one.name, one.labels["gpu"]): one.value
        for family in Metrics().registry.collect()
        for one in family.samples
        if one.name.startswith("elasticzero_gpu_")
    }


def test_gpus_are_read_at_each_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Library("pynvml"))
    samples = gpu_samples()
    assert samples["elasticzero_gpu_memory_used_bytes", "1"] == 101
    assert samples["elasticzero_gpu_memory_total_bytes", "0"] == 1000
    assert samples["elasticzero_gpu_utilization_ratio", "0"] == 0.75
    assert ("elasticzero_gpu_utilization_ratio", "1") not in samples


@pytest.mark.parametrize("library", [None, NoDriver("pynvml")])
def test_nothing_is_served_without_library_or_driver(
    monkeypatch: pytest.MonkeyPatch, library: ModuleType | None
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert gpu_samples() == {}
