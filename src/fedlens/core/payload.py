"""Encodes a payload as named tensors and JSON, and decodes it."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedlens.base.errors import DecodingError, RunFailed, one_line
from fedlens.base.parse_text import DEEPEST, parse_json
from fedlens.core import tensorfile
from fedlens.core.types import Payload
from fedlens.files.model_digest import contiguous

_Seen = dict[Any, tuple[str, Tensor]]
_DEEPEST = 90  # levels of a payload; each takes up to two levels of JSON, and readers accept 200
_LONGEST = 14_000  # bits of an integer: readers accept 4300 digits
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
# The dtypes that safetensors files do not have, by name; their tensors are written as bytes.
_AS_BYTES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.complex128, torch.complex32, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
        torch.float4_e2m1fn_x2,
    )
}  # fmt: skip
_STRUCTURE = "state"  # the name of the structure in a file's metadata


def pack(payload: Payload) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file that holds the whole payload; see `tensorfile.write`.

    Raises `RunFailed` as `encode` does.
    """
    structure, tensors = encode(payload)
    return tensors, {_STRUCTURE: json.dumps(structure)}


def unpack(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], deepest: int = DEEPEST
) -> dict[str, Any]:
    """The payload of `pack`, from what `tensorfile.parse` or `tensorfile.read` returns.

    `deepest` limits the levels of its JSON; a level of the payload takes up to two. Raises `DecodingError` if this is
    not an encoded payload.

    >>> unpack(*pack({"w": torch.ones(2), "round": 3}))
    {'w': tensor([1., 1.]), 'round': 3}
    """
    try:
        structure = parse_json(metadata[_STRUCTURE], deepest=deepest)
    except KeyError:
        raise _not_ours("there is no structure in its metadata", "") from None
    except ValueError as error:
        raise _not_ours(f"its structure is not JSON ({one_line(str(error))})", "") from None
    return decode(structure, tensors)


def encode(payload: Payload) -> tuple[Any, dict[str, Tensor]]:
    """The JSON structure of a payload, and its tensors by their place in it (a JSON pointer).

    Each JSON object has one key that names its kind, so a mapping in the payload cannot be mistaken for one. A tensor
    that occurs twice is stored once, and `decode` returns the same tensor in both places. Raises `RunFailed` with the
    place of a value that cannot be stored.

    >>> structure, tensors = encode({"state": {"w": torch.ones(2), "loss": float("nan")}})
    >>> structure
    {'map': {'state': {'map': {'w': {'tensor': '/state/w'}, 'loss': {'float': 'nan'}}}}}
    >>> decode(structure, tensors)
    {'state': {'w': tensor([1., 1.]), 'loss': nan}}
    """
    tensors: dict[str, Tensor] = {}
    return _encode(payload, "", tensors, {}), tensors


def _encode(value: Any, place: str, tensors: dict[str, Tensor], seen: _Seen) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        if value.bit_length() > _LONGEST:
            raise _unfit(place, "an integer of more than 4200 digits")
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, Tensor):
        return _encode_tensor(value, place, tensors, seen)
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if place.count("/") > _DEEPEST:
        raise _unfit(place, f"lists and mappings of more than {_DEEPEST} levels")
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
    """The place as a tensor's name. Files hold UTF-8 only, and a key may have half of a surrogate pair."""
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
    kind = str(value.dtype).removeprefix("torch.")
    known = value.dtype in tensorfile.DTYPES or kind in _AS_BYTES
    if value.layout != torch.strided or value.is_meta or not known:
        raise _unfit(
            place, f"a {value.dtype} tensor ({value.layout}, on {value.device})".replace("torch.", "")
        )
    value = value.detach() if value.requires_grad else value
    lazy = (value.is_conj(), value.is_neg())
    view = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride(), *lazy)
    # The tensor is kept with its name: its address may be reused once it is freed.
    name, _ = seen.setdefault(view, (_utf8(place, len(seen)), value))
    if value.dtype in tensorfile.DTYPES:
        tensors.setdefault(name, value)
        return {"tensor": name}
    if name not in tensors:
        tensors[name] = contiguous(value).reshape(-1).view(torch.uint8)
    return {"tensor": name, "dtype": kind, "shape": list(value.shape)}


def decode(node: Any, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The payload of `encode`, with dictionaries for its mappings.

    Raises `DecodingError` with the place if `node` is not what `encode` returns, or if a tensor is missing.

    >>> decode({"map": {"w": {"tensor": "/w"}}}, {})
    Traceback (most recent call last):
    fedlens.base.errors.DecodingError: not a payload: there is no tensor '/w' (/w); copy or send it again.
    """
    payload = _decode(node, tensors, "")
    if not isinstance(payload, dict):
        raise _not_ours(f"it is a {type(payload).__name__}, not a mapping", "")
    return payload


def _decode(node: Any, tensors: Mapping[str, Tensor], place: str) -> Any:
    if not isinstance(node, (list, dict)):
        return node
    if place.count("/") > DEEPEST:
        raise _not_ours(f"it is nested more than {DEEPEST} levels deep", place)
    if isinstance(node, list):
        return [_decode(item, tensors, f"{place}/{index}") for index, item in enumerate(node)]
    match node:
        case {"map": dict(items)} if len(node) == 1:
            return {key: _decode(item, tensors, _below(place, key)) for key, item in items.items()}
        case {"tuple": list(items)} if len(node) == 1:
            return tuple(_decode(items, tensors, place))
        case {"float": str(text)} if len(node) == 1 and text in _FLOATS:
            return _FLOATS[text]
        case {"bytes": str(text)} if len(node) == 1:
            return _decode_bytes(text, place)
        case {"tensor": str(name)} if len(node) == 1:
            return _named(name, tensors, place)
        case {"tensor": str(name), "dtype": str(kind), "shape": list(shape)} if len(node) == 3:
            return _decode_tensor(_named(name, tensors, place), kind, shape, place)
    raise _not_ours(f"an object has the keys {one_line(', '.join(map(repr, node)))}", place)


def _decode_bytes(text: str, place: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise _not_ours("its bytes are not base64", place) from None


def _named(name: str, tensors: Mapping[str, Tensor], place: str) -> Tensor:
    if name not in tensors:
        raise _not_ours(f"there is no tensor '{one_line(name)}'", place)
    return tensors[name]


def _decode_tensor(raw: Tensor, kind: str, shape: list[Any], place: str) -> Tensor:
    dtype = _AS_BYTES.get(kind)
    if dtype is None:
        raise _not_ours(f"a tensor has the unknown dtype '{one_line(kind)}'", place)
    if raw.dtype != torch.uint8 or raw.ndim != 1 or len(raw) != tensorfile.nbytes_of(shape, dtype):
        shown = one_line(json.dumps(shape))
        raise _not_ours(f"a tensor of {raw.nbytes} bytes has not those of {kind} {shown}", place)
    return raw.view(dtype).reshape(shape)


def _not_ours(what: str, place: str) -> DecodingError:
    return DecodingError(f"not a payload: {what}", where=one_line(place) or "/", hint="copy or send it again")
