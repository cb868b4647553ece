"""Mutants of lesson 10's references that are equivalent to the reference, and why (see `minillm.teaching.mutants`)."""

TWO_AXES = "the rows have two axes: axis 1 is axis -1"
READS_FEWER = "the rows that drafts do not index are not read"
A_NUMBER = "a tensor of one number compares like the number"
LAST_ROW = "row n is the last row of p here"

_LAST = "last = residual(p[n:n + 1], q[n:n + 1]) if n < len(drafts) else p[n:n + 1]"
_CHANCES = "chances = accept_rule(p[:-1], q, torch.tensor(drafts)).tolist()"
_PX, _QX = (f"{row}_x = {row}.gather(-1, x[..., None]).squeeze(-1)" for row in "pq")

EQUIVALENT = {
    "l10.accept_rule": {f"{line} [-1 -> 1]{number}": TWO_AXES for line in (_PX, _QX) for number in ("", " #2")},
    "l10.residual": {"total = left.sum(dim=-1, keepdim=True) [-1 -> 1]": TWO_AXES},
    "l10.verify_chain": {
        f"{_CHANCES} [{_CHANCES.removeprefix('chances = ')} -> accept_rule(p[:-1], q, torch.tensor(drafts))]": A_NUMBER,
        f"{_CHANCES} [:-1 -> :]": READS_FEWER,
        f"{_LAST} [n:n + 1 -> n:]": LAST_ROW,
        f"{_LAST} [n:n + 1 -> n:n + 1 + 1]": LAST_ROW,
        f"{_LAST} [1 -> 2]": LAST_ROW,
    },
}
