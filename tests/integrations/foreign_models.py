"""Builds small models of transformers, and one with weights in 8 bits, by their names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

TOKENS = torch.arange(8)


def build(name: str) -> Any:
    """Returns the model, the same each time, in double precision."""
    torch.manual_seed(0)
    return {"gpt2": _gpt2, "llama": _llama, "mixtral": _mixtral, "float8": Float8}[name]().double()


def of_shapes(shapes: dict[str, list[int]]) -> nn.Module:
    """Returns a model whose parameters have these names and shapes; it gives their norm."""
    model: nn.Module = _Norm()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        inside = model
        for part in path:
            if not hasattr(inside, part):
                inside.add_module(part, nn.Module())
            inside = inside.get_submodule(part)
        zeros = torch.zeros(shape, dtype=torch.float64)
        inside.register_parameter(last, nn.Parameter(zeros))
    return model


class _Norm(nn.Module):
    def forward(self, _: Tensor) -> Tensor:
        return norm_of_all(self.parameters())


def norm_of_all(parameters: Iterable[Tensor]) -> Tensor:
    return torch.stack([parameter.square().sum() for parameter in parameters]).sum().sqrt()


def load_pretrained(model: Any, folder: object) -> Any:
    """Returns a model of the same kind with weights from files, in double precision."""
    # The faster ways of computing experts have no double precision.
    return type(model).from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 20, "n_positions": 16}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(config)


def _sizes() -> dict[str, Any]:
    return {
        "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 20,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16,
    }  # fmt: skip


def _llama() -> Any:
    """One tensor is the embeddings and the head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_sizes(), tie_word_embeddings=True))


def _mixtral() -> Any:
    """A mixture of four experts, of which each token takes two."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            **_sizes(), num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"
        )
    )


class Float8(nn.Module):
    """Has a frozen linear layer in 8 bits with a scale, and trains what is around it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        weight = torch.randn(16, 16)
        scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
        narrow = (weight / scale).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(narrow, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
        self.head = nn.Linear(16, 20)

    def double(self) -> Float8:
        """Leaves the weights in 8 bits, and their scale, as they are."""
        for part in (self.embed, self.head):
            part.double()
        return self

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        from types import SimpleNamespace

        wide = self.weight.double() * self.weight_scale_inv.double()
        logits = self.head(nn.functional.linear(self.embed(input_ids), wide))
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
        return SimpleNamespace(loss=loss)
