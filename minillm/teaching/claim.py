"""A lesson's sentences about numbers: `claim` checks one against the lesson's own numbers, `quoted` names a source.

A lesson says "twice as fast" or "fewer than half". The cell that prints the numbers repeats it with its condition:

    claim("Continuous batching needs fewer steps.", continuous.steps < static.steps)
    claim("Decoding reads memory faster than prefill does.", decode_gbs > prefill_gbs, measured=True)
    claim("INT4 changes more texts than INT8.", same_int4 < same_int8, of_model=True)

Counts are the same on every machine, so a false claim about counts is an error everywhere. Measurements are not: a
measured claim must hold where the solution is recorded (`minillm build`); on another machine where it does not hold,
the learner is told so. A measured claim therefore prints differently on different machines. It belongs in a cell tagged
`nbval-ignore-output`, and `minillm build` refuses it elsewhere. A claim that depends on the weights (`of_model`) holds
on every machine, but not with every model; it may be in any cell.

A figure that was not measured here names its source:

    quoted("An H100 reads 3.35 TB/s.", "NVIDIA H100 data sheet")
"""

from __future__ import annotations

import os

from minillm.errors import LessonError

RECORDING_VARIABLE = "MINILLM_RECORDING"
"""`1` while `minillm build` runs a solution and records its outputs."""


def claim(sentence: str, holds: bool, measured: bool = False, of_model: bool = False) -> None:
    """Print `sentence` with a check mark if it `holds`.

    With `measured`, a sentence that does not hold is printed as "Not so on this machine", with `of_model` as "Not so
    with this model", unless the run is recorded.

    Raises:
        LessonError: the sentence does not hold, and it is about counts or the run is being recorded.
    """
    if holds:
        print(f"✓ {sentence}")
    elif (measured or of_model) and os.environ.get(RECORDING_VARIABLE) != "1":
        print(f"Not so {'on this machine' if measured else 'with this model'}: {sentence}")
    else:
        raise LessonError(f"the lesson says {sentence!r}, but its numbers do not show that")


def quoted(sentence: str, source: str) -> None:
    """Print a `sentence` with quoted figures, and their `source`: a paper, a data sheet, a page.

    Raises:
        LessonError: one of them is empty.
    """
    if not sentence.strip() or not source.strip():
        raise LessonError(f"quoted({sentence!r}, {source!r}) needs both: the sentence, and the source of its figures")
    print(f"{sentence} (quoted: {source})")
