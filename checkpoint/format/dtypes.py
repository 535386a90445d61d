"""Maps torch's dtypes to their safetensors names, and tensors to bytes."""

from __future__ import annotations

import torch

from elasticzero.checkpoint.format.layout import TensorSpec, spec_of
from elasticzero.errors import UserError

_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
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
    spelling: getattr(torch, name)
    for spelling, name in _TORCH_NAMES.items()
    if hasattr(torch, name)  # the smallest ones are new
}
_SPELLINGS = {dtype: spelling for spelling, dtype in _TORCH_DTYPES.items()}


def torch_dtype(spelling: str) -> torch.dtype:
    """Returns the dtype of this safetensors name; raises `UserError` if torch is too old for it."""
    if spelling not in _TORCH_DTYPES:
        raise UserError(
            f"torch {torch.__version__} has no {_TORCH_NAMES.get(spelling, spelling)}, the dtype "
            f"{spelling} of safetensors: use a newer torch"
        )
    return _TORCH_DTYPES[spelling]


def spelling_of(dtype: torch.dtype) -> str:
    """Returns the safetensors name of a dtype; raises `UserError` if it has none."""
    if dtype not in _SPELLINGS:
        raise UserError(f"a checkpoint cannot hold tensors of {dtype}: safetensors has none")
    return _SPELLINGS[dtype]


def tensor_spec(tensor: torch.Tensor, name: str = "a tensor") -> TensorSpec:
    """Returns the description of a tensor, or of the whole of a DTensor.

    Raises `UserError`, with `name` in front, for a dtype or a shape that no checkpoint can hold.
    """
    try:
        return spec_of(spelling_of(tensor.dtype), tuple(tensor.shape))
    except (ValueError, UserError) as error:
        raise UserError(f"{name} cannot be kept in a checkpoint: {error}") from None


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Raises `UserError` for a tensor whose elements cannot be copied: it has none yet, or it has
    no strides."""
    if torch.nn.parameter.is_lazy(tensor):
        raise UserError(
            f"{name} is a lazy parameter that is not initialized: run one forward pass first"
        )
    if tensor.device.type == "meta":
        raise UserError(
            f"{name} is on the meta device, where a tensor has no elements: materialize it first, "
            'for example with model.to_empty(device="cpu")'
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UserError(
            f"{name} is a tensor of layout {tensor.layout}"
            f"{', quantized' if tensor.is_quantized else ''}: a checkpoint holds plain tensors only"
        )


def check_fillable(name: str, tensor: torch.Tensor) -> None:
    """Raises `UserError` for a tensor of which several elements may share memory."""
    room = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < room:
            raise UserError(
                f"{name} has several elements in the same memory (shape {list(tensor.shape)}, "
                f"strides {list(tensor.stride())}), as an expanded tensor has: it cannot be "
                "filled; give a .clone() of it"
            )
        room += (size - 1) * stride if size > 1 else 0


def is_as_stored(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's memory is in row-major order, without lazy conjugation or
    negation."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def overflowed(before: torch.Tensor, after: torch.Tensor) -> float | None:
    """Returns a finite value that a conversion has made infinite; None: there is none."""
    if torch.finfo(after.dtype).max >= torch.finfo(before.dtype).max:
        return None
    lost = torch.isinf(after) & torch.isfinite(before)
    return float(before[lost][0]) if bool(lost.any()) else None


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor in host memory for which `is_as_stored` holds, without a
    copy."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return flat.numpy().data
