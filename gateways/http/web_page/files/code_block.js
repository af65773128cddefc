// A block of code with its language and a button that copies it. Its text is in parts of some lines,
// so that the browser lays out only the last one again while the code grows. The end of a line is
// between two parts, and no part ends with an empty line, which would have no height.

import { button, copyText, element } from "./elements.js";
import { colorCode } from "./typesetting.js";

const PART_LINES = 50;
const COLORED_MAX = 50_000; // characters
const LABEL_MAX = 30;
const SLICE_MS = 6; // of a frame, for colors that arrive

export class CodeBlock {
  constructor() {
    this.text = "";
    this.parts = [];
    this.isClosed = false;
    this.label = element("span", { className: "language" });
    this.code = element("code");
    this.pre = element("pre", { tabIndex: 0, role: "group", dir: "ltr" }, this.code);
    const copy = button("Copy", () => copyText(this.text), { className: "small", "aria-label": "Copy code" });
    const head = element("div", { className: "code-head", dir: "ltr" }, this.label, copy);
    this.element = element("div", { className: "code-block" }, head, this.pre);
  }

  update({ token }, { isWhole }) {
    const name = token.info.trim().split(/\s/, 1)[0].slice(0, LABEL_MAX);
    const text = token.content.replace(/\n$/, "");
    if (name !== this.label.textContent || !this.pre.hasAttribute("aria-label")) {
      this.label.textContent = name;
      this.pre.setAttribute("aria-label", name ? `Code in ${name}` : "Code");
    }
    const [begin, end] = token.map;
    const lines = token.content ? text.split("\n").length : 0;
    const isClosed = isWhole || end - begin - 1 > lines; // by a line of its own
    if (text === this.text && isClosed === this.isClosed) return;
    this.show(text);
    this.isClosed = isClosed;
    if (isClosed && name && text.length <= COLORED_MAX) this.color(name.toLowerCase());
  }

  show(text) {
    const pieces = partsOf(text);
    for (let index = this.parts.length; index < pieces.length; index += 1) {
      this.parts.push(element("span", { className: "part" }));
      this.code.append(...(index ? ["\n"] : []), this.parts[index]);
    }
    for (const part of this.parts.splice(pieces.length)) {
      part.previousSibling?.remove();
      part.remove();
    }
    pieces.forEach((piece, index) => setText(this.parts[index], piece));
    this.text = text;
  }

  async color(language) {
    const { text } = this;
    const colored = await colorCode(text, language, this.parts.map((part) => part.textContent.length));
    for (let index = 0; colored && index < colored.length;) {
      const until = performance.now() + SLICE_MS;
      while (index < colored.length && performance.now() < until) {
        if (this.text !== text) return;
        this.parts[index].replaceChildren(...spans(colored[index]));
        index += 1;
      }
      await nextFrame();
    }
  }
}

const nextFrame = () => new Promise((resolve) => { requestAnimationFrame(resolve); });

function partsOf(text) {
  const parts = [];
  let begin = 0;
  let lines = 0;
  for (let end = text.indexOf("\n"); end >= 0; end = text.indexOf("\n", end + 1)) {
    lines += 1;
    if (lines < PART_LINES || end === begin || text[end - 1] === "\n") continue;
    parts.push(text.slice(begin, end));
    begin = end + 1;
    lines = 0;
  }
  return [...parts, text.slice(begin)];
}

function spans(pieces) {
  const made = [];
  for (let at = 0; at < pieces.length; at += 2) {
    made.push(pieces[at] ? element("span", { className: pieces[at], textContent: pieces[at + 1] }) : pieces[at + 1]);
  }
  return made;
}

// Sets an element's text; of one that grows, only the new part is appended.
export function setText(place, text) {
  const { firstChild: node } = place;
  if (node?.nodeType === Node.TEXT_NODE && !node.nextSibling && text.startsWith(node.data)) {
    if (text.length > node.data.length) node.appendData(text.slice(node.data.length));
  } else if (place.textContent !== text) {
    place.textContent = text;
  }
}
