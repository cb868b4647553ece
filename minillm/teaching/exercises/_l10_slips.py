"""Lesson 10, planted mistakes, each one edit of the reference, so that a check can name them."""

from __future__ import annotations

from minillm.teaching.exercises._l10_reference import accept_rule, residual, verify_chain
from minillm.teaching.source import wrong_versions

ACCEPT = wrong_versions(
    accept_rule,
    {
        "multiplies p(x) by q(x) instead of dividing": ("(p_x / q_x)", "(p_x * q_x)"),
        "accepts with p(x), does not divide by q(x)": ("(p_x / q_x)", "(p_x)"),
        "divides q(x) by p(x)": ("(p_x / q_x)", "(q_x / p_x)"),
        "divides a probability by itself, so that every draft is accepted": ("(p_x / q_x)", "(q_x / q_x)"),
    },
)

RESIDUAL = wrong_versions(
    residual,
    {
        "adds p and q instead of subtracting": ("(p - q)", "(p + q)"),
        "divides every number by itself": ("left / total", "left / left"),
        "sums over the rows instead of over the tokens of a row": ("dim=-1", "dim=0"),
    },
)

VERIFY = wrong_versions(
    verify_chain,
    {
        "gives accept_rule p and q in the wrong order": ("accept_rule(p[:-1], q,", "accept_rule(q, p[:-1],"),
        "gives residual p and q in the wrong order": (
            "residual(p[n : n + 1], q[n : n + 1])",
            "residual(q[n : n + 1], p[n : n + 1])",
        ),
        "divides 0 by 0 where p is q up to rounding and the draft is rejected all the same": (
            "residual(p[n : n + 1], q[n : n + 1])",
            "(left := (p[n : n + 1] - q[n : n + 1]).clamp(min=0)) / left.sum()",
        ),
        "leaves out the last accepted draft": ("[*drafts[:n], ", "[*drafts[: max(0, n - 1)], "),
    },
)
