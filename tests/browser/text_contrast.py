"""Measures in the browser how well the texts of pictures stand out from what is behind them."""

from __future__ import annotations

from playwright.sync_api import Page

LEAST = 3.4
"""Of a sign or a letter. Running text is darker; the signs of a verdict have its colour, and a shape beside it."""

SCRIPT = r"""
least => {
  const channel = v => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b) + 0.05;
  const numbers = colour => {
    const found = colour.match(/[\d.]+/g).map(Number);
    return colour.startsWith("color(") ? [255 * found[0], 255 * found[1], 255 * found[2], found[3] ?? 1] : found;
  };
  // Of an element with all that it is inside of.
  const opacity = (node, svg) => {
    let product = 1;
    for (; node !== svg; node = node.parentElement) product *= getComputedStyle(node).opacity;
    return product;
  };
  const over = (behind, colour, alpha) => behind.map((old, i) => old * (1 - alpha) + colour[i] * alpha);
  // Of a fill; of a hatch, which is a stripe on paper, the mean.
  const painted = fill => {
    if (!fill.includes("url")) return fill === "none" ? null : numbers(fill);
    const rects = [...document.getElementById(fill.match(/#([^"')]+)/)[1]).querySelectorAll("rect")];
    if (rects.length !== 2) return null;
    const [paper, stripe] = rects.map(rect => numbers(getComputedStyle(rect).fill));
    return over(paper, stripe, rects[1].width.baseVal.value / rects[0].width.baseVal.value);
  };
  const low = [];
  for (const svg of document.querySelectorAll("svg[data-testid]")) {
    if (!svg.getBoundingClientRect().width) continue;
    const shapes = [...svg.querySelectorAll("rect, path, circle")].filter(s => !s.closest("defs, pattern"));
    for (const text of svg.querySelectorAll("text, tspan")) {
      if (!text.textContent.trim() || (text.tagName === "text" && text.querySelector("tspan"))) continue;
      const box = text.getBoundingClientRect();
      if (!box.width) continue;
      const x = box.left + box.width / 2, y = box.top + box.height / 2;
      let behind = [255, 255, 255];
      for (const shape of shapes) {
        if (!(shape.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_FOLLOWING)) continue;
        const point = new DOMPoint(x, y).matrixTransform(shape.getScreenCTM().inverse());
        if (!shape.isPointInFill(point)) continue;
        const style = getComputedStyle(shape), colour = painted(style.fill);
        if (!colour) continue;
        const alpha = style.fillOpacity * opacity(shape, svg) * (colour[3] ?? 1);
        behind = over(behind, colour, alpha);
      }
      const own = getComputedStyle(text);
      const edge = own.stroke !== "none" && own.paintOrder.startsWith("stroke");
      const paper = edge ? numbers(own.stroke) : behind, ink = numbers(own.fill);
      const shown = over(paper, ink, own.fillOpacity * opacity(text, svg) * (ink[3] ?? 1));
      const [a, b] = [shown, paper].map(luminance);
      const contrast = Math.max(a, b) / Math.min(a, b);
      if (contrast < least) low.push(`${svg.dataset.testid}: "${text.textContent}" has ${contrast.toFixed(2)}`);
    }
  }
  return low;
}
"""


def low_contrasts(page: Page, least: float = LEAST) -> list[str]:
    """Every text of a picture on the page with a contrast below `least`."""
    return page.evaluate(SCRIPT, least)
