"""Values as bytes that are safe to read: what a submission's process returns is data, never code.

`pickle` would run what a submission puts into it. Here a value is msgpack with a tag per kind. Reading it makes
numbers, text, containers, tensors and arrays, and for any other object an empty stand-in of the same class name with
its attributes. Nothing is imported or called.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import torch

MAX_BYTES = 64 << 20
"""Of one answer."""
MAX_DEPTH = 60
MAX_ITEMS = 1_000_000
"""Of one answer: numbers, texts and containers, as msgpack counts them."""
MAX_MEMBERS = 1_000
"""Of one set or dict. Integers can be chosen so that all have the same hash, and each is compared with all before it.
`MAX_ITEMS` of them, in sets of this size, take about 7 s to read; in sets of 10,000 they would take 80 s."""
MAX_DIMS = 16
MAX_BITS = 8_000
MAX_NAME = 100
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
ARRAYS = "biufc"
"""Kinds of NumPy dtypes that are plain numbers."""


class ValueTooLarge(ValueError):
    """A value has too many bytes, items or levels."""


class Foreign:
    """Base of the stand-ins for objects of classes that are not known here."""


def encode(value: object) -> bytes:
    """`value` as bytes. Raises `ValueTooLarge`, and `ValueError` for a set in a set or in a key of a dict."""
    data = msgspec.msgpack.encode(_Encoder().tagged(value, 0))
    _check_size(data)
    return data


def decode(data: bytes) -> object:
    """The value of `encode`'s bytes. Raises `ValueError` for any other bytes."""
    _check_size(data)
    try:
        return _value(msgspec.msgpack.decode(data), 0)
    except ValueTooLarge:
        raise
    except Exception as problem:  # what libraries raise for forged bytes is not known
        raise ValueError(f"not an encoded value: {problem}") from None


def num_items(data: bytes, maps: bool = True) -> int:
    """How many objects the msgpack `data` holds, counted up to `MAX_ITEMS` + 1 without making any of them.

    Raises `ValueError` for a map if `maps` is False.
    """
    at = count = 0
    refused = () if maps else _MAPS
    while at < len(data) and count <= MAX_ITEMS:
        if data[at] in refused:
            raise ValueError("a map of msgpack")
        plain, length = _SIZES[data[at]]
        at += 1 + plain + length + int.from_bytes(data[at + 1 : at + 1 + length], "big")
        count += 1
    return count


def _sizes(head: int) -> tuple[int, int]:
    """For an object that begins with the byte `head`: how many bytes always follow, and how many hold the length of the
    rest. The items of an array or a map are objects of their own."""
    if 0xA0 <= head <= 0xBF:  # short text
        return head & 0x1F, 0
    if head in (0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB):  # bytes, text
        return 0, 1 << (head - 0xC4 if head < 0xD9 else head - 0xD9)
    if head in (0xC7, 0xC8, 0xC9):  # extension
        return 1, 1 << head - 0xC7
    fixed = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
    fixed |= {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
    return fixed.get(head, 0), 0


_SIZES = [_sizes(head) for head in range(256)]
_MAPS = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))
"""First bytes of maps. `encode` makes none, and msgspec would compare keys that collide before any check here."""


def _check_size(data: bytes) -> None:
    if len(data) > MAX_BYTES:
        raise ValueTooLarge(f"an answer of {len(data):,} bytes; the limit is {MAX_BYTES:,}")
    if num_items(data, maps=False) > MAX_ITEMS:
        raise ValueTooLarge(f"an answer with more than {MAX_ITEMS:,} items")


def _check_members(found: Collection[Any]) -> None:
    """Check the members of a set or the keys of a dict. Two sets of colliding members take very long to compare, so
    none may be in another."""
    if len(found) > MAX_MEMBERS:
        raise ValueTooLarge(f"a set or dict with {len(found):,} members; the limit is {MAX_MEMBERS:,}")
    if any(map(_holds_set, found)):
        raise ValueError("a set in a set, or in a key of a dict")


def _holds_set(member: Any) -> bool:
    return isinstance(member, frozenset) or (isinstance(member, tuple) and any(map(_holds_set, member)))


