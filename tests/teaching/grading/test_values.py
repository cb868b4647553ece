"""What comes back from a submission's process is data: it survives the way, and hostile bytes are an error."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections import namedtuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm.teaching.compare import exact
from minillm.teaching.grading import values

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 200), 1 << 200)
    | st.floats()
    | st.text(st.characters(exclude_categories=[]))
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(plain)
def test_plain_values_come_back_as_they_were(value):
    back = values.decode(values.encode(value))
    assert type(back) is type(value)
    assert repr(back) == repr(value)


@pytest.mark.parametrize("dtype", values.DTYPES.values(), ids=str)
def test_tensors_come_back_bit_for_bit(dtype):
    tensor = torch.arange(-3, 9).to(dtype).reshape(3, 4).T
    back = values.decode(values.encode([tensor, tensor[:0], tensor[1, 1]]))
    assert [each.dtype for each in back] == [dtype] * 3
    assert exact([tensor, tensor[:0], tensor[1, 1]], back) is None


def test_a_tensor_with_unusual_strides_comes_back():
    one = torch.ones(()).expand(1)
    many = [one, one.to(torch.bfloat16), torch.ones(1, 3).expand(4, 3), torch.ones(2, 2, dtype=torch.complex64).conj()]
    assert exact(many, values.decode(values.encode(many))) is None


def test_arrays_numbers_sets_and_generators_come_back():
    value = (np.arange(6.0).reshape(2, 3), np.float32(1.5), np.bool_(True), {1, 2}, frozenset({3}), 1 + 2j)
    back = values.decode(values.encode(value))
    assert exact(value, back) is None
    assert [type(each) for each in back] == [type(each) for each in value]
    generator = torch.Generator().manual_seed(3)
    torch.rand(2, generator=generator)
    assert exact(generator, values.decode(values.encode(generator))) is None


def test_a_named_tuple_comes_back_as_a_tuple():
    came = values.decode(values.encode(namedtuple("Work", "rows pairs")(3, 6)))
    assert type(came) is tuple and came == (3, 6)


def test_ranges_come_back_and_long_ones_are_refused():
    value = [range(3), range(7, -2, -3), range(10**30, 10**30 + 2)]
    assert values.decode(values.encode(value)) == value
    with pytest.raises(ValueError, match="a range of"):
        values.decode(values.encode(range(10**9)))


def test_nan_and_minus_zero_keep_their_bits():
    back = values.decode(values.encode([math.nan, -0.0, torch.tensor([math.nan, -0.0])]))
    assert math.isnan(back[0])
    assert math.copysign(1, back[1]) == math.copysign(1, back[2][1].item()) == -1


@dataclasses.dataclass
class Point:
    x: int
    far: torch.Tensor


def test_an_object_becomes_a_stand_in_of_the_same_name_that_compares_by_its_attributes():
    point = Point(3, torch.ones(2))
    back = values.decode(values.encode(point))
    assert isinstance(back, values.Foreign) and type(back).__name__ == "Point"
    assert exact(point, back) is None
    assert exact(Point(4, torch.ones(2)), back) is not None


def test_an_object_that_equals_everything_equals_nothing_afterwards():
    class Yes(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    assert exact(8, values.decode(values.encode(Yes(8)))) is not None


def test_nothing_of_the_sender_runs_here(tmp_path):
    class Evil:
        def __reduce__(self):
            return (tmp_path / "reached").touch, ()

    before = set(sys.modules)
    values.decode(values.encode([Evil(), sys, print, lambda: 1]))
    assert not (tmp_path / "reached").exists()
    assert set(sys.modules) == before


def _endless_list():
    inside = []
    inside.append(inside)
    return inside


@pytest.mark.parametrize(
    "value",
    [
        _endless_list(),
        torch.zeros(1).expand(1 << 40),
        10**10_000,
        [0] * (values.MAX_ITEMS + 1),
        ["x"] * (values.MAX_ITEMS // 2),
        set(range(values.MAX_MEMBERS + 1)),
        dict.fromkeys(range(values.MAX_MEMBERS + 1)),
    ],
    ids=["cycle", "tensor", "integer", "items", "texts", "set", "dict"],
)
def test_values_without_measure_are_refused_where_they_are_made(value):
    with pytest.raises(values.ValueTooLarge):
        values.encode(value)


@pytest.mark.parametrize(
    "tagged",
    [
        ["tensor", "float32", [1 << 40], b"1234"],
        ["tensor", "float32", [-1, 4], b""],
        ["tensor", "quint8", [1], b"1"],
        ["tensor", "float32", [2], b"1234"],
        ["array", "O8", [1], b"12345678"],
        ["array", "f4", [3], b"1234"],
        ["generator", b"short"],
        ["no such tag", []],
        ["dict", [[["list", []], None]]],
        ["list"],
        ["str", "no bytes"],
        {"a": 1},
        [],
    ],
    ids=repr,
)
def test_forged_bytes_are_an_error_and_nothing_else(tagged):
    with pytest.raises(ValueError):
        values.decode(msgspec.msgpack.encode(tagged))


@given(st.binary(max_size=60))
def test_noise_is_an_error_or_a_plain_value(data):
    try:
        value = values.decode(data)
    except ValueError:
        return
    assert isinstance(value, (type(None), bool, int, float, str, bytes, list, tuple, dict, set, frozenset, complex))


@pytest.mark.parametrize("levels", [values.MAX_DEPTH + 1, 100_000])
def test_forged_levels_do_not_exhaust_the_stack(levels):
    with pytest.raises(ValueError):
        values.decode(b"\x92\xa4list\x91" * levels + b"\xc0")


@pytest.mark.parametrize("kind", ["i4,(,)f8", "O", "i", "f8,f8", ""])
def test_a_forged_kind_of_array_is_a_value_error(kind: str) -> None:
    """NumPy raises a SyntaxError for the first."""
    with pytest.raises(ValueError, match=r"an array of|not an encoded value"):
        values.decode(msgspec.msgpack.encode(["array", kind, [0], b""]))


@pytest.mark.parametrize("forged", [b"\x90", b"\xa1x", b"\xc4\x00", b"\xcc\x07", b"\xc7\x01\x05x"], ids=bytes.hex)
def test_forged_items_are_refused_before_any_is_made(forged: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msgspec.msgpack, "decode", lambda data: pytest.fail("they were made"))
    count = values.MAX_ITEMS + 1
    with pytest.raises(values.ValueTooLarge, match="items"):
        values.decode(b"\x92\xa4list\xdd" + count.to_bytes(4, "big") + forged * count)


@pytest.mark.parametrize("tag", ["set", "frozenset", "dict"])
def test_a_set_or_dict_whose_members_all_collide_is_small(tag: str) -> None:
    """Python's hash of an integer is its remainder by a prime, so all multiples of the prime collide."""
    prime = (1 << 61) - 1
    members = [["int", hex(prime * n)] for n in range(values.MAX_MEMBERS + 1)]
    content = [[each, None] for each in members] if tag == "dict" else members
    assert len(values.decode(msgspec.msgpack.encode([tag, content[1:]]))) == values.MAX_MEMBERS
    with pytest.raises(values.ValueTooLarge, match="members"):
        values.decode(msgspec.msgpack.encode([tag, content]))


