"""Measures the pictures of a notebook in a browser: every box of text, and the picture and the page around it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

PLOTLY = "application/vnd.plotly.v1+json"
THEMES = {"light": "#ffffff;color:#111", "dark": "#111111;color:#eee"}
MEASURE = """() => {
  const shrink = box => {  // the box of a line is taller than its letters
    const h = box.height;
    return {left: box.left + 1, right: box.right - 1, top: box.top + 0.24 * h, bottom: box.bottom - 0.22 * h};
  };
  const measured = [];
  for (const place of document.querySelectorAll('.picture')) {
    const roots = [...place.querySelectorAll('svg')].filter(svg => !svg.parentElement.closest('svg'));
    const frames = place.dataset.kind === 'plotly' ? [place] : roots;
    for (const frame of frames) {
      const walker = document.createTreeWalker(frame, NodeFilter.SHOW_TEXT), texts = [];
      const owners = new Map([...frame.querySelectorAll('text')].map((text, i) => [text, i]));
      while (walker.nextNode()) {
        const node = walker.currentNode, text = node.parentElement.closest('text');
        if (!text || !node.data.trim() || node.parentElement.closest('title, desc, defs')) continue;
        const style = getComputedStyle(node.parentElement);
        if (style.visibility === 'hidden' || style.opacity === '0' || style.fill === 'none') continue;
        const turned = /rotate\\((?!0[,)])/.test(text.parentElement.getAttribute('transform') || '')
          || /rotate\\((?!0[,)])/.test(text.getAttribute('transform') || '');
        const range = document.createRange();
        range.selectNodeContents(node);
        const around = range.getBoundingClientRect();
        if (around.width < 1) continue;
        texts.push({text: node.data.trim(), owner: owners.get(text),
                    turned, box: shrink(around), fill: style.fill});
      }
      const box = frame.getBoundingClientRect();
      const plot = frame.querySelector('.main-svg'), paper = frame.querySelector('rect');
      const ground = plot ? getComputedStyle(plot).backgroundColor : paper ? getComputedStyle(paper).fill : '';
      measured.push({name: place.dataset.name, kind: place.dataset.kind, texts,
        box: {left: box.left, right: box.right, top: box.top, bottom: box.bottom},
        room: place.getBoundingClientRect().right, paper: ground});
    }
  }
  return measured;
}"""
DRAW = """figures => Promise.all(figures.map(([id, figure]) => Plotly.newPlot(
  document.getElementById(id), figure.data, figure.layout, {staticPlot: true, responsive: true})))"""


@dataclass(frozen=True)
class Shown:
    """One picture of a notebook: the cell it is in, and its SVG or HTML, or its plotly figure."""

    name: str
    html: str = ""
    figure: dict[str, Any] | None = None


def pictures_of(notebook: Path) -> Iterator[Shown]:
    """All pictures in the outputs of a notebook, a chart both as SVG and as plotly figure."""
    for number, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"]):
        for output in cell.get("outputs", []):
            data = {
                kind: value if isinstance(value, dict) else "".join(value)
                for kind, value in output.get("data", {}).items()
            }
            html = data.get("text/html") if "<svg" in data.get("text/html", "") else data.get("image/svg+xml")
            if html:
                yield Shown(f"{notebook.stem}, cell {number}", html)
            if PLOTLY in data:
                yield Shown(f"{notebook.stem}, cell {number}", figure=data[PLOTLY])


def open_pictures(page: Page, shown: list[Shown], plotly: Path) -> None:
    """Put all of them into the page, instead of what it showed before."""
    places = [
        f'<div class="picture" id="p{i}" data-name="{one.name}" data-kind="{"plotly" if one.figure else "svg"}"'
        f' style="margin:0 0 12px">{one.html}</div>'
        for i, one in enumerate(shown)
    ]
    page.evaluate("html => { document.body.innerHTML = html; }", "".join(places))
    figures = [[f"p{i}", one.figure] for i, one in enumerate(shown) if one.figure]
    if figures and not page.evaluate("() => 'Plotly' in window"):
        page.add_script_tag(path=plotly)
    page.evaluate(DRAW, figures)


def faults(page: Page, width: int, theme: str) -> list[str]:
    """What is wrong in the open page at this width: texts on each other, texts or pictures that stick out, no paper."""
    page.evaluate("style => { document.body.style.cssText = style; }", f"margin:0 20px;background:{THEMES[theme]}")
    if page.viewport_size["width"] != width:
        page.set_viewport_size({"width": width, "height": 800})
        page.evaluate(
            "() => Promise.all([...document.querySelectorAll('.js-plotly-plot')].map(p => Plotly.Plots.resize(p)))"
        )
    found = []
    for picture in page.evaluate(MEASURE):
        where = f"{picture['name']} ({picture['kind']}, {width} px, {theme})"
        found += [f"{where}: {fault}" for fault in _faults_of(picture)]
    return found


def _faults_of(picture: dict[str, Any]) -> Iterator[str]:
    box, texts = picture["box"], picture["texts"]
    if box["right"] > picture["room"] + 1:
        yield f"the picture is cut off: it is {box['right'] - picture['room']:.0f} px wider than its place"
    if picture["paper"] != "rgb(255, 255, 255)":
        yield f"no white paper behind it, but {picture['paper'] or 'nothing'}"
    for i, one in enumerate(texts):
        if not one["text"].isascii() or not one["turned"]:
            a = one["box"]
            beside = a["left"] < box["left"] - 1 or a["right"] > box["right"] + 1
            if beside or a["top"] < box["top"] - 1 or a["bottom"] > box["bottom"] + 1:
                yield f"{one['text']!r} sticks out of its picture"
        for other in texts[i + 1 :]:
            if one["turned"] or other["turned"] or one["owner"] == other["owner"]:
                continue
            if _overlap(one["box"], other["box"]):
                yield f"{one['text']!r} lies on {other['text']!r}"


def _overlap(a: dict[str, float], b: dict[str, float]) -> bool:
    return a["left"] < b["right"] and b["left"] < a["right"] and a["top"] < b["bottom"] and b["top"] < a["bottom"]
