"""The target's completions of corpus prompts, on which the draft is distilled and evaluated.

In speculative decoding, drafts always follow text that the target has committed, so this is the text to train on.
(DistillSpec, Zhou et al. 2023, finds that the data must come from the models themselves; it samples from the draft.)
minillm's own engine writes it.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from minillm.engine.assembly import DEFAULT_BLOCK_SIZE
from minillm.llm import LLM
from minillm.models.decoder import Decoder
from minillm.models.fingerprint import digest_of_weights
from minillm.sampling import SamplingParams
from minillm.training.data import Batches
from minillm.training.export import export
from minillm.training.stage_inputs import check_inputs
from minillm.training.state_files import write_array
from minillm.training.train_tokenizer import END_OF_TEXT_ID

PROMPT_LENGTH = 64
TEMPERATURES = (0.0, 0.5, 0.8, 1.0)
"""Temperatures of the rows of one part, in turn."""
ROWS_AT_ONCE = 128
"""Texts that are written in the same steps."""
SPAN = 8
"""Tokens of a span; text repeats itself where a span has occurred before."""
PATIENCE = 32
"""After so many repeated spans in a row, the rest of a text is a loop."""


@contextmanager
def exported(model: Decoder, tokenizer: Path) -> Iterator[Path]:
    """`model` as a checkpoint in a folder that is deleted after the block, with the tokenizer of a `tokenizer.json`."""
    with tempfile.TemporaryDirectory() as folder:
        export(model, tokenizer, Path(folder))
        yield Path(folder)


def new_writer(
    checkpoint: Path, length: int, device: str = "cpu", enforce_eager: bool = False, dtype: str = "auto"
) -> LLM:
    """The engine that continues texts up to `length` tokens, many at a time. `enforce_eager`: in plain PyTorch.
    `dtype`: "auto" is float32 on a CPU and that of the checkpoint on a GPU."""
    blocks = ROWS_AT_ONCE * math.ceil(length / DEFAULT_BLOCK_SIZE)
    return LLM(
        str(checkpoint),
        dtype=dtype,
        device=device,
        max_model_len=length,
        max_num_seqs=ROWS_AT_ONCE,
        num_kv_blocks=blocks,
        enable_prefix_caching=False,
        enforce_eager=enforce_eager,
    )


def continue_rows(writer: LLM, prompts: Tensor, length: int, temperatures: Tensor, seed: int) -> Tensor:
    """Complete each row of `prompts` (`[rows, prompt_length]`) up to `length` tokens.

    `temperatures`: `[rows]`; 0 is greedy. An end-of-text token does not stop a row: a new file begins, as in training.
    Returns `[rows, length]` int64, the same for the same arguments on the same machine.
    """
    rows, given = prompts.shape
    params = [
        SamplingParams(
            temperature=temperature,
            seed=seed * rows + row,
            max_tokens=length - given,
            ignore_eos=True,
            detokenize=False,
        )
        for row, temperature in enumerate(temperatures.tolist())
    ]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts.tolist()]
    written = [output.outputs[0].token_ids for output in writer.generate(asked, params, use_tqdm=False)]
    return torch.cat((prompts, torch.tensor(written)), dim=1)


def until_loop(tokens: list[int]) -> list[int]:
    """Cut `tokens` off where `PATIENCE` consecutive spans have all occurred before.

    A small model's greedy text ends in loops. A draft learns them quickly, so the beginning of each loop is enough.
    """
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    for end in range(SPAN, len(tokens) + 1):
        current = tuple(tokens[end - SPAN : end])
        repeated = repeated + 1 if current in seen else 0
        seen.add(current)
        if repeated == PATIENCE:
            return tokens[:end]
    return tokens


def write_continuations(
    checkpoint: Path, text: Batches, folder: Path, parts: int, rows: int, length: int, device: str = "cpu"
) -> None:
    """Write `folder/continuations.npy`: `parts` × `rows` texts of `length` tokens, prompt included, as one array.

    Duplicate texts are dropped, loops are cut off (`until_loop`), and an end-of-text token follows each text, as in the
    corpus, so `Windows(folder, "continuations")` can read it. Finished parts are kept; a later call continues there.
    Raises `TrainingError` if `folder` has the texts of another model.
    """
    check_inputs(folder, {"target": digest_of_weights(checkpoint)})
    if (folder / "continuations.npy").exists():
        return
    writer = new_writer(checkpoint, length, device)
    temperatures = torch.tensor(TEMPERATURES).repeat(rows // len(TEMPERATURES) + 1)[:rows]
    files = [folder / f"part{number:03d}.npy" for number in range(parts)]
    for number, file in enumerate(tqdm(files, desc="continuations", unit=" parts")):
        if not file.exists():
            prompts, _ = text.batch(number, rows, PROMPT_LENGTH)
            written = continue_rows(writer, prompts, length, temperatures, seed=number)
            texts = dict.fromkeys(tuple(until_loop(row)) for row in written.tolist())
            write_array(file, np.array([token for text in texts for token in (*text, END_OF_TEXT_ID)], dtype=np.uint16))
    write_array(folder / "continuations.npy", np.concatenate([np.load(file) for file in files]))
