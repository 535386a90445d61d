"""The choice of `--strategy auto`: sizes of a model, free memory, and the sentence."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from elasticzero.memory_estimate import StateSize
from elasticzero.state.model import NamedModel
from elasticzero.training.strategy_choice import (
    choice_text,
    free_ram_bytes,
    model_size,
    state_size,
)
from tests.support.packing import LargePacking


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        self.layers[2] = nn.Linear(4, 5, bias=False)
        self.base = nn.Parameter(torch.zeros(7), requires_grad=False)


def test_layers_are_the_entries_of_lists() -> None:
    size = model_size(NamedModel(Model()))
    assert (size.elements, size.element_bytes) == (40 + 16 + 16 + 20, 4)
    assert (size.layer, size.outer, size.largest) == (20, 40, 40)
    assert size.frozen_bytes == 28


def test_what_is_packed_is_counted_by_its_bytes() -> None:
    """LargePacking packs the embedding and two layers, with a scale for four elements."""
    named = NamedModel(Model())
    assert state_size(named, torch.optim.AdamW) == StateSize(numbers=2)
    found = state_size(named, LargePacking)
    elements = 40 + 16 + 16 + 20 + 7
    packed = elements - 7
    assert found == StateSize(packed_bytes=(packed * 2 + 7 * 4) / elements)
    assert found.strategies == ["ddp", "zero1", "zero2"]


def test_a_container_limits_free_memory(tmp_path: Path) -> None:
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal:  100 kB\nMemAvailable:   64 kB\n")
    assert free_ram_bytes(memory, tmp_path) == 65536
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert free_ram_bytes(memory, tmp_path) == 65536
    (tmp_path / "memory.max").write_text("3000\n")
    assert free_ram_bytes(memory, tmp_path) == 2000
    (tmp_path / "memory.max").write_text("900\n")
    assert free_ram_bytes(memory, tmp_path) == 0


def test_the_sentence_names_what_is_too_large() -> None:
    needs = {"ddp": 4 << 20, "zero1": 2 << 20, "zero2": 1 << 20, "zero3": 1 << 10}
    text = choice_text("zero2", needs, 1 << 20, cuda=True)
    assert text == (
        "--strategy auto takes zero2, which needs 1.0 MiB a rank for training state; the rank with "
        "the least memory has 1.0 MiB (ddp 4.0 MiB, zero1 2.0 MiB would not fit)"
    )
    assert choice_text("ddp", needs, 1 << 30, cuda=False).endswith("the least memory has 1.0 GiB")
    assert "takes zero3" in choice_text(None, needs, 1, cuda=True)
    assert "no strategy fits" in choice_text(None, needs, 1, cuda=True)
