"""Teaching: exercises that check themselves, and the build that turns one source per lesson into two notebooks.

A lesson needs one line: `from minillm.teaching import check, claim, hint, use, predict, reveal`.
"""

from __future__ import annotations

from minillm.teaching.claim import claim
from minillm.teaching.prediction import compare_prediction, predict, reveal
from minillm.teaching.session import check, hint, use

__all__ = ["check", "claim", "compare_prediction", "hint", "predict", "reveal", "use"]
