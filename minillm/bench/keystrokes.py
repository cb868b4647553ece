"""From a key to the suggestion: code completion as JupyterLab uses it, without the browser.

A Jupyter server with the extension runs in a process of its own. This process types held-out code after 200 tokens of
context, one character at a time, and asks for 24 tokens at every key. (JupyterLab does not ask while only white space
is before the cursor on its line.) Time runs from sending the request to the parsed answer: HTTP, Jupyter, tokenising,
prompt, drafts, new tokens, text.

- `first key`: nothing of the code is in the prefix cache.
- `next key`: the code was there at the key before, so all but the last blocks are cached.
- `last of a burst`: eight keys at intervals of 60 ms, each closing the connection of the one before; the last is timed.

`CPU ms` is the processor time of the server's process, which does not depend on what else the machine does; for a burst
it is that of all eight keys.

The engine is that of `minillm lab --complete` (`minillm.complete.engine`), whatever `--model` and `--draft` name.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from minillm.bench.harness import Row, result
from minillm.bench.jupyter_process import JupyterProcess
from minillm.bench.latency import FEWEST, percentile
from minillm.bench.systems import draft_for
from minillm.complete.engine import DRAFT, MODEL
from minillm.errors import ConfigError, MinillmError
from minillm.hardware import usable_processors
from minillm.models.held_out import held_out_prompts

if TYPE_CHECKING:
    from rich.table import Table

FIRST, NEXT, BURST = "first key", "next key", "last of a burst"
CONTEXT_TOKENS, NEW_TOKENS = 200, 24
PROMPTS, KEYS = 20, 24
"""Texts, and characters typed into each."""
BURST_KEYS, INTERVAL_S = 8, 0.06
GOAL_MS = 100
"""A tenth of a second is about at once."""


class Typist:
    """Sends what the front end sends, and keeps the answers."""

    def __init__(self, server: JupyterProcess, new_tokens: int) -> None:
        self.server, self.new_tokens = server, new_tokens
        self.milliseconds: dict[str, list[float]] = {FIRST: [], NEXT: [], BURST: []}
        self.cpu_seconds = dict.fromkeys((FIRST, NEXT, BURST), 0.0)
        """Of the server's process. A burst's includes the requests that were cancelled."""
        self.answers: dict[str, list[dict[str, Any]]] = {FIRST: [], NEXT: [], BURST: []}

    def type(self, kind: str, *keys: tuple[str, str]) -> None:
        """Press keys, each with the text before and after the cursor; wait for the suggestion of the last.

        Raises `MinillmError` with the server's sentence if it refuses.
        """
        used = self.server.cpu_seconds
        for key in keys[:-1]:
            connection = self._send(*key)
            time.sleep(INTERVAL_S)
            connection.close()
        began = time.perf_counter()
        connection = self._send(*keys[-1])
        response = connection.getresponse()
        answer = json.loads(response.read())
        self.milliseconds[kind].append(1000 * (time.perf_counter() - began))
        self.answers[kind].append(answer)
        connection.close()
        self.cpu_seconds[kind] += self.server.cpu_seconds - used
        if response.status != 200:
            raise MinillmError(f"the server answered {response.status}: {answer.get('error', answer)}")

    def forget(self) -> None:
        """Drop what was measured so far, which was the warm-up."""
        for kind in (FIRST, NEXT, BURST):
            self.milliseconds[kind].clear()
            self.answers[kind].clear()
            self.cpu_seconds[kind] = 0.0

    def _send(self, prefix: str, suffix: str) -> HTTPConnection:
        body = json.dumps({"prefix": prefix, "suffix": suffix, "max_tokens": self.new_tokens})
        connection = HTTPConnection("127.0.0.1", self.server.port, timeout=300)
        connection.request("POST", "/minillm/complete", body, {"Authorization": f"token {self.server.token}"})
        return connection


def run(
    model: str = "minicoder", draft: str | None = None, prompts: int = PROMPTS, new_tokens: int = NEW_TOKENS
) -> dict[str, Any]:
    """Type into every text. Returns the result as JSON values. Raises the errors of `typed_texts`."""
    texts = typed_texts(model, prompts)
    draft = draft_for(model, draft)
    server = JupyterProcess({MODEL: model, **({DRAFT: draft} if draft else {})})
    try:
        typist = Typist(server, new_tokens)
        keys = keys_of(*texts[0])
        typist.type(FIRST, keys[0])
        typist.type(BURST, *keys[:BURST_KEYS])
        typist.forget()
        for number, text in enumerate(tqdm(texts, desc="typing", unit=" texts")):
            keys = keys_of(f"# {number}\n{text[0]}", text[1])  # unlike all before, so that nothing is cached
            typist.type(FIRST, keys[0])
            for key in keys[1:-BURST_KEYS]:
                typist.type(NEXT, key)
            typist.type(BURST, *keys[-BURST_KEYS:])
        peak = server.peak_memory
    finally:
        server.close()
    rows = [_row(typist, kind, peak) for kind in (FIRST, NEXT, BURST)]
    config = {
        "model": model,
        "draft": draft,
        "texts": prompts,
        "keys_per_text": KEYS,
        "context_tokens": CONTEXT_TOKENS,
        "new_tokens": new_tokens,
        "goal_ms": GOAL_MS,
        "processors": usable_processors(),
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
    }
    return result("completion", config, rows)


def table(outcome: dict[str, Any]) -> Table:
    """The rows for the terminal. All times but the goal's are milliseconds per suggestion."""
    from rich.table import Table

    shown = Table(title=f"{outcome['name']} on {outcome['hardware']['cpu']['name']}")
    goal = f"< {outcome['config']['goal_ms']} ms"
    for heading in ("key", "p50 ms", "p90 ms", goal, "in the engine", "CPU ms", "prompt", "cached", "new", "count"):
        shown.add_column(heading, justify="left" if heading == "key" else "right")
    for row in outcome["rows"]:
        values = row["config"]
        numbers = [row["p50_ms"], values["p90_ms"], values["engine_p50_ms"], values["cpu_ms"]]
        p50, p90, engine, cpu = (f"{number:.1f}" for number in numbers)
        counts = [f"{values[name]:.0f}" for name in ("prompt_tokens", "cached_tokens", "generated_tokens")]
        shown.add_row(
            row["system"], p50, p90, f"{values['under_goal']:.0%}", engine, cpu, *counts, str(values["suggestions"])
        )
    return shown


