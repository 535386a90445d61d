"""Converts nested values to JSON and named tensors, and back.

Values that are not tensors become JSON, in which `{"$tensor": name}` stands for a tensor. A
tensor's name is its path, the keys joined by "/". torch is imported only when a tensor or an array
is met.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from elasticzero.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

MAX_DEPTH = 64
"""Maximum depth of dicts, lists and tuples within each other; each takes up to three levels of
JSON."""
_MAX_INT_BITS = 8192
"""Maximum size of an integer; Python reads no decimal number of more than 4,300 digits."""
_SHOWN_CHARACTERS = 100


def flatten(
    value: Any,
    path: str,
    tensors: dict[str, Tensor],
    wrappers: dict[str, Tensor] | None = None,
) -> Any:
    """Returns `value` as JSON, and adds its tensors to `tensors` by their path, without a copy.

    A tensor that has no memory and wraps others, as quantized ones do, becomes a dict of these.

    Args:
        value: Dicts, lists and tuples, nested in any way.
        path: The path of `value` itself; "" for the root.
        tensors: Takes the tensors.
        wrappers: Takes the tensors that wrap others, by path; None: such tensors are refused.

    Raises:
        UserError: A value cannot be stored, or a tensor's name is taken; the error has the path.
    """
    return _encode(value, path, _Sink(tensors, wrappers), 0)


class _Sink(NamedTuple):
    """Takes the tensors of a value by their paths."""

    tensors: dict[str, Tensor]
    wrappers: dict[str, Tensor] | None


def _encode(value: Any, path: str, sink: _Sink, depth: int) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return _checked_int(value, path)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if not isinstance(value, (list, tuple, Mapping)):
        return _leaf(value, path, sink, depth)
    if depth == MAX_DEPTH:
        raise UserError(
            f"{path[:_SHOWN_CHARACTERS]!r}... is nested too deep, or contains itself: a checkpoint "
            f"holds up to {MAX_DEPTH} dicts, lists and tuples within each other"
        )
    below = depth + 1
    if isinstance(value, (list, tuple)):
        items = [_encode(v, _joined(path, i), sink, below) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    pairs = [(k, _encode(v, _joined(path, k), sink, below)) for k, v in value.items()]
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
        return dict(pairs)
    keys = [_encode(key, _joined(path, key), sink, below) for key, _ in pairs]
    return {"$map": [[key, item] for key, (_, item) in zip(keys, pairs, strict=True)]}


def _leaf(value: Any, path: str, sink: _Sink, depth: int) -> Any:
    import numpy as np
    from torch import Tensor

    if isinstance(value, Tensor):
        if not has_no_memory(value):
            return {"$tensor": _named(path, value, sink.tensors)}
        inner = _inner_tensors(value, path, refuse=sink.wrappers is None)
        assert sink.wrappers is not None
        sink.wrappers[path] = value
        return {k: _encode(v, _joined(path, k), sink, depth + 1) for k, v in inner.items()}
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return _encode(value.item(), path, sink, depth)
    if isinstance(value, np.ndarray):
        return {"$array": _named(path, _from_array(value, path), sink.tensors)}
    raise UserError(
        f"{path!r} is a {type(value).__name__}, which a checkpoint cannot hold: only numbers, "
        "strings, tensors, arrays, lists, tuples and dicts can be kept"
    )


def has_no_memory(tensor: Tensor) -> bool:
    """Returns whether a tensor of a subclass has no elements of its own, so that they cannot be
    copied: those of the tensors that it wraps stand for them."""
    import torch

    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter or torch.nn.parameter.is_lazy(tensor):
        return False
    if tensor.device.type == "meta" or tensor.layout is not torch.strided:
        return False
    if hasattr(tensor, "device_mesh"):  # a DTensor, whose own rows are in another
        return has_no_memory(tensor.to_local())  # type: ignore[attr-defined]
    if has_inner_tensors(tensor):
        return True
    try:
        storage = tensor.untyped_storage()
        is_empty = storage.device.type == "meta" or storage.data_ptr() == 0
        return tensor.numel() > 0 and is_empty
    except RuntimeError:  # the storage of a wrapper is not valid
        return True


def has_inner_tensors(tensor: Tensor) -> bool:
    """Returns whether a tensor follows torch's protocol for those that wrap others."""
    import torch

    kind = type(tensor)
    return (
        kind is not torch.Tensor
        and hasattr(kind, "__tensor_flatten__")
        and hasattr(kind, "__tensor_unflatten__")
    )


