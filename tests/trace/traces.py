"""Traces written by hand: a script says what each request does, the writer keeps the books and emits the events."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile

from minillm.trace import (
    BlockCopied,
    BlocksAllocated,
    BlocksCached,
    BlocksEvicted,
    BlocksFreed,
    BlocksShared,
    DraftProposed,
    EngineStarted,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    StepFinished,
    StepRan,
    StepStarted,
    TokensCommitted,
    Trace,
    Work,
)


@dataclass
class Books:
    """What the writer knows about one request."""

    num_prompt: int
    num_tokens: int
    num_computed: int = 0
    table: list[int] = field(default_factory=list)
    filled: list[int] = field(default_factory=list)
    """Blocks that were full when last looked at, even if they are gone now."""


@dataclass(frozen=True)
class Part:
    """What one request does in one step."""

    request_id: str
    prefill: int = 0
    """Prompt tokens to run; 0: decode or, with drafts, verify."""
    drafts: tuple[str, ...] = ()
    accepted: int = 0
    token: str | None = "x"
    """The target's own token; None: the text ended before it."""
    finish: str | None = None


def slot_counts(pages):
    """How many slots of `pages` are in each state."""
    counts = Counter()
    for page in pages:
        for state, length in page.slots:
            counts[state] += length
    return counts


def prefill(request_id, num_tokens, token="x"):
    return Part(request_id, prefill=num_tokens, token=token)


def decode(request_id, token="x", finish=None):
    return Part(request_id, token=token, finish=finish)


def verify(request_id, drafts, accepted, token="x", finish=None):
    return Part(request_id, drafts=tuple(drafts), accepted=accepted, token=token, finish=finish)


