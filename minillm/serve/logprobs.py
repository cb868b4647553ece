"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence

from minillm.outputs import Logprob
from minillm.serve.responses import ChatLogprobs, ChosenLogprob, CompletionLogprobs, TokenLogprob
from minillm.tokenizer import Tokenizer

Row = dict[int, Logprob]
"""The chosen token first, then the most likely ones."""
LOWEST = -9999.0
"""JSON has no minus infinity; vLLM writes this too."""


def completion_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], rows: Sequence[Row | None], offset: int = 0
) -> CompletionLogprobs:
    """For `/v1/completions`. `offset`: where the text of the first token begins in the choice."""
    tokens = [tokenizer.token_string(token) for token in token_ids]
    offsets = [offset]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    return CompletionLogprobs(
        text_offset=offsets[: len(tokens)],
        token_logprobs=[_value(row[token]) if row else None for token, row in zip(token_ids, rows, strict=True)],
        tokens=tokens,
        top_logprobs=[{each.decoded_token: _value(each) for each in row.values()} if row else None for row in rows],
    )


def chat_logprobs(tokenizer: Tokenizer, token_ids: Sequence[int], rows: Sequence[Row], num_top: int) -> ChatLogprobs:
    """For `/v1/chat/completions`: of each row the chosen token and the `num_top` most likely ones (-1: all)."""
    content = []
    for token, row in zip(token_ids, rows, strict=True):
        ranked = sorted(row.items(), key=lambda item: item[1].rank)
        top = [_entry(tokenizer, *item) for item in (ranked if num_top < 0 else ranked[:num_top])]
        content.append(ChosenLogprob(**_entry(tokenizer, token, row[token]).model_dump(), top_logprobs=top))
    return ChatLogprobs(content=content)


def _entry(tokenizer: Tokenizer, token_id: int, logprob: Logprob) -> TokenLogprob:
    return TokenLogprob(
        token=logprob.decoded_token, logprob=_value(logprob), bytes=list(tokenizer.token_bytes(token_id))
    )


def _value(logprob: Logprob) -> float:
    return max(logprob.logprob, LOWEST)
