"""The HTML of the panel: how the newest suggestion was made."""

from __future__ import annotations

from html import escape

from minillm.complete.suggestion import Suggestion
from minillm.trace import Trace
from minillm.viz.draw.output import as_html, place
from minillm.viz.draw.plural import plural
from minillm.viz.pages.cache_pages import CachePagesView
from minillm.viz.speculation.acceptance import AcceptanceStrip


def panel_html(found: Suggestion, trace: Trace) -> str:
    """A line of facts, the suggestion, the acceptance strip, and the cache pages while the request held most of them.

    It contains no scripts.
    """
    pages = CachePagesView(trace, narrow=True)
    pictures = [AcceptanceStrip(trace, narrow=True).to_svg(), pages.to_svg(pages.most_informative_step())]
    # A browser drops a newline right behind <pre>, and a suggestion may begin with one.
    text = f"<pre>\n{escape(found.text)}</pre>" if found.text else "<p>The model suggests nothing here.</p>"
    return f"<p>{escape(facts(found))}</p>{text}{as_html([place(picture) for picture in pictures])}"


def facts(found: Suggestion) -> str:
    """The numbers of one suggestion, in a line."""
    how = "between the code before and after the cursor" if found.fills_gap else "after the code before the cursor"
    parts = [
        f"{plural(found.new_tokens, 'token')} in {found.milliseconds:.0f} ms {how}",
        f"{found.cached_tokens} of {found.prompt_tokens} prompt tokens were in the cache",
    ]
    if found.dropped_characters:
        parts.append(
            f"the code is longer than the model's context: its first {found.dropped_characters:,} characters were left "
            "out"
        )
    return "; ".join(parts) + "."
