"""Values of dataset rows in msgpack, with their types.

What msgpack has no type for (dates, decimals, tuples, numpy arrays, integers of more than 64 bits)
travels as an extension: a number for the type, and what to make it of.
"""

from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import numpy as np

from minirl.config import ConfigError

PLAIN = (type(None), bool, float, str, bytes)
INTEGERS = range(-(2**63), 2**64)
"""That msgpack can hold."""


def _array_parts(array: np.ndarray) -> list[Any]:
    return [array.dtype.str, list(array.shape), array.tobytes()]


def _make_array(parts: list[Any]) -> np.ndarray:
    dtype, shape, content = parts
    return np.frombuffer(content, dtype).reshape(shape).copy()


EXTENSIONS: dict[int, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    1: (int, str, int),
    2: (tuple, list, tuple),
    3: (datetime, datetime.isoformat, datetime.fromisoformat),
    4: (date, date.isoformat, date.fromisoformat),
    5: (time, time.isoformat, time.fromisoformat),
    6: (timedelta, lambda t: [t.days, t.seconds, t.microseconds], lambda parts: timedelta(*parts)),
    7: (Decimal, str, Decimal),
    8: (UUID, str, UUID),
    9: (np.ndarray, _array_parts, _make_array),
    10: (np.generic, lambda n: _array_parts(np.asarray(n)), lambda parts: _make_array(parts)[()]),
}
"""Type, what it is taken apart with, and what makes it again."""
CODES = {kind: code for code, (kind, _, _) in EXTENSIONS.items()}


def to_wire(value: Any, place: str) -> Any:
    """`value` so that msgpack keeps its types; ConfigError names what cannot be sent."""
    kind = type(value)
    if kind in PLAIN or (kind is int and value in INTEGERS):
        return value
    if isinstance(value, Mapping):
        return {_key(key, place): to_wire(item, f"{place}.{key}") for key, item in value.items()}
    if kind is list:
        return [to_wire(item, f"{place}[{index}]") for index, item in enumerate(value)]
    code = CODES[np.generic] if isinstance(value, np.generic) else CODES.get(kind)
    if code is None or (isinstance(value, np.ndarray) and value.dtype.kind in "OV"):
        raise ConfigError(
            f"{place}: got {value!r} of type {kind.__module__}.{kind.__qualname__}, which cannot "
            "be sent to an agent-loop worker; use a plain type or set rollout.agent.num_workers=0"
        )
    parts = to_wire(EXTENSIONS[code][1](value), place)
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(parts))


def decode_extension(code: int, content: memoryview) -> Any:
    """The `ext_hook` of a decoder."""
    parts = msgspec.msgpack.decode(content, ext_hook=decode_extension)
    return EXTENSIONS[code][2](parts)


def encode_number(value: Any) -> Any:
    """The `enc_hook` of an encoder: numpy's numbers where Python's are meant."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"got {value!r} of type {type(value).__name__}, which cannot be sent")


def _key(key: Any, place: str) -> str | int:
    if type(key) not in (str, int):
        raise ConfigError(f"{place}: got the key {key!r}; keys must be strings or integers")
    return key
