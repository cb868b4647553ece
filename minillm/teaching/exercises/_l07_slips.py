"""Lesson 07, slips in one place of the right answer, planted so that a check can name them."""

from __future__ import annotations

from minillm.teaching.exercises._l07_reference import admit, share_budget, static_steps
from minillm.teaching.source import slips

_ANY = "budget == 0 or len(shares) == seats or blocks > free_blocks"

STATIC = slips(
    static_steps,
    {
        "looks at the first batch only": ("range(0, len(lengths), batch_size)", "range(0, min(1, len(lengths)))"),
        "has a range without batches, so that nothing is added up": ("range(0, len(lengths)", "range(len(lengths), 0"),
    },
)

BUDGET = slips(
    share_budget,
    {
        "exchanges the tokens of a request with the number of requests behind it": (
            "for behind, tokens",
            "for tokens, behind",
        ),
        "takes the budget off the number of requests behind instead of the other way round": (
            "budget - behind",
            "behind - budget",
        ),
        "makes the last share the new budget instead of taking it off": ("budget -= ", "budget = "),
        "takes the first share off the budget again and again": ("shares[-1]", "shares[0]"),
        "stops after the first request": ("return shares", "return shares[:1]"),
        "returns no shares": ("return shares", "return []"),
    },
)

ADMIT = slips(
    admit,
    {
        "stops while something is left of the budget, and goes on when nothing is": ("budget == 0", "budget != 0"),
        "stops while seats are free, and goes on when none is": ("len(shares) == seats", "len(shares) != seats"),
        "stops when nothing has run out, and goes on when something has": (_ANY, f"not ({_ANY})"),
        "takes the first share off the budget again and again": ("shares[-1]", "shares[0]"),
        "multiplies the tokens by block_size instead of dividing": ("-tokens // block_size", "-tokens * block_size"),
        "never stops, whatever has run out": ("            break\n", "            pass\n"),
        "divides block_size by the tokens: the quotient is upside down": (
            "-tokens // block_size",
            "block_size // -tokens",
        ),
    },
)