class _Encoder:
    """One call of `encode`; counts what it has written."""

    def __init__(self) -> None:
        self._items = self._bytes = 0

    def tagged(self, value: Any, depth: int) -> Any:
        self._items += 1
        if depth > MAX_DEPTH or self._items > MAX_ITEMS:
            raise ValueTooLarge(f"an answer with more than {MAX_DEPTH} levels or {MAX_ITEMS:,} items")
        kind = type(value)
        if value is None or kind in (bool, float):
            return value
        if kind is int:
            return value if -(1 << 63) <= value < 1 << 63 else self._long(value)
        if kind is str:
            return ["str", value.encode("utf-8", "surrogatepass")]
        if kind in (bytes, bytearray):
            return ["bytes", bytes(value)]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind is range:
            return ["range", *(self.tagged(bound, depth + 1) for bound in (value.start, value.stop, value.step))]
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (np.ndarray, np.generic)):
            return self._array(value)
        if isinstance(value, torch.Generator):
            return ["generator", value.get_state().numpy().tobytes()]
        return self._container(value, kind, depth)

    def _long(self, value: int) -> Any:
        if value.bit_length() > MAX_BITS:
            raise ValueTooLarge(f"an integer of more than {MAX_BITS:,} bits")
        return ["int", hex(value)]

    def _container(self, value: Any, kind: type, depth: int) -> Any:
        if isinstance(value, (set, frozenset, dict)):
            _check_members(value)
        if isinstance(value, tuple):  # a named one, too: the checks take it as a tuple
            kind, value = tuple, tuple.__getitem__(value, slice(None))
        if kind in _SEQUENCES:
            return [_SEQUENCES[kind], [self.tagged(item, depth + 1) for item in value]]
        if isinstance(value, dict):
            pairs = [[self.tagged(key, depth + 1), self.tagged(item, depth + 1)] for key, item in value.items()]
            return ["dict", pairs]
        state = {} if callable(value) or isinstance(value, ModuleType) else _state(value)
        pairs = [[str(name)[:MAX_NAME], self.tagged(item, depth + 1)] for name, item in state.items()]
        return ["object", kind.__name__[:MAX_NAME], pairs]

    def _tensor(self, value: torch.Tensor) -> Any:
        name = str(value.dtype).removeprefix("torch.")
        if name not in DTYPES or value.layout != torch.strided or value.device.type == "meta":
            return ["object", f"{name} tensor"[:MAX_NAME], []]
        self._room(value.numel() * value.dtype.itemsize)
        plain = value.detach().cpu().resolve_conj().resolve_neg()
        if plain.is_complex():
            plain = torch.view_as_real(plain)
        plain = torch.empty(plain.numel(), dtype=plain.dtype).copy_(plain.reshape(-1))  # with plain strides
        return ["tensor", name, list(value.shape), plain.view(torch.uint8).numpy().tobytes()]

    def _array(self, value: Any) -> Any:
        dtype = value.dtype
        if dtype.kind not in ARRAYS or dtype.itemsize > 16:
            return ["object", f"{dtype} array"[:MAX_NAME], []]
        self._room(value.nbytes)
        native = np.ascontiguousarray(value, dtype.newbyteorder("="))
        tag = "array" if isinstance(value, np.ndarray) else "scalar"
        return [tag, f"{dtype.kind}{dtype.itemsize}", list(value.shape), native.tobytes()]

    def _room(self, size: int) -> None:
        self._bytes += size
        if self._bytes > MAX_BYTES:
            raise ValueTooLarge(f"an answer of more than {MAX_BYTES:,} bytes, which is the limit")


_SEQUENCES = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}


def _state(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return dict(getattr(value, "__dict__", {}))


# ------------------------------------------------------------------------------------------------------------ reading


def _value(data: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueTooLarge(f"more than {MAX_DEPTH} levels")
    if data is None or type(data) in (bool, int, float):
        return data
    tag, *content = data
    return _READERS[tag](content, depth + 1)


def _tensor(content: list[Any], depth: int) -> torch.Tensor:
    name, shape, data = content
    dtype, sizes = DTYPES[name], _shape(shape)
    if len(data) != math.prod(sizes) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for a {name} tensor {sizes}")
    if not data:
        return torch.empty(sizes, dtype=dtype)
    numbers = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return ((numbers != 0) if dtype is torch.bool else numbers.view(dtype)).reshape(sizes)


def _array(content: list[Any], depth: int) -> np.ndarray:
    kind, shape, data = content
    if not re.fullmatch(rf"[{ARRAYS}]\d+", kind):
        raise ValueError(f"an array of {kind!r}")
    dtype = np.dtype(kind)
    numbers = np.frombuffer(data, np.uint8) != 0 if dtype == np.bool_ else np.frombuffer(data, dtype)
    return numbers.reshape(_shape(shape)).copy()


def _shape(shape: list[Any]) -> list[int]:
    if len(shape) > MAX_DIMS or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"a shape of {str(shape)[:MAX_NAME]}")
    return shape


def _generator(content: list[Any], depth: int) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(torch.frombuffer(bytearray(content[0]), dtype=torch.uint8))
    return generator


def _range(content: list[Any], depth: int) -> range:
    found = range(*(_value(bound, depth) for bound in content))
    if len(found) > MAX_ITEMS:
        raise ValueTooLarge(f"a range of {len(found):,} numbers; the limit is {MAX_ITEMS:,}")
    return found


def _foreign(content: list[Any], depth: int) -> object:
    name, pairs = content
    made = type(str(name)[:MAX_NAME], (Foreign,), {})()
    made.__dict__.update({str(key): _value(item, depth) for key, item in pairs})
    return made


def _dict(content: list[Any], depth: int) -> dict[Any, Any]:
    keys = [_value(key, depth) for key, _ in content[0]]
    _check_members(keys)
    return dict(zip(keys, [_value(item, depth) for _, item in content[0]], strict=True))


def _sequence(make: type) -> Callable[[list[Any], int], Any]:
    def read(content: list[Any], depth: int) -> Any:
        items = [_value(item, depth) for item in content[0]]
        if make in (set, frozenset):
            _check_members(items)
        return make(items)

    return read


_READERS: dict[str, Callable[[list[Any], int], Any]] = {
    "int": lambda content, depth: int(content[0][: MAX_BITS // 4 + 3], 16),
    "str": lambda content, depth: content[0].decode("utf-8", "surrogatepass"),
    "bytes": lambda content, depth: bytes(content[0]),
    "complex": lambda content, depth: complex(*content),
    "range": _range,
    "tensor": _tensor,
    "array": _array,
    "scalar": lambda content, depth: _array(content, depth)[()],
    "generator": _generator,
    "object": _foreign,
    "dict": _dict,
    **{tag: _sequence(make) for make, tag in _SEQUENCES.items()},
}
