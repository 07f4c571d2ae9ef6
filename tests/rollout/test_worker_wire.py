from collections import OrderedDict
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import numpy as np
import pytest

from minirl.config import ConfigError
from minirl.rollout.wire import decode_extension, encode_number, to_wire


def sent(value: Any) -> Any:
    """`value` at the other end."""
    encoded = msgspec.msgpack.encode(to_wire(value, "row"))
    return msgspec.msgpack.decode(encoded, ext_hook=decode_extension)


VALUES: list[Any] = [
    None, True, 7, -(2**63), 2**64 - 1, 2**64, -(10**30), 0.1, float("inf"), "Zürich", b"\x00\xff",
    [1, [None, "a"]], {"a": {"b": None}, 3: []}, (), (1, ("a", [date(2024, 2, 29)])),
    datetime(2024, 2, 29, 12, 30, 1, 5), datetime(2024, 1, 1, tzinfo=UTC),
    datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=-5))),
    date(2024, 2, 29), time(23, 59, 1, 7), timedelta(days=-3, microseconds=1),
    Decimal("1.500"), UUID(int=5),
    np.float32(0.1), np.float64(0.1), np.int64(-5), np.bool_(True), np.str_("ab"),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_keeps_its_type(value: Any) -> None:
    received = sent({"column": [value]})["column"][0]
    assert repr(received) == repr(value)
    assert (type(received), received) == (type(value), value)


@pytest.mark.parametrize("dtype", ["int8", "float32", "bool", "<U3", "datetime64[s]"])
def test_an_array_keeps_its_type_and_shape(dtype: str) -> None:
    array = np.arange(6).astype(dtype).reshape(2, 3)
    received = sent(array)
    assert received.dtype == array.dtype
    np.testing.assert_array_equal(received, array)
    received[0, 0] = received[1, 1]  # may be written to, like the original
    assert sent(np.zeros((0, 2))).shape == (0, 2)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [0, Fraction(1, 3)]}, "row.a[1]: got Fraction(1, 3) of type fractions.Fraction"),
        ({"a": {"b": ({1},)}}, "row.a.b[0]: got {1} of type builtins.set"),
        ({"a": np.array([None])}, "row.a: got array([None], dtype=object) of type numpy.ndarray"),
        ({"a": Path("x")}, "set rollout.agent.num_workers=0"),
        ({"a": {(1, 2): 3}}, "row.a: got the key (1, 2); keys must be strings or integers"),
    ],
)
def test_what_cannot_be_sent_is_named(value: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        to_wire(value, "row")
    assert words in str(caught.value)


def test_mappings_of_any_kind_become_dicts() -> None:
    assert sent(OrderedDict(b=1, a=2)) == {"b": 1, "a": 2}


def test_numbers_of_numpy_where_pythons_are_meant() -> None:
    encoded = msgspec.msgpack.encode([np.float32(0.5), np.int64(3)], enc_hook=encode_number)
    assert msgspec.msgpack.decode(encoded, type=tuple[float, int]) == (0.5, 3)
    with pytest.raises(TypeError, match="got 1j of type complex"):
        msgspec.msgpack.encode(1j, enc_hook=encode_number)
