"""Code completion in JupyterLab: a server extension (this folder) and its prebuilt front end (`labextension/`).

    a key ─▶ front end ─▶ POST /minillm/complete ─▶ `Completer` ─▶ AsyncLLM ─▶ ghost text
    next key: the front end closes the connection, and the request is aborted

Importing this package imports neither PyTorch nor the engine: a JupyterLab that never completes does not pay for them.
"""

from __future__ import annotations

from pathlib import Path

EXTENSION = "minillm.complete"
"""The name of the server extension."""
FRONT_END = Path(__file__).parent / "labextension"
"""The folder of the prebuilt front end, as JupyterLab's option `extra_labextensions_path` expects it."""
ON = "MINILLM_COMPLETE"
"""The variable that, as `1`, turns suggestions on where the user has not chosen in JupyterLab's settings."""


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    """Where Jupyter finds `_load_jupyter_server_extension`."""
    return [{"module": "minillm.complete.extension"}]
