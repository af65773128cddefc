// An answer as paragraphs, lists and code blocks: the part of Markdown that models write most.

import { element } from "./elements.js";

const FENCE = /^\s*(```|~~~)/;
const BULLET = /^\s*[-*+]\s+/;
const NUMBER = /^\s*\d+[.)]\s+/;
const HEADING = /^#{1,6}\s+/;

export function render(text) {
  const lines = text.split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    if (FENCE.test(line)) {
      const code = [];
      for (at += 1; at < lines.length && !FENCE.test(lines[at]); at += 1) code.push(lines[at]);
      at += 1;
      blocks.push(element("pre", { tabIndex: 0, role: "group", "aria-label": "Code" }, element("code", { textContent: code.join("\n") })));
    } else if (BULLET.test(line) || NUMBER.test(line)) {
      const mark = BULLET.test(line) ? BULLET : NUMBER;
      const list = element(mark === BULLET ? "ul" : "ol");
      if (mark === NUMBER) list.start = parseInt(line, 10);
      for (; at < lines.length && mark.test(lines[at]); at += 1) {
        list.append(element("li", {}, ...inline(lines[at].replace(mark, ""))));
      }
      blocks.push(list);
    } else if (HEADING.test(line)) {
      blocks.push(element("p", {}, element("strong", {}, ...inline(line.replace(HEADING, "")))));
      at += 1;
    } else if (line.trim()) {
      const paragraph = element("p");
      for (; at < lines.length && isText(lines[at]); at += 1) {
        if (paragraph.hasChildNodes()) paragraph.append(element("br"));
        paragraph.append(...inline(lines[at]));
      }
      blocks.push(paragraph);
    } else {
      at += 1;
    }
  }
  return blocks;
}

const isText = (line) => Boolean(line.trim()) && ![FENCE, BULLET, NUMBER, HEADING].some((mark) => mark.test(line));

function inline(text) {
  return text.split(/(`[^`]+`|\*\*[^*]+\*\*)/).filter(Boolean).map((part) => {
    if (/^`[^`]+`$/.test(part)) return element("code", { textContent: part.slice(1, -1) });
    if (/^\*\*[^*]+\*\*$/.test(part)) return element("strong", { textContent: part.slice(2, -2) });
    return document.createTextNode(part);
  });
}
