"""Less repetition in greedy text: a short stage after the decay (unlikelihood: Welleck et al. 2020, section 5).

A small model's greedy text soon repeats a line for ever, because each repetition makes the next one more likely. Here
the model writes, and unlearns to go round in circles:

    own text      greedy continuations of prompts from the corpus, by the model as it is now
    its loss      -log(1 - p(x)) for each token x with which the text goes round in a circle: x belongs to the second
                  round of a short one or to the third round of a longer one, x was a choice the first time, and x is
                  likely; no loss for the other tokens
    real code     ordinary cross-entropy, in the other half of these rows and in longer ones, so that the model stays a
                  model of code and uses all of its context

No penalty is needed when text is generated. The model writes anew after every few steps, because what it repeats
changes as it learns.

It costs: to copy what was there before is also what a model of code must do. Real code goes round in such circles at
3.7% of its tokens, and in third rounds at 0.6%; all third occurrences of 8 tokens are 2.9%, second ones 7.8% (held-out
files, rows of 256, choices or not).
Tried on the decayed model of 60.6M tokens (64 greedy continuations of 128 tokens; 98,304 held-out tokens in rows of
512; held-out code itself repeats 3.5%):

    unlearned                        tokens   repeated   bits per byte
    nothing                               0        66%           0.962
    third occurrences                 0.65M        56%           1.002
    second occurrences                0.65M        46%           1.020
    circles                           0.65M        51%           1.000
    circles                            2.5M        45%           0.986
    circles, short ones at once        2.5M        41%           0.996
    the same, longer                   6.0M        36%           0.985

"Circles" are third rounds; "short ones at once" is the rule above, and a longer stage gains on both sides. All rows had
256 tokens. What that does to long contexts was seen later, on the decayed model of 87.7M tokens (512 continuations; the
loss in nats on held-out files, at their positions 500 to 999 and 3,000 to 3,999):

    unlearned                        tokens   repeated   bits per byte   500 to 999   3,000 to 3,999
    nothing                               0        70%           0.863        1.699            1.583
    in rows of 256 alone               6.0M        36%           0.882        1.819            1.874
    with longer rows (this stage)      6.0M        40%           0.852        1.651            1.527
    the same, extrapolated to 1.1      6.0M        33%           0.862        1.663            1.535

A model that unlearns to repeat in rows of 256 also copies less from far away, unless long rows of real code keep that
up. The last line is the recipe (`recipes.EXTRAPOLATION`); the card of the bundled target says what it gave there, after
more tokens.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.models.decoder import Decoder
from minillm.training.compiling import Compiled
from minillm.training.continuations import PROMPT_LENGTH, continue_rows, exported, new_writer
from minillm.training.data import Batches
from minillm.training.precision import forward_dtype, forward_precision
from minillm.training.pretrain import dense_logits
from minillm.training.state_files import write_array

SPAN = 8
"""Tokens of a span that must not be repeated."""
STEPS_PER_WRITING = 8
"""Steps with own text that share the texts of one writing."""
WRITINGS_KEPT = 16
"""The last writings that stay on disk. An interrupted run needs those since its saved state; where they are gone, the
model as it is then writes others."""
SHORT = 40
"""Tokens of a round that is unlearned when it comes for the second time. A longer one is unlearned from its third time
on, if nothing came in between."""
SURE = 0.8
"""A token that was at least so likely when its span came for the first time was no choice: how a name goes on, or what
the syntax demands. It may be repeated."""
ENOUGH = 0.3
"""A repeated token that is less likely than this is left alone: greedy text will not go on with it."""
WEIGHT = 1.0
"""Weight of the unlearned tokens' loss."""
NO_LOSS = torch.iinfo(torch.int64).min
"""A target whose token is neither learned nor unlearned."""


