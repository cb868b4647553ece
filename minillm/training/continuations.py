"""The target's completions of corpus prompts, on which the draft is distilled and evaluated.

In speculative decoding, drafts always follow text that the target has committed, so this is the text to train on.
(DistillSpec, Zhou et al. 2023, finds that the data must come from the models themselves; it samples from the draft.)
"""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.models.fingerprint import fingerprint_of_model
from minillm.training.data import Batches
from minillm.training.export import EXPORTED
from minillm.training.stage_inputs import check_inputs
from minillm.training.state_files import write_array
from minillm.training.train_tokenizer import END_OF_TEXT_ID

PROMPT_LENGTH = 64
TEMPERATURES = (0.0, 0.5, 0.8, 1.0)
"""Temperatures of the rows of one part, in turn."""


class DenseCache:
    """A dense KV cache for rows of equal length, to generate many rows at once."""

    def __init__(self, config: ModelConfig, rows: int, length: int, like: Tensor) -> None:
        """For `rows` rows of up to `length` tokens; dtype and device are those of `like`."""
        shape = (config.num_layers, rows, config.num_kv_heads, length, config.head_dim)
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)
        self.rows = rows
        self.length = 0
        """Tokens per row before the current forward. The caller updates it."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: None = None) -> Tensor:
        """`q`, `k`, `v`: `[rows · n, heads, head_dim]`, the next `n` tokens of every row → like `q`."""
        q, k, v = (x.unflatten(0, (self.rows, -1)).transpose(1, 2) for x in (q, k, v))
        n, groups = q.shape[2], q.shape[1] // k.shape[1]
        new = slice(self.length, self.length + n)
        self.keys[layer, :, :, new], self.values[layer, :, :, new] = k, v
        all_k, all_v = self.keys[layer, :, :, : new.stop], self.values[layer, :, :, : new.stop]
        # The query heads that share a KV head become further queries of it, so no key is copied per head.
        grouped = q.unflatten(1, (-1, groups)).flatten(2, 3)
        causal = torch.ones(n, new.stop, dtype=torch.bool, device=q.device).tril(self.length)
        mask = None if n == 1 else causal.repeat(groups, 1)
        out = F.scaled_dot_product_attention(grouped, all_k, all_v, attn_mask=mask)
        return out.unflatten(2, (groups, n)).flatten(1, 2).transpose(1, 2).flatten(0, 1)


def bf16_copy(model: Decoder) -> Decoder:
    """A copy of `model` in bf16, the arithmetic of training: it writes about twice as many tokens per second."""
    return copy.deepcopy(model).eval().to(torch.bfloat16)


@torch.no_grad()
def continue_rows(model: Decoder, prompts: Tensor, length: int, temperatures: Tensor, seed: int) -> Tensor:
    """Complete each row of `prompts` (`[rows, prompt_length]`) up to `length` tokens.

    `temperatures`: `[rows]`; 0 is greedy. An end-of-text token does not stop a row: a new file begins, as in training.
    Returns `[rows, length]` int64, the same for the same arguments on the same machine.
    """
    rows = prompts.shape[0]
    weight = model.embed_tokens.weight
    device = weight.device
    generator = torch.Generator(device).manual_seed(seed)
    cache = DenseCache(model.config, rows, length, like=weight)
    tokens = torch.zeros(rows, length, dtype=torch.int64, device=device)
    temperatures = temperatures.to(device)
    tokens[:, : prompts.shape[1]] = prompts
    for end in tqdm(range(prompts.shape[1], length), desc="the target writes", unit=f"×{rows} tokens", leave=False):
        positions = torch.arange(cache.length, end, device=device).repeat(rows)
        hidden = model(tokens[:, cache.length : end].flatten(), positions, cache)
        logits = model.logits(hidden.view(rows, -1, hidden.shape[-1])[:, -1]).float()
        cache.length = end
        # The maximum of logits / temperature + Gumbel noise is a sample of the softmax.
        noise = -torch.empty_like(logits).exponential_(generator=generator).log()
        tokens[:, end] = (logits + noise * temperatures[:, None]).argmax(-1)
    return tokens.cpu()


def until_loop(tokens: list[int], span: int = 8, patience: int = 32) -> list[int]:
    """Cut `tokens` off where `patience` consecutive spans of `span` tokens have all occurred before.

    A small model's greedy text ends in loops. A draft learns them quickly, so the beginning of each loop is enough.
    """
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    for end in range(span, len(tokens) + 1):
        current = tuple(tokens[end - span : end])
        repeated = repeated + 1 if current in seen else 0
        seen.add(current)
        if repeated == patience:
            return tokens[:end]
    return tokens


def write_continuations(model: Decoder, text: Batches, folder: Path, parts: int, rows: int, length: int) -> None:
    """Write `folder/continuations.npy`: `parts` × `rows` texts of `length` tokens, prompt included, as one array.

    Duplicate texts are dropped, loops are cut off (`until_loop`), and an end-of-text token follows each text, as in the
    corpus, so `Windows(folder, "continuations")` can read it. Finished parts are kept; a later call continues there.
    Raises `TrainingError` if `folder` has the texts of another model.
    """
    check_inputs(folder, {"target": fingerprint_of_model(model, EXPORTED)})
    if (folder / "continuations.npy").exists():
        return
    writer = bf16_copy(model)
    temperatures = torch.tensor(TEMPERATURES).repeat(rows // len(TEMPERATURES) + 1)[:rows]
    files = [folder / f"part{number:03d}.npy" for number in range(parts)]
    for number, file in enumerate(tqdm(files, desc="continuations", unit=" parts")):
        if not file.exists():
            prompts, _ = text.batch(number, rows, PROMPT_LENGTH)
            written = continue_rows(writer, prompts, length, temperatures, seed=number)
            texts = dict.fromkeys(tuple(until_loop(row)) for row in written.tolist())
            write_array(file, np.array([token for text in texts for token in (*text, END_OF_TEXT_ID)], dtype=np.uint16))
    write_array(folder / "continuations.npy", np.concatenate([np.load(file) for file in files]))
