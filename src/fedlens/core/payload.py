"""A payload taken apart into named tensors and JSON, and put together again."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedlens.core import tensorfile
from fedlens.core.errors import RunFailed

Payload = Mapping[str, Any]
"""Nested string-keyed mappings of tensors, str, int, float, bool, None, bytes, and lists or tuples."""

_Seen = dict[Any, tuple[str, Tensor]]


def encode(payload: Payload) -> tuple[Any, dict[str, Tensor]]:
    """What of `payload` goes into JSON, and its tensors by their place in it (a JSON pointer).

    In the JSON an object has one key that says what it stands for, so nothing in a payload can be mistaken
    for it. A tensor that stands in two places is named once, and `decode` gives both places the same tensor.
    Raises `RunFailed` that names the place of what does not fit.

    >>> structure, tensors = encode({"state": {"w": torch.ones(2), "loss": float("nan")}})
    >>> structure
    {'map': {'state': {'map': {'w': {'tensor': '/state/w'}, 'loss': {'float': 'nan'}}}}}
    >>> decode(structure, tensors)
    {'state': {'w': tensor([1., 1.]), 'loss': nan}}
    """
    tensors: dict[str, Tensor] = {}
    return _encode(payload, "", tensors, {}), tensors


def _encode(value: Any, place: str, tensors: dict[str, Tensor], seen: _Seen) -> Any:
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, Tensor):
        return _encode_tensor(value, place, tensors, seen)
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, f"{place}/{index}", tensors, seen) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"map": {key: _encode(item, _below(place, key), tensors, seen) for key, item in value.items()}}
    keys = " with keys that are not strings" if isinstance(value, Mapping) else ""
    raise _unfit(place, f"a {type(value).__name__}{keys}")


def _below(place: str, key: str) -> str:
    return f"{place}/{key.replace('~', '~0').replace('/', '~1')}"


def _utf8(place: str, number: int) -> str:
    """The place as a tensor's name; a file holds UTF-8 alone, and a key may have half of a surrogate pair in it."""
    try:
        place.encode()
    except UnicodeEncodeError:
        return f"{place.encode(errors='backslashreplace').decode()}#{number}"
    return place


def _unfit(place: str, kind: str) -> RunFailed:
    hint = "use tensors, strings, numbers, booleans, None, and lists or string-keyed mappings of them"
    what = f"the state contains {kind}, which a checkpoint cannot store"
    return RunFailed(what, where=place, hint=hint)


def _encode_tensor(value: Tensor, place: str, tensors: dict[str, Tensor], seen: _Seen) -> Any:
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise _unfit(
            place, f"a {value.dtype} tensor ({value.layout}, on {value.device})".replace("torch.", "")
        )
    value = value.detach() if value.requires_grad else value
    lazy = (value.is_conj(), value.is_neg())
    view = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride(), *lazy)
    # The tensor is kept with its name: an address says nothing once its owner is gone.
    name, _ = seen.setdefault(view, (_utf8(place, len(seen)), value))
    if value.dtype in tensorfile.DTYPES:
        tensors.setdefault(name, value)
        return {"tensor": name}
    if name not in tensors:
        tensors[name] = value.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return {"tensor": name, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}


def decode(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The payload that `encode` was given, with plain dictionaries for its mappings."""
    if isinstance(node, list):
        return [decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    if "map" in node:
        return {key: decode(item, tensors) for key, item in node["map"].items()}
    if "tensor" in node:
        tensor = tensors[node["tensor"]]
        if "dtype" in node:
            return tensor.view(getattr(torch, node["dtype"])).reshape(node["shape"])
        return tensor
    if "tuple" in node:
        return tuple(decode(item, tensors) for item in node["tuple"])
    return base64.b64decode(node["bytes"]) if "bytes" in node else float(node["float"])