def typed_texts(model: str, count: int) -> list[tuple[str, str]]:
    """`count` pieces of held-out code, several prompts each, cut after 200 tokens: (before, after).

    Raises `ConfigError` for fewer than a percentile needs, or more than there are.
    """
    from minillm.models.hub import resolve
    from minillm.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(resolve(model))
    found, text = [], ""
    for prompt in held_out_prompts():  # one alone is short
        text += f"{prompt.prompt}\n\n\n"
        before = tokenizer.decode(tokenizer.encode(text)[:CONTEXT_TOKENS])
        after = text.removeprefix(before)
        if after != text and len(keys_of(before, after)) == KEYS:
            found.append((before, after))
            text = ""
    if not FEWEST <= count <= len(found):
        raise ConfigError(f"{count} texts were asked for; take {FEWEST} to {len(found)}")
    return found[:count]


def keys_of(before: str, after: str) -> list[tuple[str, str]]:
    """(text before the cursor, text after its line) for the first `KEYS` keys at which JupyterLab asks.

    It does not ask while a line is blank.
    """
    keys = []
    for end in range(1, len(after) + 1):
        prefix = before + after[:end]
        if prefix.rpartition("\n")[2].strip():
            keys.append((prefix, "\n" + after[end:].partition("\n")[2]))
        if len(keys) == KEYS:
            break
    return keys


def _row(typist: Typist, kind: str, peak: int | None) -> Row:
    times, answers = typist.milliseconds[kind], typist.answers[kind]
    median = statistics.median(times)

    def mean(name: str) -> float:
        return statistics.fmean(answer[name] for answer in answers)

    return Row(
        system=kind,
        baseline=None,
        ratio=None,
        ratio_min=None,
        ratio_max=None,
        tokens_per_s=1000 / median,
        p50_ms=median,
        peak_memory_bytes=peak,
        outputs_equal=None,
        config={
            "p90_ms": percentile(times, 0.9),
            "under_goal": sum(each < GOAL_MS for each in times) / len(times),
            "cpu_ms": 1000 * typist.cpu_seconds[kind] / len(times),
            "engine_p50_ms": statistics.median(answer["milliseconds"] for answer in answers),
            "prompt_tokens": mean("prompt_tokens"),
            "cached_tokens": mean("cached_tokens"),
            "generated_tokens": mean("new_tokens"),
            "suggestions": len(times),
        },
    )
