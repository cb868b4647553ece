"""Hidden cases: other shapes, block sizes, prompts and draft lengths for every student, from the course's secret."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from minillm.errors import ConfigError
from minillm.teaching.answer_key import AnswerKey
from minillm.teaching.exercise import Case
from minillm.teaching.variants import l01_to_l05, l06_to_l09, l10_to_l15, l16, l17
from minillm.teaching.variants.draw import Draw, Maker

MIN_SECRET = 16
"""Bytes. A shorter secret could be guessed by trying."""
NUM_HIDDEN = 3
"""Hidden cases per exercise."""
MAKERS: dict[str, Maker] = {**l01_to_l05.MAKERS, **l06_to_l09.MAKERS, **l10_to_l15.MAKERS, **l16.MAKERS, **l17.MAKERS}


def hidden_cases(key: AnswerKey, secret: bytes, student: str) -> tuple[Case, ...]:
    """The cases of `student` beyond those of `key`; none without a secret, or for an exercise without a maker."""
    maker = MAKERS.get(key.exercise.name)
    if not secret or maker is None:
        return ()
    made = [maker(Draw(secret, student, key.exercise.name, number)) for number in range(NUM_HIDDEN)]
    return tuple(replace(case, label=f"hidden case {n}: {case.label}") for n, case in enumerate(made, 1))


def read_secret(path: Path) -> bytes:
    """The course's secret. Raises `ConfigError` if it is too short, or in something that could be read without end."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a regular file; write the secret into one")
    secret = path.read_bytes().strip()
    if len(secret) < MIN_SECRET:
        raise ConfigError(f"{path} has {len(secret)} bytes; a secret needs at least {MIN_SECRET}")
    return secret
