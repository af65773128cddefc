// An answer as elements, from Markdown. Its blocks are elements that this module makes; the markup
// inside a paragraph, heading or cell is markdown-it's, sanitized.
//
// While an answer grows, blocks that can no longer change are not read again, and of the others only
// those whose text has changed are rendered again. Each step stops after some milliseconds and goes
// on in the next frame, so that a long answer that arrives at once does not stop the page.

import { CodeBlock } from "./code_block.js";
import { element } from "./elements.js";
import { formulas } from "./formulas.js";
import MarkdownIt from "./libraries/markdown-it.js";
import { ADDRESS, sanitized } from "./sanitizing.js";
import { typesetFormula } from "./typesetting.js";

const STEP_MS = 10;
const TEXT_MAX = 8_000; // characters of one paragraph or cell: a longer one is shown as it was written
const FORMULA_MAX = 5_000; // characters
const FORMULAS_KEPT_MAX = 500;
const HEADINGS_ABOVE = 2; // levels of headings of the page itself

const OPTIONS = { html: false, breaks: true, linkify: true };
const blocks = new MarkdownIt(OPTIONS).use(formulas);
blocks.core.ruler.enableOnly(["normalize", "block", "strip_references"]);
const texts = new MarkdownIt(OPTIONS).use(formulas).use(linkImages);
for (const each of [blocks, texts]) each.validateLink = (address) => ADDRESS.test(address);
texts.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });

// Shows images as links: the page loads nothing from elsewhere.
function linkImages(markdown) {
  markdown.core.ruler.push("link_images", ({ tokens, Token }) => {
    for (const { children } of tokens.filter((token) => token.type === "inline")) {
      let links = 0;
      children.splice(0, Infinity, ...children.flatMap((token) => {
        links += token.type === "link_open" ? 1 : token.type === "link_close" ? -1 : 0;
        if (token.type !== "image") return [token];
        const text = new Token("text", "", 0);
        text.content = token.content || "image";
        if (links) return [text];
        const open = new Token("link_open", "a", 1);
        open.attrs = [["href", token.attrGet("src")]];
        return [open, text, new Token("link_close", "a", -1)];
      }));
    }
  });
}

export class Rendering { // of one answer; it owns the children of `place`
  constructor(place) {
    this.place = place;
    this.wanted = ["", false];
    this.text = "";
    this.isWhole = false;
    this.frame = 0;
    this.views = [];
    this.begin();
  }

  begin() {
    this.stable = 0; // characters whose blocks can no longer change
    this.kept = 0; // the number of these blocks
    this.environment = {}; // markdown-it's: the addresses of links like [name][label]
  }

  // Shows a text at once.
  show(text) {
    this.wanted = [text, true];
    this.step(Infinity);
  }

  // Shows a text in steps; one that is not whole will be followed by a longer one.
  follow(text, isWhole) {
    this.wanted = [text, isWhole];
    this.frame ||= requestAnimationFrame(() => this.run());
  }

  run() {
    this.frame = 0;
    if (!this.step(performance.now() + STEP_MS)) this.frame = requestAnimationFrame(() => this.run());
  }

  takeText() {
    const [text, isWhole] = this.wanted;
    const normal = text.replace(/\r\n?/g, "\n");
    if (normal === this.text && isWhole === this.isWhole) return;
    // A label can be defined behind its uses, in blocks that are no longer read.
    const definesLabels = isWhole && Object.keys(this.environment.references ?? {}).length > 0;
    if (definesLabels || !normal.startsWith(this.text)) this.begin();
    this.text = normal;
    this.isWhole = isWhole;
  }

  // Draws what has changed, until a time; returns whether all is drawn.
  step(until) {
    this.takeText();
    const tail = this.text.slice(this.stable);
    const nodes = tree(blocks.parse(tail, this.environment));
    const work = { until, isOver: false };
    const context = { environment: this.environment, isInList: false, isWhole: this.isWhole, work };
    const count = drawChildren(this.place, this.views, nodes, context, this.kept);
    this.settle(tail, nodes.slice(0, count + 1));
    return !work.isOver;
  }

  // Finds the last block before which an empty line ends everything before: what follows changes
  // only this block. Its own first line must be complete, since its next characters may make it a
  // part of the block before (as those of a list's item).
  settle(tail, nodes) {
    const begins = lineBegins(tail);
    for (let index = nodes.length - 1; index > 0; index -= 1) {
      const [line] = nodes[index].token.map;
      const isComplete = line + 1 < begins.length;
      if (!isComplete || tail.slice(begins[line - 1], begins[line]).trim()) continue;
      this.stable += begins[line];
      this.kept += index;
      return;
    }
  }
}