class OwnText:
    """Batches with rows of `text` in the first half and the model's own text in the second, where rows have the
    shortest of `lengths`; longer rows are all of `text`. The steps cycle through `lengths`, as in `Recipe`.

    A negative target -1 - x says that token x should be less likely there.

    The texts of a writing serve several steps, in which the model changes. They are therefore kept in `folder`, where
    an interrupted run finds them again; without a folder, only in memory."""

    def __init__(
        self, text: Batches, model: Decoder, tokenizer: Path, lengths: tuple[int, ...], folder: Path | None = None
    ) -> None:
        self.text, self.model, self.tokenizer, self.lengths, self.folder = text, model, tokenizer, lengths, folder
        self._written: dict[int, tuple[Tensor, Tensor]] = {}
        """The texts of one writing and what is unlearned of them, by the number of the writing."""

    def batch(self, step: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each `[rows, length]`, int64."""
        inputs, targets = self.text.batch(step, rows, length)
        if length > min(self.lengths):
            return inputs, targets
        number, part = divmod(self._own_steps_before(step), STEPS_PER_WRITING)
        own = rows // 2
        mine = slice(part * own, (part + 1) * own)
        texts, unlearn = self._texts(number, own * STEPS_PER_WRITING, length + 1)
        inputs[rows - own :] = texts[mine, :-1]
        targets[rows - own :] = unlearn[mine, 1:]
        return inputs, targets

    def _own_steps_before(self, step: int) -> int:
        """How many of the first `step` steps have text of the model's own."""
        cycles, rest = divmod(step, len(self.lengths))
        return sum(cycles + (at < rest) for at, length in enumerate(self.lengths) if length == min(self.lengths))

    def _texts(self, number: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        if number not in self._written or self._written[number][0].shape != (rows, length):
            self._written = {number: self._kept(number, rows, length) or self._write(number, rows, length)}
        return self._written[number]

    def _write(self, number: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        device = self.model.embed_tokens.weight.device
        prompts, _ = self.text.batch(number, rows, PROMPT_LENGTH)
        with exported(self.model, self.tokenizer) as checkpoint:
            # Plain PyTorch: compiled kernels or captured graphs do not pay for themselves in a single writing.
            writer = new_writer(checkpoint, length, str(device), enforce_eager=device.type == "cuda")
        texts = continue_rows(writer, prompts, length, torch.zeros(rows), seed=number)
        found = texts, unlearned(texts, chosen(fast_copy(self.model), texts.to(device)).cpu())
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_array(self._file(number), torch.stack(found).numpy())
            self._file(number - WRITINGS_KEPT).unlink(missing_ok=True)
        return found

    def _kept(self, number: int, rows: int, length: int) -> tuple[Tensor, Tensor] | None:
        """The texts of a writing that an interrupted run has left, if there are any of this shape."""
        if self.folder is None or not self._file(number).exists():
            return None
        both = torch.from_numpy(np.load(self._file(number)))
        return (both[0], both[1]) if both.shape == (2, rows, length) else None

    def _file(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{number}.npy"


def fast_copy(model: Decoder) -> Decoder:
    """A copy of `model` in the arithmetic of training, which in bf16 is twice as fast."""
    return copy.deepcopy(model).eval().to(forward_dtype(model.embed_tokens.weight.device.type))


@torch.no_grad()
def chosen(model: Decoder, texts: Tensor, rows: int = 8) -> Tensor:
    """Whether each token of `texts` (`[rows, length]`) was a choice: less likely than `SURE`, given those before it.
    Returns the same shape, bool; the first token of a row is one. `rows` are computed at a time."""
    found = torch.ones_like(texts, dtype=torch.bool)
    for part, some in zip(texts.split(rows), found.split(rows), strict=True):
        logits = dense_logits(model, part[:, :-1].contiguous()).float().unflatten(0, (len(part), -1))
        some[:, 1:] = logits.softmax(-1).gather(2, part[:, 1:, None]).squeeze(2) < SURE
    return found


def unlearned(texts: Tensor, chosen: Tensor) -> Tensor:
    """For each token x of `texts` (`[rows, length]`) behind the prompt: -1 - x if the row goes round in a circle there
    (see above) and x was a choice the first time (`chosen`, the same shape), else `NO_LOSS`. Returns the same shape."""
    found = torch.full_like(texts, NO_LOSS)
    for row, tokens in enumerate(texts.tolist()):
        ends: dict[tuple[int, ...], list[int]] = {}
        for end in range(SPAN, len(tokens) + 1):
            earlier = ends.setdefault(tuple(tokens[end - SPAN : end]), [])
            if earlier and end > PROMPT_LENGTH and chosen[row, earlier[0] - 1]:
                period = end - earlier[-1]
                start = end - 1 - 2 * period
                twice = start >= 0 and tokens[start : end - 1 - period] == tokens[start + period : end - 1]
                if period <= SHORT or twice:
                    found[row, end - 1] = -1 - tokens[end - 1]
            earlier.append(end)
    return found


class UnlikelihoodLoss:
    """The loss for `Trainer`."""

    def __init__(self) -> None:
        self._loss = Compiled(unlikelihood_loss)

    def __call__(self, model: Decoder, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of a batch; `inputs`, `targets`: `[rows, length]`."""
        return self._loss(model, inputs, targets)


def unlikelihood_loss(model: Decoder, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over all tokens: -log p(x) for a target x, -log(1 - p(x)) for -1 - x, 0 for `NO_LOSS`."""
    with forward_precision(inputs.device.type):
        logits = dense_logits(model, inputs)
    none = targets == NO_LOSS
    ids = torch.where(none, 0, torch.where(targets < 0, -1 - targets, targets))
    log_p = F.log_softmax(logits.float(), dim=-1).gather(1, ids.flatten()[:, None]).view_as(targets)
    unlearn = -torch.log1p(-log_p.exp().clamp(max=1 - 1e-5))
    unlearn = WEIGHT * torch.where(log_p > math.log(ENOUGH), unlearn, 0.0)
    return torch.where(none, 0.0, torch.where(targets < 0, unlearn, -log_p)).mean()
