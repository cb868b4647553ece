"""Why a CUDA graph could not be captured."""

from __future__ import annotations


def capture_failure(problem: RuntimeError) -> Exception:
    """The error of the step that could not be captured. `problem`: what `torch.cuda.graph` raised; the end of a failed
    capture raises an error of its own, in whose context that of the step is.

    Raises the step's error if it is an interrupt.
    """
    reason = problem.__context__ or problem
    if not isinstance(reason, Exception):
        raise reason from None
    return reason
