"""Random numbers for the cases of one student and exercise."""

from __future__ import annotations

import hashlib
import hmac
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from minillm.teaching.exercise import Case

T = TypeVar("T")


class Draw:
    """Draws that depend on the secret, the student, the exercise and a counter, and on nothing else."""

    def __init__(self, secret: bytes, student: str, exercise: str, number: int = 0) -> None:
        parts = [student.encode("utf-8", "surrogatepass"), exercise.encode(), str(number).encode()]
        message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        seed = hmac.new(secret, message, hashlib.sha256).digest()
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(int.from_bytes(seed[:7], "big"))

    def int(self, low: int, high: int) -> int:
        """An integer from `low` to `high`, both included."""
        return self._random.randint(low, high)

    def float(self, low: float, high: float) -> float:
        """A number with three decimals."""
        return round(self._random.uniform(low, high), 3)

    def one_of(self, *values: T) -> T:
        """One of the values."""
        return self._random.choice(values)

    def some(self, values: Sequence[T], count: int) -> list[T]:
        """`count` different ones of the values, in any order."""
        return self._random.sample(list(values), count)

    def normal(self, *shape: int) -> Tensor:
        """A float32 tensor of normal numbers."""
        return torch.randn(*shape, generator=self._generator)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """A tensor of integers from `low` to `high`, both included."""
        return torch.randint(low, high + 1, shape, generator=self._generator).to(dtype)

    def chances(self, *shape: int) -> Tensor:
        """Rows of probabilities, all of them above 0."""
        return (1.5 * self.normal(*shape)).softmax(-1)


Maker = Callable[[Draw], Case]
