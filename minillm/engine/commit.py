"""Applying a verdict to a request: append tokens and text, record log-probabilities, end the request at a stop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
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
        _append_output(request, token, request.num_output_tokens)
        if request.finished:
            break
    return committed


def commit_again(request: Request) -> None:
    """After an interrupt inside `commit`: derive text and end anew from all output tokens, unless they are whole."""
    if request.num_detokenized_tokens == request.num_output_tokens or request.finish_reason == "abort":
        return
    request.num_detokenized_tokens, request.text = 0, ""
    request.finish_reason = request.stop_reason = None
    if request.detokenizer:
        request.detokenizer.restart()
    for count, token in enumerate(request.output_token_ids, start=1):
        _append_output(request, token, count)
        if request.finished:
            break


def _append_output(request: Request, token: int, count: int) -> None:
    """Add the text of `token`, output token number `count`, and end the request if it ends there."""
    _append_text_and_check_stop(request, token, count)
    if request.finished:
        if request.detokenizer and not isinstance(request.stop_reason, str):
            request.text += request.detokenizer.flush()
        del request.logprobs[count:]  # those of accepted drafts behind the end
    request.num_detokenized_tokens = count


def _append_text_and_check_stop(request: Request, token: int, count: int) -> None:
    """Add the token's text; end the request at a stop string, a stop token or the length limit, in this order.

    As in vLLM, the text of a stop token is left out, and completes no stop string, unless `include_stop_str_in_output`;
    and there is no stop within the first `min_tokens` tokens.
    """
    params, seen = request.params, len(request.text)
    may_stop = count > params.min_tokens
    ends = may_stop and token in request.stop_ids
    if request.detokenizer and (params.include_stop_str_in_output or not ends):
        request.text += request.detokenizer.append(token)
    if may_stop and params.stop and (found := _find_stop(request, seen)) is not None:
        stop, at = found
        request.text = request.text[: at + len(stop) * params.include_stop_str_in_output]
        request.finish_reason, request.stop_reason = "stop", stop
    elif ends:
        request.finish_reason = "stop"
        request.stop_reason = None if request.is_end_of_text(token) else token
    elif count >= request.max_tokens:
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
    request.logprobs += _rows(logprobs_of(chosen), verdict.token_ids, request.params.logprobs, tokenizer)


def record_prompt_logprobs(item: Scheduled, logits: Tensor, tokenizer: Tokenizer) -> None:
    """Note the log-probabilities of the prompt tokens that follow those of this chunk, if they were asked for. Row j of
    `logits` follows token `start + j`."""
    if not item.wants_prompt_logprobs:
        return
    request = item.request
    wanted = request.params.prompt_logprobs
    last = min(item.start + item.num_tokens, request.num_prompt_tokens - 1)
    tokens = request.token_ids[item.start + 1 : last + 1]
    rows = _rows(logprobs_of(logits[: last - item.start]), tokens, wanted, tokenizer)
    request.prompt_logprobs.update(enumerate(rows, start=item.start + 1))


def _rows(logprobs: Tensor, tokens: Sequence[int], count: int, tokenizer: Tokenizer) -> list[LogprobRow]:
    """For each row of `logprobs` (`[len(tokens), vocab]`) its token, then its `count` most likely tokens (-1: all)."""
    vocab = logprobs.shape[1]
    values, ids = logprobs.topk(vocab if count < 0 else min(count, vocab))
    chosen = logprobs.gather(1, torch.tensor(tokens, dtype=torch.int64, device=logprobs.device)[:, None])
    ranks = (logprobs > chosen).sum(1) + 1
    columns = [column.tolist() for column in (chosen[:, 0], ranks, values, ids)]
    rows = []
    for token, own, rank, likely, likely_ids in zip(tokens, *columns, strict=True):
        row = {token: Logprob(own, rank, tokenizer.token_string(token))}
        for place, (i, value) in enumerate(zip(likely_ids, likely, strict=True), start=1):
            row[i] = Logprob(value, place, tokenizer.token_string(i))
        rows.append(row)
    return rows
