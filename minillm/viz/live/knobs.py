"""Sliders for the tour: choose settings and press Run; the picture below the sliders shows the new run.

They are ipywidgets, which need a running kernel: a saved notebook cannot show them. So no lesson depends on them; each
also calls its function with numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets as widgets
from IPython.display import display

from minillm.errors import MinillmError


def knobs(run: Callable[..., None]) -> None:
    """Show knobs whose button calls `run(page_size=…, drafts=…, requests=…, pool_tokens=…, show=…)`.

    `show` is the argument of `LiveView`. For invalid settings, the text of the error appears below the sliders."""
    page_size = widgets.Dropdown(options=[1, 4, 16, 64], value=16, description="page size")
    drafts = widgets.IntSlider(4, 0, 8, description="drafts (γ)")
    requests = widgets.IntSlider(3, 1, 6, description="requests")
    pool_tokens = widgets.IntSlider(384, 128, 1024, step=64, description="pool, tokens")
    button = widgets.Button(description="Run", icon="play", button_style="primary")
    display(widgets.VBox([widgets.HBox([page_size, drafts]), widgets.HBox([requests, pool_tokens, button])]))
    # The picture is a separate output, so that a saved notebook keeps it.
    screen = display({"text/plain": "Press Run."}, raw=True, display_id=True)

    def show(frame: dict[str, str]) -> object:
        screen.update(frame, raw=True)
        return screen

    def on_click(_: widgets.Button) -> None:
        button.disabled = True
        chosen = {"page_size": page_size, "drafts": drafts, "requests": requests, "pool_tokens": pool_tokens}
        try:
            run(**{name: knob.value for name, knob in chosen.items()}, show=show)
        except MinillmError as problem:
            screen.update({"text/plain": f"{type(problem).__name__}: {problem}"}, raw=True)
        finally:
            button.disabled = False

    button.on_click(on_click)
