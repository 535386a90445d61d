"""Nested values as JSON and named tensors, and back.

What is no tensor becomes JSON, in which `{"$tensor": name}` stands for a tensor. A tensor's name is
the path to it, its keys joined by "/".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from elasticzero.errors import UserError


def encode_value(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON; the tensors inside go into `tensors` under their path, not copied.

    `path`: of `value` itself; "" where it is the root. Raises `UserError` naming the path of what
    cannot be stored, and of a tensor whose name is taken.
    """
    if isinstance(value, Tensor):
        return {"$tensor": _named(path, value, tensors)}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, np.ndarray):
        return {"$array": _named(path, _from_array(value, path), tensors)}
    if isinstance(value, (list, tuple)):
        items = [encode_value(v, _joined(path, i), tensors) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        pairs = [(k, encode_value(v, _joined(path, k), tensors)) for k, v in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        keys = [encode_value(key, _joined(path, key), tensors) for key, _ in pairs]
        return {"$map": [[key, item] for key, (_, item) in zip(keys, pairs, strict=True)]}
    raise UserError(
        f"{path!r} is a {type(value).__name__}, which a checkpoint cannot hold: only numbers, "
        "strings, tensors, arrays, lists, tuples and dicts can be kept"
    )


def decode_value(json: Any, tensor_of: Callable[[str], Tensor]) -> Any:
    """The value that `encode_value` was given; `tensor_of` gives each tensor by name."""
    if isinstance(json, list):
        return [decode_value(item, tensor_of) for item in json]
    if not isinstance(json, dict):
        return json
    match json:
        case {"$tensor": name}:
            return tensor_of(name)
        case {"$array": name}:
            return tensor_of(name).numpy()
        case {"$float": text}:
            return float(text)
        case {"$tuple": items}:
            return tuple(decode_value(item, tensor_of) for item in items)
    return {key: decode_value(item, tensor_of) for key, item in encoded_items(json).items()}


def encoded_items(json: Any) -> dict[Any, Any]:
    """The items of an encoded dict: by its own keys, each value still encoded."""
    if set(json) == {"$map"}:
        return {_key(decode_value(key, _no_tensor)): item for key, item in json["$map"]}
    return dict(json)


def tensor_names(json: Any) -> list[str]:
    """The tensors that an encoded value names."""
    if isinstance(json, list):
        return [name for item in json for name in tensor_names(item)]
    if not isinstance(json, dict):
        return []
    if len(json) == 1 and ("$tensor" in json or "$array" in json):
        return [cast(str, next(iter(json.values())))]
    return [name for item in json.values() for name in tensor_names(item)]


def _joined(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


def _named(path: str, tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    if path in tensors:
        raise UserError(
            f"two tensors come to the name {path!r} when their keys are joined by '/': rename one"
        )
    tensors[path] = tensor
    return path


def _from_array(array: np.ndarray[Any, Any], path: str) -> Tensor:
    try:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError) as error:
        raise UserError(f"{path!r} is an array that a checkpoint cannot hold: {error}") from None


def _no_tensor(name: str) -> Tensor:
    raise ValueError(f"a key of a dict is the tensor {name!r}")


def _key(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
