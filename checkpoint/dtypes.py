"""Torch's dtypes by their safetensors names, and tensors as bytes."""

from __future__ import annotations

import torch

from elasticzero.checkpoint.manifest import TensorSpec
from elasticzero.errors import UserError

_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
_TORCH_DTYPES: dict[str, torch.dtype] = {
    spelling: getattr(torch, name) for spelling, name in _TORCH_NAMES.items()
}
_SPELLINGS = {dtype: spelling for spelling, dtype in _TORCH_DTYPES.items()}


def torch_dtype(spelling: str) -> torch.dtype:
    """The dtype that safetensors spells so."""
    return _TORCH_DTYPES[spelling]


def spelling_of(dtype: torch.dtype) -> str:
    """Safetensors' spelling of a dtype; `UserError` where it has none."""
    if dtype not in _SPELLINGS:
        raise UserError(f"a checkpoint cannot hold tensors of {dtype}: safetensors has none")
    return _SPELLINGS[dtype]


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """A tensor's description (a DTensor's: of the whole); `UserError` for an unknown dtype."""
    return TensorSpec(spelling_of(tensor.dtype), tuple(tensor.shape))


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, not copied."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return flat.numpy().data