class Script:
    """Writes a trace step by step. With `caching`, full blocks keep their contents until somebody needs the room."""

    def __init__(self, block_size=16, num_blocks=24, gamma=4, caching=False, layout="paged", seqs=8, budget=64):
        self.block_size = block_size
        self.free = list(range(num_blocks))
        self.books: dict[str, Books] = {}
        self.step_number = 0
        self.trace = Trace()
        draft_model = "minicoder-draft" if gamma else None
        sizes = block_size, num_blocks, 2048 * block_size, gamma
        self.caching = caching
        self.known: list[int] = []
        self.before = []
        """Sharings that the next step will tell of."""
        self.trace.append(EngineStarted("minicoder", draft_model, *sizes, layout, caching, seqs, budget))

    def add(self, request_id, prompt, num_tokens):
        self.books[request_id] = Books(num_tokens, num_tokens)
        self.trace.append(RequestAdded(request_id, prompt, list(range(num_tokens))))

    def step(self, *parts, preempt=(), waiting=None):
        self.step_number += 1
        emit = self.trace.append
        emit(StepStarted(self.step_number, len(parts), len(self.books) - len(parts) if waiting is None else waiting))
        for request_id in preempt:
            self._preempt(request_id)
        for event in self.before:
            emit(event)
        self.before.clear()
        for part in parts:
            self._copy_on_write(part)
            self._allocate(part)
        for part in parts:
            self._remember(part)
        for part in parts:
            if part.drafts:
                emit(DraftProposed(part.request_id, list(range(len(part.drafts))), list(part.drafts)))
        emit(StepRan(self.step_number, [self._work(part) for part in parts]))
        for part in parts:
            self._commit(part)
        for part in parts:
            self._roll_back(part)
        for part in parts:
            if part.finish:
                self._finish(part)
        emit(StepFinished(self.step_number, 0.02, 0.004, 0.015, len(self.free)))

    def interrupt(self, request_id):
        """An interrupted step costs `request_id` its blocks."""
        self._free(request_id, list(self.books[request_id].table), "interrupted")
        self.books[request_id].num_computed = 0

    def share(self, request_id, other):
        """In the next step `request_id` starts on the full blocks that `other` has, or had: a shared prefix."""
        theirs = self.books[other]
        full = theirs.table[: theirs.num_computed // self.block_size] or theirs.filled
        full = full[: (self.books[request_id].num_tokens - 1) // self.block_size]
        full = list(
            takewhile(lambda b: any(b in books.table for books in self.books.values()) or b in self.known, full)
        )
        self._take_over(request_id, full, len(full) * self.block_size, "prefix")

    def fork(self, request_id, other):
        """In the next step `request_id` starts on all prompt blocks of `other`, a completion of the same prompt."""
        num_prompt = self.books[other].num_prompt
        self._take_over(request_id, self.books[other].table[: self._blocks(num_prompt)], num_prompt - 1, "fork")

    def _take_over(self, request_id, block_ids, num_tokens, source):
        self.books[request_id].table = list(block_ids)
        self.books[request_id].num_computed = num_tokens
        self.free = [block_id for block_id in self.free if block_id not in block_ids]
        self.before.append(BlocksShared(request_id, list(block_ids), num_tokens, source))

    def _take(self, count):
        """Blocks to fill: those without contents first, then the cached ones, longest known first."""
        order = [b for b in self.free if b not in self.known] + [b for b in self.known if b in self.free]
        taken = order[:count]
        assert len(taken) == count, "the script needs more blocks than there are"
        evicted = [b for b in taken if b in self.known]
        if evicted:
            self.trace.append(BlocksEvicted(evicted))
        self.known = [b for b in self.known if b not in evicted]
        self.free = [b for b in self.free if b not in taken]
        return taken

    def _copy_on_write(self, part):
        books = self.books[part.request_id]
        index = books.num_computed // self.block_size
        if index >= len(books.table):
            return
        source = books.table[index]
        if any(source in other.table for other in self.books.values() if other is not books):
            [target] = self._take(1)
            books.table[index] = target
            self.trace.append(BlockCopied(part.request_id, source, target))

    def _remember(self, part):
        books = self.books[part.request_id]
        sure = books.num_computed + (part.prefill or 1)
        books.filled = books.table[: sure // self.block_size]
        new = [block_id for block_id in books.filled if block_id not in self.known]
        if self.caching and new:
            self.known += new
            self.trace.append(BlocksCached(part.request_id, new))

    def _num_tokens(self, part):
        return part.prefill or 1 + len(part.drafts)

    def _blocks(self, num_tokens):
        return -(-num_tokens // self.block_size)

    def _allocate(self, part):
        books = self.books[part.request_id]
        missing = self._blocks(books.num_computed + self._num_tokens(part)) - len(books.table)
        if missing > 0:
            taken = self._take(missing)
            books.table += taken
            self.trace.append(BlocksAllocated(part.request_id, taken))

    def _work(self, part):
        kind = "prefill" if part.prefill else "verify" if part.drafts else "decode"
        return Work(part.request_id, kind, self.books[part.request_id].num_computed, self._num_tokens(part))

    def _commit(self, part):
        books = self.books[part.request_id]
        start = books.num_computed
        books.num_computed += self._num_tokens(part)
        if books.num_computed < books.num_tokens:
            return
        texts, origins = list(part.drafts[: part.accepted]), ["accepted"] * part.accepted
        if part.token is not None:
            texts.append(part.token)
            full = part.accepted == len(part.drafts)
            origins.append("sampled" if not part.drafts else "bonus" if full else "recovered")
        if part.drafts:
            books.num_computed = start + len(texts)
        books.num_tokens += len(texts)
        judged = len(part.drafts), part.accepted
        ids = list(range(len(texts)))
        self.trace.append(TokensCommitted(part.request_id, ids, texts, origins, *judged, books.num_computed))

    def _roll_back(self, part):
        books = self.books[part.request_id]
        keep = self._blocks(books.num_computed)
        if len(books.table) > keep:
            self._free(part.request_id, books.table[keep:], "rolled_back")

    def _preempt(self, request_id):
        books = self.books[request_id]
        self.trace.append(RequestPreempted(request_id, books.num_computed))
        self._free(request_id, list(books.table), "preempted")
        books.num_computed = 0

    def _finish(self, part):
        books = self.books[part.request_id]
        self._free(part.request_id, list(books.table), "finished")
        output = books.num_tokens - books.num_prompt
        self.trace.append(RequestFinished(part.request_id, part.finish, books.num_prompt, output))

    def _free(self, request_id, block_ids, reason):
        books = self.books[request_id]
        books.table = books.table[: len(books.table) - len(block_ids)]
        others = {b for other in self.books.values() for b in other.table}
        self.free = sorted({*self.free, *(set(block_ids) - others)})
        # The tail is of use to the fewest, so it is forgotten first.
        cached = [b for b in reversed(block_ids) if b in self.known and b in self.free]
        self.known = [b for b in self.known if b not in cached] + cached
        self.trace.append(BlocksFreed(request_id, block_ids, reason))


def story(block_size=16, num_blocks=24):
    """Three requests: chunked prefill, decode, speculation with all outcomes, a preemption, and the finish."""
    s = Script(block_size, num_blocks)
    s.add("req-0", "def parse(line):\n    fields = line", 53)
    s.add("req-1", "for line in path.read_text()", 28)
    s.step(prefill("req-0", 32), prefill("req-1", 28, "    "))
    s.add("req-2", "class Stack:\n    def push(self", 44)
    s.step(prefill("req-0", 21, "."), verify("req-1", ["for", " line", " in", " f"], 3, " path"))
    s.step(prefill("req-2", 44), decode("req-0", "split"), verify("req-1", [".", "read", "_text", "()"], 4, "."))
    s.step(decode("req-2", ","), decode("req-0", "("), verify("req-1", ["split", "(", "x", "y"], 1, "lines"))
    s.step(decode("req-2", " x"), decode("req-0", '","'), verify("req-1", ["()", ":", "\n", " " * 8], 4, "if"))
    s.step(decode("req-0", ")"), verify("req-1", [" a", " <", " b", " &"], 0, " line"), preempt=["req-2"])
    s.step(decode("req-0", "\n"), verify("req-1", [".", "strip", "(", ":"], 2, "()", finish="stop"))
    s.step(prefill("req-2", 47, ")"), decode("req-0", "return", finish="length"))
    s.step(decode("req-2", ":", finish="stop"))
    return s.trace


def busy(num_requests=10, num_blocks=128, block_size=16, gamma=8, steps=12):
    """Many requests that speculate at once, some on a shared prefix."""
    s = Script(block_size, num_blocks, gamma, seqs=num_requests + 1, budget=1024)
    for i in range(num_requests):
        s.add(f"req-{i}", f"def function_{i}(first, second):\n    return", 37 + 31 * (i % 4))
    s.step(*(prefill(f"req-{i}", s.books[f"req-{i}"].num_prompt) for i in range(num_requests)))
    s.add("shared", "def function_0(first, third)", 60)
    s.share("shared", "req-1")
    s.step(prefill("shared", 60 - s.books["shared"].num_computed))
    for n in range(steps):
        drafts = [f" t{n}{j}" for j in range(gamma)]
        s.step(*(verify(f"req-{i}", drafts, (i * 5 + n * 3) % (gamma + 1), " own") for i in range(num_requests)))
    s.step(preempt=["req-3"])
    return s.trace


def sharing(num_blocks=16):
    """Two prompts with a common start, two completions each, on a small pool: hits, forks, copies, evictions."""
    s = Script(16, num_blocks, gamma=0, caching=True, seqs=4, budget=64)
    s.add("0#0", "class Stack:\n    def push(self", 60)
    s.add("0#1", "class Stack:\n    def push(self", 60)
    s.step(prefill("0#0", 60, " ,"))
    s.fork("0#1", "0#0")
    s.add("1#0", "class Stack:\n    def pop(self", 58)
    s.add("1#1", "class Stack:\n    def pop(self", 58)
    s.share("1#0", "0#0")
    s.step(decode("0#0", " item"), prefill("0#1", 1, "):"), prefill("1#0", 10, ")"))
    s.fork("1#1", "1#0")
    s.step(decode("0#0", ")"), decode("0#1", "\n"), decode("1#0", ":"), prefill("1#1", 1, "):"))
    for i in range(3):
        s.step(*(decode(r, f" t{i}") for r in ("0#0", "0#1", "1#0", "1#1")))
    s.step(decode("0#0", finish="length"), decode("0#1", finish="length"), decode("1#0"), decode("1#1"))
    s.step(decode("1#0", finish="length"), decode("1#1", finish="length"))
    s.add("2#0", "import re, sys, json\n", 180)
    s.step(prefill("2#0", 64))
    s.step(prefill("2#0", 64))
    s.step(prefill("2#0", 52, "def"))
    s.add("3#0", "class Stack:\n    def peek(self", 59)
    s.share("3#0", "1#0")
    s.step(decode("2#0"), prefill("3#0", 59 - s.books["3#0"].num_computed))
    s.step(decode("2#0", finish="length"), decode("3#0", finish="stop"))
    return s.trace
