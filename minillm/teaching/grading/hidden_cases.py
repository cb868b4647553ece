"""Hidden cases: other shapes, block sizes, prompts and draft lengths for every student, from the course's secret."""

from __future__ import annotations

import importlib
import pkgutil
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from minillm.errors import ConfigError, LessonError
from minillm.teaching import variants
from minillm.teaching.answer_key import AnswerKey
from minillm.teaching.exercise import Case
from minillm.teaching.variants.random_numbers import Draw, Maker

MIN_SECRET = 16
"""Bytes. A shorter secret could be guessed by trying."""
NUM_HIDDEN = 3
"""Hidden cases per exercise."""


@lru_cache(maxsize=1)
def makers() -> dict[str, Maker]:
    """The makers of all exercises: `MAKERS` of every module `minillm/teaching/variants/lNN….py`."""
    names = [module.name for module in pkgutil.iter_modules(variants.__path__) if re.match(r"l\d\d", module.name)]
    found: dict[str, Maker] = {}
    for name in names:
        found |= importlib.import_module(f"{variants.__name__}.{name}").MAKERS
    return found


def hidden_cases(key: AnswerKey, secret: bytes, student: str) -> tuple[Case, ...]:
    """The cases of `student` beyond those of `key`; none without a secret.

    Raises:
        LessonError: nobody has written a maker for the exercise.
    """
    if not secret:
        return ()
    name = key.exercise.name
    maker = makers().get(name)
    if maker is None:
        raise LessonError(f"{name} has no maker of hidden cases; add one to MAKERS in minillm/teaching/variants")
    made = [maker(Draw(secret, student, name, number)) for number in range(NUM_HIDDEN)]
    return tuple(replace(case, label=f"hidden case {n}: {case.label}") for n, case in enumerate(made, 1))


def read_secret(path: Path) -> bytes:
    """The course's secret. Raises `ConfigError` if it is too short, or in something that could be read without end."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a regular file; write the secret into one")
    secret = path.read_bytes().strip()
    if len(secret) < MIN_SECRET:
        raise ConfigError(f"{path} has {len(secret)} bytes; a secret needs at least {MIN_SECRET}")
    return secret
