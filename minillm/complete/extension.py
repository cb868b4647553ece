"""The server extension: two addresses below `/minillm/complete`, for users that Jupyter has let in."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING

from jupyter_server.utils import url_path_join

from minillm.complete import ON
from minillm.complete.handlers import CompletionHandler, LazyCompleter, PanelHandler

if TYPE_CHECKING:
    from jupyter_server.serverapp import ServerApp


def _load_jupyter_server_extension(server_app: ServerApp) -> None:
    """Register the handlers. Nothing is loaded before the first request."""
    base, completer = server_app.web_app.settings["base_url"], LazyCompleter()
    atexit.register(completer.shutdown)  # Jupyter tells only an `ExtensionApp` that it stops
    options = {"completer": completer}
    server_app.web_app.add_handlers(
        ".*$",
        [
            (url_path_join(base, "minillm", "complete"), CompletionHandler, options),
            (url_path_join(base, "minillm", "complete", "panel"), PanelHandler, options),
        ],
    )
    page = server_app.web_app.settings.setdefault("page_config_data", {})
    page["minillmComplete"] = "on" if os.environ.get(ON) == "1" else "off"
