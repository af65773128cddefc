"""The contrast of a page's texts, by WCAG 2."""

from __future__ import annotations

from typing import NamedTuple

from playwright.sync_api import Page


class Text(NamedTuple):
    """A visible text, the contrast that it has and the one that it needs."""

    text: str
    ratio: float
    needed: float


def texts_of(page: Page) -> list[Text]:
    """Return the visible texts of a page; of an open dialog, if there is one."""
    return [Text(*each) for each in page.evaluate(_TEXTS)]


def focus_contrast(page: Page) -> float:
    """Return the contrast of the focused element's mark to what is around it; 0 without a mark."""
    return float(page.evaluate(_FOCUS))


_COLORS = """
const parse = (color) => {
  const [red, green, blue, alpha = 1] = color.match(/[\\d.]+/g).map(Number);
  return [red, green, blue, alpha];
};
const mix = (over, under, alpha) => [0, 1, 2].map((i) => over[i] * alpha + under[i] * (1 - alpha));
const chain = (element) => element ? [element, ...chain(element.parentElement)] : [];
const ground = (element) => chain(element)
  .map((each) => parse(getComputedStyle(each).backgroundColor))
  .reduceRight((under, color) => mix(color, under, color[3]), [255, 255, 255]);
const light = (color) => {
  const [red, green, blue] = color.map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
};
const contrast = (one, other) => {
  const [dark, bright] = [light(one), light(other)].sort((a, b) => a - b);
  return (bright + 0.05) / (dark + 0.05);
};
"""
_TEXTS = (
    "() => {"
    + _COLORS
    + """
  const isVisible = (element) => {
    const { width, height } = element.getBoundingClientRect();
    return width > 1 && height > 1
      && element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  };
  const measure = (text, element, style) => {
    const opacity = chain(element).reduce((all, each) => all * getComputedStyle(each).opacity, 1);
    const color = parse(style.color);
    const behind = ground(element);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    return [text, contrast(mix(color, behind, color[3] * opacity), behind), isLarge ? 3 : 4.5];
  };
  const root = document.querySelector("dialog[open]") ?? document.body;
  const found = [];
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim();
    const element = walker.currentNode.parentElement;
    if (text && isVisible(element)) found.push(measure(text, element, getComputedStyle(element)));
  }
  for (const field of root.querySelectorAll("input, textarea, select")) {
    if (!isVisible(field)) continue;
    const part = field.value ? null : "::placeholder";
    const text = field.value || field.placeholder;
    if (text) found.push(measure(text, field, getComputedStyle(field, part)));
  }
  return found;
}"""
)
_FOCUS = (
    "() => {"
    + _COLORS
    + """
  const element = document.activeElement;
  const style = getComputedStyle(element);
  if (style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2) {
    const width = parseFloat(style.outlineWidth) + parseFloat(style.outlineOffset);
    const { left, top, right, bottom } = element.getBoundingClientRect();
    for (const each of chain(element.parentElement)) {
      if (getComputedStyle(each).overflow === "visible") continue;
      const box = each.getBoundingClientRect();
      if (left - width < box.left || top - width < box.top
          || right + width > box.right || bottom + width > box.bottom) return 0;
    }
    return contrast(parse(style.outlineColor), ground(element.parentElement));
  }
  const border = () => getComputedStyle(element.form).borderTopColor;
  const focused = border();
  element.blur();
  const unfocused = border();
  element.focus();
  return focused === unfocused ? 0 : contrast(parse(focused), ground(element.form.parentElement));
}"""
)
