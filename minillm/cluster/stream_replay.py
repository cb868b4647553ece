"""`StreamReplay`: a stream that goes on after its replica was lost.

The same request is sent to another replica, which generates the same text from the start, and what the client already
has is left out:

    first replica    d e f   f i b ( n ) :   ✗ lost
    second replica  (d e f   f i b ( n ) :)  \\n     r e t u r n   n
    the client has   d e f   f i b ( n ) :   \\n     r e t u r n   n

This is right only if the text is determined by the request: greedy, or sampled with a seed. The text is compared while
it is left out, so a replica that generates something else raises an error and is never joined to the beginning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from minillm.errors import EngineDeadError
from minillm.serve.responses import END

LATER_FIELDS = ("logprobs", "top_logprobs", "return_token_ids")
"""Fields that put more than text into a chunk; such a stream is not continued."""


def can_replay(body: Mapping[str, Any]) -> bool:
    """Whether a second answer to this streamed request has the same text, and nothing but text to leave out."""
    determined = body.get("temperature") == 0 or body.get("seed") not in (None, -1)  # -1: the engine chooses
    return determined and all(body.get(name) is None or body[name] is False for name in LATER_FIELDS)


class StreamReplay:
    """What the client has of each choice. `advance` takes the server-sent events of the first stream and of repeats."""

    def __init__(self) -> None:
        self._sent: dict[int, str] = {}
        """Choice → the text that the client has."""
        self._seen: dict[int, int] = {}
        """Choice → characters that the present replica has sent."""
        self._ended: set[int] = set()
        self._usage_sent = False
        """Whether the client has the chunk without choices, which has the token counts."""
        self._name: dict[str, Any] = {}
        """`id` and `created` of the first chunk, which all chunks of an answer share."""

    def restart(self) -> None:
        """The next event is the first one of another replica."""
        self._seen.clear()

    def advance(self, event: str) -> str | None:
        """What to send for `event`, which begins with `data: ` and ends with an empty line; None for nothing.

        Raises `EngineDeadError` if the text is not that of the first replica.
        """
        if event == END:
            return event
        chunk = json.loads(event.removeprefix("data: "))
        if "choices" not in chunk:
            return event  # an error
        if not self._name:
            self._name = {key: chunk[key] for key in ("id", "created")}
        if chunk["choices"]:
            chunk["choices"] = [choice for choice in chunk["choices"] if self._cut(choice)]
            if not chunk["choices"]:
                return None
        elif self._usage_sent:
            return None
        else:
            self._usage_sent = True
        return f"data: {json.dumps(chunk | self._name, ensure_ascii=False, separators=(',', ':'))}\n\n"

    def _cut(self, choice: dict[str, Any]) -> bool:
        """Leave out of `choice` what the client has. Returns whether anything is left."""
        index = choice["index"]
        holder, key = (choice["delta"], "content") if "delta" in choice else (choice, "text")
        text, is_first = holder.get(key) or "", index not in self._sent
        sent, begin = self._sent.get(index, ""), self._seen.get(index, 0)
        known = sent[begin : begin + len(text)]
        has_ended = choice.get("finish_reason") is not None
        goes_on = index in self._ended and len(text) > len(known)
        if not text.startswith(known) or goes_on or (has_ended and begin + len(text) < len(sent)):
            raise EngineDeadError(
                "the replica that answered was lost, and another one generated a different text; send the request again"
            )
        new = text[len(known) :]
        self._seen[index] = begin + len(text)
        self._sent[index] = sent + new
        holder[key] = new
        if "role" in holder and not is_first:
            del holder["role"]
        is_last = has_ended and index not in self._ended
        if is_last:
            self._ended.add(index)
        return bool(new) or is_first or is_last