function lineBegins(text) {
  const begins = [0];
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) begins.push(at + 1);
  return begins;
}

function tree(tokens) {
  const open = [{ children: [] }];
  for (const token of tokens) {
    if (token.nesting < 0) { open.pop(); continue; }
    const node = { token, children: [] };
    open.at(-1).children.push(node);
    if (token.nesting > 0) open.push(node);
  }
  return open[0].children;
}

// Draws nodes as the children from an index on; an element of the same kind is kept. Returns the
// number of those that are drawn completely.
function drawChildren(place, views, nodes, context, first = 0) {
  for (const [count, node] of nodes.entries()) {
    drawChild(place, views, first + count, node, context);
    if (context.work.isOver) return count;
  }
  for (const view of views.splice(first + nodes.length)) view.element.remove();
  return nodes.length;
}

function drawChild(place, views, index, node, context) {
  const kind = kindOf(node);
  const before = views[index];
  if (before?.kind !== kind) {
    const view = made(node, context);
    view.kind = kind;
    if (before) before.element.replaceWith(view.element);
    else place.append(view.element);
    views[index] = view;
  }
  views[index].update(node, context);
}

function kindOf({ token, children }) {
  if (token.type === "fence" || token.type === "code_block") return "code";
  if (token.type === "formula" || token.type === "hr") return token.type;
  const tag = token.type === "heading_open" ? `h${Math.min(6, Number(token.tag[1]) + HEADINGS_ABOVE)}` : token.tag;
  if (children[0]?.token.type !== "inline") return tag;
  return token.hidden ? "text" : `text ${tag}`;
}

function made(node, { isInList }) {
  const kind = kindOf(node);
  if (kind === "code") return new CodeBlock();
  if (kind === "formula") return new Formula();
  if (kind === "hr") return { element: element("hr"), update: () => {} };
  const [, tag = "span"] = kind.startsWith("text") ? kind.split(" ") : [kind, kind];
  const direction = isInList && tag !== "td" && tag !== "th" ? {} : { dir: "auto" };
  return kind.startsWith("text") ? new Text(tag, direction) : new Container(tag, direction);
}

// A list, quote or table, or a part of it.
class Container {
  constructor(tag, direction) {
    this.views = [];
    this.isList = tag === "ul" || tag === "ol";
    this.inner = element(tag, this.isList ? direction : {});
    this.element = tag !== "table" ? this.inner
      : element("div", { className: "table", tabIndex: 0, role: "group", "aria-label": "Table" }, this.inner);
  }

  update({ token, children }, context) {
    if (token.tag === "ol") this.inner.start = Number(token.attrGet("start") ?? 1);
    drawChildren(this.inner, this.views, children, { ...context, isInList: context.isInList || this.isList });
  }
}

// A paragraph, heading, cell or the text of a list's item.
class Text {
  constructor(tag, direction) {
    this.element = element(tag, direction);
  }

  update({ token, children: [{ token: { content } }] }, { environment, work }) {
    const align = /^text-align:(left|right|center)$/.exec(token.attrGet("style") ?? "");
    if (align) this.element.className = align[1];
    const labels = environment.references;
    if (content === this.content && labels === this.labels) return;
    Object.assign(this, { content, labels });
    if (content.length > TEXT_MAX) return this.element.replaceChildren(content);
    const markup = texts.renderInline(content, environment);
    if (markup === this.markup) return;
    this.markup = markup;
    const found = sanitized(markup);
    found.querySelectorAll?.("code.formula").forEach(typeset);
    this.element.replaceChildren(found);
    work.isOver ||= performance.now() >= work.until;
  }
}

class Formula {
  constructor() {
    this.element = element("p", { className: "formula-block" });
  }

  update({ token: { content } }) {
    if (content === this.content) return;
    this.content = content;
    this.element.replaceChildren(element("code", { className: "formula", textContent: content }));
    typeset(this.element.firstChild);
  }
}

const kept = new Map(); // formulas by their source: promises, then fragments or null

// Replaces a formula as it was written by the typeset one, as soon as there is one.
function typeset(place) {
  const source = place.textContent;
  if (source.length > FORMULA_MAX) return;
  if (!kept.has(source)) {
    if (kept.size >= FORMULAS_KEPT_MAX) kept.delete(kept.keys().next().value);
    kept.set(source, typesetFormula(source).then((markup) => {
      const found = markup && sanitized(markup);
      if (kept.has(source)) kept.set(source, found);
      return found;
    }));
  }
  const found = kept.get(source);
  if (found instanceof Promise) found.then((later) => later && place.replaceWith(later.cloneNode(true)));
  else if (found) place.replaceWith(found.cloneNode(true));
}
