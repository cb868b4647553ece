"""Applying a verdict to a request: append tokens and text, record log-probabilities, end the request at a stop."""

from __future__ import annotations

from torch import Tensor

from minillm.engine.scheduler import Scheduled
from minillm.outputs import Logprob
from minillm.request import LogprobRow, Request
from minillm.sampling import logprobs_of
from minillm.speculative.rejection_sampler import Verdict
from minillm.tokenizer import Tokenizer


def commit(request: Request, verdict: Verdict) -> list[int]:
    """Append the verdict's tokens one by one until one of them ends the request; returns those appended."""
    committed: list[int] = []
    for token in verdict.token_ids:
        request.token_ids.append(token)
        committed.append(token)
        _grow_text(request, token)
        if request.finished:
            break
    if request.finished and request.detokenizer and not isinstance(request.stop_reason, str):
        request.text += request.detokenizer.flush()
    del request.logprobs[request.num_output_tokens :]  # those of accepted drafts behind the end
    return committed


def _grow_text(request: Request, token: int) -> None:
    """Add the token's text; end the request at a stop token, a stop string or the length limit, in this order.

    As in vLLM, the text of the token that ends the request is left out unless `include_stop_str_in_output`, and none of
    the first `min_tokens` tokens ends it.
    """
    params, seen, count = request.params, len(request.text), request.num_output_tokens
    ends = count > params.min_tokens and token in request.stop_ids
    if request.detokenizer and (params.include_stop_str_in_output or not ends):
        request.text += request.detokenizer.append(token)
    if count > params.min_tokens:
        if ends:
            request.finish_reason = "stop"
            request.stop_reason = None if request.is_end_of_text(token) else token
            return
        if params.stop and (found := _find_stop(request, seen)) is not None:
            stop, at = found
            request.text = request.text[: at + len(stop) * params.include_stop_str_in_output]
            request.finish_reason, request.stop_reason = "stop", stop
            return
    if count >= request.max_tokens:
        request.finish_reason = "length"


def _find_stop(request: Request, seen: int) -> tuple[str, int] | None:
    """The stop string that ends first in the text after `seen` characters, and where it starts.

    Of those that end at the same character, the first of `stop`.
    """
    found = [
        (at, stop)
        for stop in request.params.stop_strings
        if (at := request.text.find(stop, max(0, seen - len(stop) + 1))) >= 0
    ]
    if not found:
        return None
    at, stop = min(found, key=lambda hit: hit[0] + len(hit[1]))
    return stop, at


def record_logprobs(item: Scheduled, verdict: Verdict | None, logits: Tensor, tokenizer: Tokenizer) -> None:
    """Note the raw log-probabilities of the tokens about to be committed, if they were asked for. `logits`: all rows of
    the request; the last `item.num_judged` chose tokens."""
    request = item.request
    if verdict is None or request.params.logprobs is None:
        return
    del request.logprobs[request.num_output_tokens :]
    judged = logits[len(logits) - item.num_judged :]
    chosen = judged[: len(verdict.token_ids)]
    if verdict.path is not None:  # of a tree: the row of the root, then those of the accepted nodes
        chosen = judged[[0, *(node + 1 for node in verdict.path)]]
    rows = logprobs_of(chosen)
    for row, token in zip(rows, verdict.token_ids, strict=True):
        request.logprobs.append(_row(row, token, request.params.logprobs, tokenizer))


def record_prompt_logprobs(item: Scheduled, logits: Tensor, tokenizer: Tokenizer) -> None:
    """Note the log-probabilities of the prompt tokens that follow those of this chunk, if they were asked for. Row j of
    `logits` follows token `start + j`."""
    if not item.wants_prompt_logprobs:
        return
    request = item.request
    wanted = request.params.prompt_logprobs
    last = min(item.start + item.num_tokens, request.num_prompt_tokens - 1)
    rows = logprobs_of(logits[: last - item.start])
    for position, row in enumerate(rows, start=item.start + 1):
        request.prompt_logprobs[position] = _row(row, request.token_ids[position], wanted, tokenizer)


def _row(row: Tensor, token: int, count: int, tokenizer: Tokenizer) -> LogprobRow:
    """`token`, then the `count` most likely tokens (-1: all) of one row of log-probabilities, `[vocab]`."""
    values, ids = row.topk(row.numel() if count < 0 else min(count, row.numel()))
    rank = int((row > row[token]).sum()) + 1
    found = {token: Logprob(float(row[token]), rank, tokenizer.token_text(token))}
    for place, (i, value) in enumerate(zip(ids.tolist(), values.tolist(), strict=True), start=1):
        found[i] = Logprob(value, place, tokenizer.token_text(i))
    return found
