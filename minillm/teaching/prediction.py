"""A learner predicts a number before the lesson gives it; afterwards both are compared."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from minillm.errors import LessonError


@dataclass
class Predictions:
    """The predictions of one session, by name (`"l02.bytes"`)."""

    commitments: dict[str, tuple[float | None, str]] = field(default_factory=dict)

    def predict(self, name: str, value: float | None, unit: str = "") -> None:
        """Store `value` (in `unit`) for `name`; None means not yet decided, and never stops a notebook.

        A second call replaces the first, so a cell can be edited and run again.

        Raises:
            LessonError: `value` is not a number.
        """
        number = _number(value)
        if value is not None and number is None:
            raise LessonError(f"prediction {name!r} is {value!r}; write a number such as 4096, or None to decide later")
        self.commitments[name] = (number, unit)
        if number is None:
            print(f"No prediction for {name} yet: replace None by your number and run this cell again.")
        else:
            print(f"Your prediction for {name}: {_amount(number, unit)}. Now read on.")

    def compare(self, name: str, answer: float) -> None:
        """Print the prediction, `answer` (counted, modelled or measured) in its unit, and the factor between them."""
        answer = _plain(answer)
        value, unit = self.commitments.get(name, (None, ""))
        if value is None:
            print(f"{name}: the answer is {_amount(answer, unit)}; you made no prediction.")
        else:
            both = f"you predicted {_amount(value, unit)}, the answer is {_amount(answer, unit)}"
            print(f"{name}: {both}: {_verdict(value, answer)}")


def _plain(value: Any) -> Any:
    """A number of NumPy or PyTorch as a number of Python; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _number(value: object) -> float | None:
    """A finite number, of NumPy or PyTorch too, as an int or a float; None for anything else."""
    value = _plain(value)
    if isinstance(value, bool) or not isinstance(value, Real) or not abs(value) <= sys.float_info.max:
        return None
    return int(value) if isinstance(value, Integral) else float(value)


def _amount(value: float, unit: str) -> str:
    number = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return f"{number} {unit}".rstrip()


def _verdict(predicted: float, answer: float) -> str:
    if predicted == answer:
        return "exactly right."
    if _number(answer) is None:
        return "there is no factor between them."
    small, large = sorted((abs(predicted), abs(answer)))
    factor = large / small if small and (predicted > 0) == (answer > 0) else math.inf
    if factor == math.inf:
        return f"off by {abs(answer - predicted):.4g}."
    shown = f"{factor:.3g}"
    side = "low" if abs(answer) > abs(predicted) else "high"
    return "right within 0.5%." if shown == "1" else f"you were {shown} times too {side}."


# A notebook kernel is the session of one learner, so the functions that lessons call share one object.
_SESSION = Predictions()
predict = _SESSION.predict
reveal = _SESSION.compare
