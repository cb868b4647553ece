"""Runs axe-core on what minillm renders: the rules of WCAG 2.0 and 2.1, levels A and AA.

What is inside a picture is left out: a picture has the role `img` and a description, so a screen reader says that and
nothing inside, and axe does not know the colours of SVG. `text_contrast` measures those.
"""

from __future__ import annotations

from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Page

OPTIONS = {
    "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]},
    "resultTypes": ["violations"],
    "preload": False,
}
INSIDE_PICTURES = "svg[role=img] *"
RUN = """async ([context, options]) => {
  const {violations, passes, incomplete} = await axe.run(context, options);
  const tested = violations.length + passes.length;
  return [tested, violations.flatMap(rule => rule.nodes.map(node => [rule.id, node.target.join(" "), node.html]))];
}"""


def violations(page: Page, include: str = "html", exclude: tuple[str, ...] = ()) -> list[str]:
    """What is against the rules in the elements `include` of the page, without `exclude`; one line each."""
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(AXE_SCRIPT)
    page.add_style_tag(content="* { transition: none !important; }")  # a colour between two others is nobody's choice
    context = {"include": [[include]], "exclude": [[selector] for selector in (INSIDE_PICTURES, *exclude)]}
    tested, found = page.evaluate(RUN, [context, OPTIONS])
    assert tested, f"no rule applies to {include}"
    return [f"{rule}: {target}: {html[:200]}" for rule, target, html in found]
