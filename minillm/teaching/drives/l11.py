"""What the cases of lesson 11 do with a loss: call it, and follow its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def loss_and_gradient(function: Callable[..., Any], target_logits: Tensor, draft_logits: Tensor) -> dict[str, object]:
    """The loss, and its gradient for the draft model's logits: None if there is none.

    Where p = q the loss alone: the minimum of p and q has a kink there, so any gradient depends on rounding.
    """
    with torch.enable_grad():
        loss = function(target_logits, draft_logits.requires_grad_())
        if torch.equal(target_logits, draft_logits):
            return {"loss": loss}
        gradient = None
        if isinstance(loss, Tensor) and loss.requires_grad:
            [gradient] = torch.autograd.grad(loss.sum(), draft_logits, allow_unused=True)
    return {"loss": loss, "gradient": gradient}
