"""Logits that are NaN for some requests, as those of broken weights or a broken kernel are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minillm.engine.engine import Engine
from minillm.engine.step_rows import StepRows
from minillm.request import Request


def break_logits(monkeypatch: pytest.MonkeyPatch, is_broken: Callable[[Request], bool]) -> None:
    """From now on, the logits of the requests for which `is_broken` is true are NaN."""
    forward = Engine._run

    def forward_or_nan(self: Engine, scheduled: Any) -> Any:
        logits, hidden = forward(self, scheduled)
        logits = logits.clone()  # a normal tensor, which can be written to
        for item, part in zip(scheduled, StepRows(scheduled, logits).by_request, strict=True):
            if is_broken(item.request):
                part.fill_(float("nan"))
        return logits, hidden

    monkeypatch.setattr(Engine, "_run", forward_or_nan)