COLLIDING = [["int", hex(((1 << 61) - 1) * n)] for n in range(1, 1_000)]
"""Integers of the same hash."""


@pytest.mark.parametrize("inner", ["frozenset", "tuple"])
@pytest.mark.parametrize("outer", ["set", "dict"])
def test_no_set_is_in_another_or_in_a_key(outer: str, inner: str) -> None:
    """To compare two sets of colliding members takes time that is quadratic in their sizes. Those of a set of sets
    that collide too would take minutes."""
    sets = [["frozenset", [*COLLIDING[:32], own]] for own in COLLIDING[32:132]]
    members = sets if inner == "frozenset" else [["tuple", [0, each]] for each in sets]
    forged = [outer, [[each, None] for each in members] if outer == "dict" else members]
    with pytest.raises(ValueError, match="a set in a set, or in a key"):
        values.decode(msgspec.msgpack.encode(forged))
    inside = frozenset({1}) if inner == "frozenset" else (0, frozenset({1}))
    with pytest.raises(ValueError, match="a set in a set, or in a key"):
        values.encode({inside} if outer == "set" else {inside: None})


@pytest.mark.parametrize("depth", [0, 2])
def test_a_map_is_refused_before_it_is_made(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of a map may be arrays, which become tuples, and all of them may have one hash."""
    monkeypatch.setattr(msgspec.msgpack, "decode", lambda data: pytest.fail("it was made"))
    prime = (1 << 61) - 1
    keys = itertools.product([prime * n for n in range(-4, 5)], repeat=5)
    forged = msgspec.msgpack.encode(dict.fromkeys(itertools.islice(keys, 1_000)))
    with pytest.raises(ValueError, match="a map"):
        values.decode(b"\x91" * depth + forged)


@given(plain)
def test_items_are_counted_as_msgpack_reads_them(value) -> None:
    def count(part) -> int:
        return 1 + sum(map(count, part)) if isinstance(part, list) else 1

    data = values.encode(value)
    assert values.num_items(data) == count(msgspec.msgpack.decode(data))
