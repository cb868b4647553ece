"""Blocks of an engine's pool that no request owns: to compute keys and values, read them, write them, and leave them to
the prefix cache.

    with Scratch(llm, num_tokens) as scratch:
        scratch.write(span)                      keys and values from elsewhere
        scratch.forward(token_ids, start)        the model, over all that is there
        scratch.read(start, end)                 what it stored
        scratch.publish(token_ids, salt)         from now on, requests with this prefix and salt find it

Keys and values that are not those the model would compute (moved, loaded without their context) are published under a
`cache_salt` of their own. So a request gets them only if it names the salt, and all others stay exact. If the pool
evicts such a block, a later request computes it again, over what is left of the prefix: exactly, once all is evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from minillm.batch import Segment
from minillm.cache.prefix import extend_block_hashes
from minillm.errors import PromptError, RequestTooLargeError, UnsupportedError
from minillm.input_processor import check_token_ids
from minillm.llm import LLM
from minillm.reuse.kv_span import KVSpan


def check_prefix_caching(llm: LLM) -> None:
    """Raise `UnsupportedError` if no request could find published keys and values."""
    if not llm.engine.scheduler.config.enable_prefix_caching:
        raise UnsupportedError(
            "with enable_prefix_caching=False no request can find keys and values that are reused; leave it out"
        )


class Scratch:
    """Room for `num_tokens` tokens in the pool of `llm`. No step runs meanwhile.

    Raises `UnsupportedError` for a cache layout that does not store unquantised rows in blocks or is split over several
    processes, `RequestTooLargeError` if the pool has too few free blocks.
    """

    def __init__(self, llm: LLM, num_tokens: int) -> None:
        self.engine, self.num_tokens = llm.engine, num_tokens
        self.runner, self.pool = self.engine.runner, self.engine.pool
        rows = self.runner.cache.stored_rows()
        if rows is None or rows.format != "float":
            raise UnsupportedError(
                f"keys and values can be moved only in unquantised blocks, not in {type(self.runner.cache).__name__}; "
                "use cache layout 'paged' with kv_cache_dtype='auto'"
            )
        if (num_ranks := self.runner.model.num_ranks) > 1:
            raise UnsupportedError(
                f"with tensor_parallel_size={num_ranks} no process has all keys and values of a token, so they cannot "
                "be moved; use tensor_parallel_size=1"
            )
        if num_tokens > llm.max_model_len:
            raise RequestTooLargeError(
                f"{num_tokens} tokens are more than max_model_len={llm.max_model_len}; shorten the text"
            )
        [self._keys], [self._values] = rows.keys, rows.values
        self.blocks: list[int] = []

    def __enter__(self) -> Scratch:
        """Take the blocks."""
        self.engine.lock.acquire()
        try:
            needed = self.pool.blocks_for(self.num_tokens)
            taken = self.pool.allocate(needed)
            if taken is None:
                raise RequestTooLargeError(
                    f"{self.num_tokens} tokens need {needed} blocks, and {self.pool.num_free} of the pool's "
                    f"{self.pool.num_blocks} are free; wait for running requests to end, or raise num_kv_blocks "
                    "or kv_cache_memory_bytes"
                )
            self.blocks = taken
        except BaseException as problem:
            try:
                if not isinstance(problem, RequestTooLargeError):  # which took nothing
                    self._reclaim()
            finally:
                self.engine.lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Give the blocks back: published ones stay in the prefix cache until the pool needs them."""
        try:
            self.pool.free(self.blocks)
        except BaseException:
            self._reclaim()
            raise
        finally:
            self.blocks = []
            self.engine.lock.release()

    def _reclaim(self) -> None:
        """Free every block that no request owns: a listener of the engine raised, or an interrupt arrived, while blocks
        were taken or given back."""
        self.pool.reclaim(request.block_table for request in self.engine.requests.values())

    def write(self, span: KVSpan) -> None:
        """Store a span at its positions."""
        slots = self._slots(span.start, span.end)
        self._keys[:, slots] = span.keys.to(self._keys)
        self._values[:, slots] = span.values.to(self._values)

    def read(self, start: int, end: int, token_ids: Sequence[int]) -> KVSpan:
        """A copy of what is stored at positions `start` to `end` - 1, which are of these tokens."""
        slots = self._slots(start, end)
        return KVSpan(list(token_ids), start, self._keys[:, slots], self._values[:, slots])

    def forward(self, token_ids: Sequence[int], start: int) -> Tensor:
        """Run the model over these tokens at positions from `start` on; they attend to everything before them. Returns
        the logits of the last, `[vocab]`. Raises `PromptError` for a token that is not in the vocabulary, or if there
        are no tokens."""
        if not len(token_ids):  # NumPy's arrays have no truth value
            raise PromptError("0 tokens have no logits; give at least one")
        check_token_ids(token_ids, self.runner.model.config.vocab_size)
        most = self.engine.scheduler.config.max_num_batched_tokens
        cuts = [*range(0, len(token_ids), most), len(token_ids)]
        for first, last in pairwise(cuts):
            logits = self.runner.run([Segment(list(token_ids[first:last]), start + first, self.blocks)])
        return logits[-1]

    def copy_cached(self, token_ids: Sequence[int], salt: str = "") -> int:
        """Copy what the prefix cache has of these tokens. Returns the number of tokens, whole blocks."""
        size, count = self.pool.block_size, 0
        for own, block_hash in zip(self.blocks, extend_block_hashes([], token_ids, size, salt), strict=False):
            if (block := self.pool.find(block_hash)) is None:
                break
            self.runner.cache.copy_blocks([(block, own)])
            count += size
        return count

    def publish(self, token_ids: Sequence[int], salt: str) -> None:
        """Let requests with this salt find the full blocks of these tokens, which are all stored."""
        hashes = extend_block_hashes([], token_ids, self.pool.block_size, salt)
        for block, block_hash in zip(self.blocks, hashes, strict=False):
            self.pool.register(block, block_hash)  # no effect if such a block is there: requests may be reading it

    def _slots(self, start: int, end: int) -> Tensor:
        size = self.pool.block_size
        found = [self.blocks[at // size] * size + at % size for at in range(start, end)]
        return torch.tensor(found, dtype=torch.int64, device=self._keys.device)
