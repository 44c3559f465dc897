"""Small messages of enrolment, renewal and rotation: a JSON object whose keys and types are fixed."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from fedlens.base.errors import IdentityError
from fedlens.base.parse_text import parse_json

LARGEST_MESSAGE = 16_384
"""The largest message that is read, in bytes."""


def write_message(values: Mapping[str, str | int | bytes]) -> bytes:
    """The JSON object, with bytes in base64.

    >>> write_message({"port": 443, "root": b"DER"})
    b'{"port": 443, "root": "REVS"}'
    """
    plain = {k: base64.b64encode(v).decode() if isinstance(v, bytes) else v for k, v in values.items()}
    return json.dumps(plain, sort_keys=True).encode()


def read_message(
    content: bytes, kinds: Mapping[str, type], thing: str, largest: int = LARGEST_MESSAGE
) -> dict[str, Any]:
    """The values of a message from a stranger, which has exactly the keys of `kinds` and at most `largest` bytes.

    Raises `IdentityError` that names `thing`; no value is in its text, since values are secrets.

    >>> read_message(b'{"port": 443, "root": "REVS"}', {"port": int, "root": bytes}, "the invitation")
    {'port': 443, 'root': b'DER'}
    >>> read_message(b'{"port": "443"}', {"port": int}, "the invitation")
    Traceback (most recent call last):
    fedlens.base.errors.IdentityError: the invitation is damaged: it needs exactly: port (int).
    """
    try:
        if len(content) > largest:
            raise ValueError(f"it is larger than {largest:,} bytes")
        values = parse_json(content)
        plain = {key: str if kind is bytes else kind for key, kind in kinds.items()}
        if not isinstance(values, dict) or {key: type(values[key]) for key in values} != plain:
            named = ", ".join(f"{key} ({kind.__name__})" for key, kind in kinds.items())
            raise ValueError(f"it needs exactly: {named}")
        binary = {k: base64.b64decode(values[k], validate=True) for k in kinds if kinds[k] is bytes}
    except ValueError as error:
        reason = "it is not JSON" if isinstance(error, json.JSONDecodeError) else error
        raise IdentityError(f"{thing} is damaged: {reason}") from None
    return values | binary
