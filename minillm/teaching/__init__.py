"""Teaching: exercises that check themselves, and the build that turns one source per lesson into two notebooks.

A lesson needs one line: `from minillm.teaching import check, claim, hint, predict, quoted, reveal, use`.
"""

from __future__ import annotations

from minillm.teaching.claim import claim, quoted
from minillm.teaching.prediction import predict, reveal
from minillm.teaching.session import check, hint, use

__all__ = ["check", "claim", "hint", "predict", "quoted", "reveal", "use"]