def _inner_tensors(tensor: Tensor, path: str, *, refuse: bool) -> dict[str, Any]:
    """Returns the tensors that a tensor wraps, by their attributes.

    Args:
        tensor: The tensor.
        path: Its path, for messages.
        refuse: Whether every wrapper is refused.

    Raises:
        UserError: They are not known, or are refused.
    """
    kind = type(tensor).__name__
    if refuse or not has_inner_tensors(tensor) or hasattr(tensor, "device_mesh"):
        why = "which is refused here" if refuse else "and it is not known which ones"
        raise UserError(
            f"{path!r} is a {kind}, which has no memory of its own and wraps other tensors, {why}: "
            "dequantize it, or save the tensors in it (checkpoint.save takes those of classes with "
            "__tensor_flatten__ and __tensor_unflatten__)"
        )
    names: list[str] = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    inner = {name: getattr(tensor, name) for name in names}
    for name, value in inner.items():
        again = getattr(tensor, name)
        if again is not value and again.data_ptr() != value.data_ptr():
            raise UserError(
                f"{path!r} is a {kind} that gives a copy of its {name!r}, which could not be filled"
            )
    return inner


def unflatten(json: Any, tensor_of: Callable[[str], Any]) -> Any:
    """Returns the value that `flatten` was given; `tensor_of` returns each tensor by name.

    Raises `ValueError`, `TypeError` or `KeyError` for JSON that `flatten` does not write.
    """
    if isinstance(json, list):
        return [unflatten(item, tensor_of) for item in json]
    if not isinstance(json, dict):
        return json
    if not any(key.startswith("$") for key in json):
        return {key: unflatten(item, tensor_of) for key, item in json.items()}
    match json:
        case {"$tensor": str(name), **others} if not others:
            return tensor_of(name)
        case {"$array": str(name), **others} if not others:
            return tensor_of(name).numpy()
        case {"$float": str(text), **others} if not others:
            return float(text)
        case {"$tuple": list(items), **others} if not others:
            return tuple(unflatten(item, tensor_of) for item in items)
    return {key: unflatten(item, tensor_of) for key, item in encoded_items(json).items()}


def encoded_items(json: Any) -> dict[Any, Any]:
    """Returns the items of an encoded dict: by its own keys, each value still encoded."""
    if not isinstance(json, dict):
        raise TypeError(f"a dict was expected, not {json!r:.80}")
    if not any(key.startswith("$") for key in json):
        return dict(json)
    if set(json) != {"$map"} or not isinstance(json["$map"], list):
        raise ValueError(f"no value is encoded as {json!r:.80}")
    items = {_key(unflatten(key, _no_tensor)): item for key, item in json["$map"]}
    if len(items) != len(json["$map"]):
        raise ValueError(f"a key stands twice in {json!r:.80}")
    return items


def tensor_names(json: Any) -> list[str]:
    """Returns the names of the tensors in an encoded value."""
    if isinstance(json, list):
        return [name for item in json for name in tensor_names(item)]
    if not isinstance(json, dict):
        return []
    if len(json) == 1 and ("$tensor" in json or "$array" in json):
        return [cast(str, next(iter(json.values())))]
    return [name for item in json.values() for name in tensor_names(item)]


def renamed(json: Any, names: Mapping[str, str]) -> Any:
    """Returns an encoded value in which some tensors have other names.

    Args:
        json: The encoded value.
        names: The new name of a tensor by its old one; all others keep theirs.
    """
    if isinstance(json, list):
        return [renamed(item, names) for item in json]
    if not isinstance(json, dict):
        return json
    if len(json) == 1 and ("$tensor" in json or "$array" in json):
        ((kind, name),) = json.items()
        return {kind: names.get(name, name)}
    return {key: renamed(item, names) for key, item in json.items()}


def count_values(json: Any) -> int:
    """Returns the number of numbers, texts and the like in an encoded value, without tensors."""
    if isinstance(json, list):
        return sum(map(count_values, json))
    if not isinstance(json, dict):
        return 1
    if len(json) == 1 and ("$tensor" in json or "$array" in json):
        return 0
    if set(json) == {"$map"}:
        return sum(count_values(item) for _, item in json["$map"])
    return sum(map(count_values, json.values()))


def _checked_int(value: int, path: str) -> int:
    if value.bit_length() > _MAX_INT_BITS:
        raise UserError(
            f"{path!r} is an integer of {value.bit_length()} bits: a checkpoint holds those of up "
            f"to {_MAX_INT_BITS}"
        )
    return value


def _joined(path: str, key: object) -> str:
    if isinstance(key, int):
        _checked_int(key, path)
    return f"{path}/{key}" if path else str(key)


def _named(path: str, tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    if path in tensors:
        raise UserError(
            f"two tensors come to the name {path!r} when their keys are joined by '/': rename one"
        )
    tensors[path] = tensor
    return path


def _from_array(array: np.ndarray[Any, Any], path: str) -> Tensor:
    import numpy as np
    import torch

    try:
        usable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
        return torch.from_numpy(array if usable else np.array(array, order="C"))
    except (TypeError, ValueError) as error:
        raise UserError(f"{path!r} is an array that a checkpoint cannot hold: {error}") from None


def _no_tensor(name: str) -> Any:
    raise ValueError(f"a key of a dict is the tensor {name!r}")


def _key(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
