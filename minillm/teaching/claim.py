"""Sentences of a lesson that stand beside numbers: those its own numbers must bear out, and those it quotes.

A lesson says "twice as fast" or "fewer than half"; the cell that prints the numbers says it too, with the condition:

    claim("Continuous batching needs fewer steps.", continuous.steps < static.steps)
    claim("Decoding reads memory faster than prefill does.", decode_gbs > prefill_gbs, measured=True)
    claim("INT4 changes more texts than INT8.", same_int4 < same_int8, of_model=True)

What is counted is the same on every machine, so a sentence about counts that does not hold is an error everywhere. What
is measured is not: there the sentence must hold where the solution is recorded (`minillm build`), and elsewhere the
learner is told when their machine differs. So a measured claim prints differently on different machines: it belongs
into a cell tagged `nbval-ignore-output`, and `minillm build` refuses it elsewhere. What depends on the weights
(`of_model`) is the same on every machine, but not with another model: it may stand in any cell.

A figure that was not measured here says whose it is:

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
        LessonError: the sentence is false, and it is about counts or the run is being recorded.
    """
    if holds:
        print(f"✓ {sentence}")
    elif (measured or of_model) and os.environ.get(RECORDING_VARIABLE) != "1":
        print(f"Not so {'on this machine' if measured else 'with this model'}: {sentence}")
    else:
        raise LessonError(f"the lesson says {sentence!r}, and the numbers beside it say otherwise")


def quoted(sentence: str, source: str) -> None:
    """Print a `sentence` with figures from elsewhere, and the `source` they are from: a paper, a data sheet, a page.

    Raises:
        LessonError: one of them is empty.
    """
    if not sentence.strip() or not source.strip():
        raise LessonError(f"quoted({sentence!r}, {source!r}) needs both: the sentence, and where its figures are from")
    print(f"{sentence} (quoted: {source})")
