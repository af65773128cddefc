// Runs in a worker of the browser: colors code with highlight.js and typesets formulas with KaTeX.
// Both can take seconds on some inputs, so the page ends a worker that takes too long. Each library
// is loaded when it is first needed.

import { partsOf } from "./formulas.js";

const MARKUP_MAX = 200_000; // characters: macros can make any amount of a short formula
const DEPTH_MAX = 100; // of elements: browsers lay out nested ones by recursion
const KATEX = { output: "mathml", throwOnError: true, strict: "ignore", trust: false, maxSize: 50 };
const ENTITIES = { "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#x27;": "'", "&amp;": "&" };

const LOADERS = {
  code: async () => (await import("./libraries/highlight.js")).default,
  formula: async () => { await import("./libraries/katex.js"); return globalThis.katex; },
};
const WORK = { code: colored, formula: typeset };

self.onmessage = async ({ data: { kind, ...request } }) => {
  let result = null;
  try {
    const library = await LOADERS[kind]();
    postMessage({ began: true });
    result = WORK[kind](library, request);
  } catch {
    // Code without colors and a formula as it was written stay on the page.
  }
  postMessage({ result });
};

// Returns for each part of the code its pieces of one color: class and text by turns. `lengths` are
// those of the parts, between which one character ends a line.
function colored(highlight, { code, language, lengths }) {
  if (!highlight.getLanguage(language)) return null;
  const parts = lengths.map(() => []);
  let index = 0;
  let left = lengths[0];
  for (const [name, text] of pieces(highlight.highlight(code, { language, ignoreIllegals: true }).value)) {
    for (let rest = text; rest;) {
      if (left === 0) {
        rest = rest.slice(1);
        left = lengths[index += 1];
        continue;
      }
      const piece = rest.slice(0, left);
      parts[index].push(name, piece);
      left -= piece.length;
      rest = rest.slice(piece.length);
    }
  }
  return parts;
}

// Reads highlight.js's markup, which has only `span` elements with a class, and five entities.
function* pieces(markup) {
  const names = [""];
  for (const [piece, opened] of markup.matchAll(/<span class="([^"]*)">|<\/span>|[^<]+/g)) {
    if (opened !== undefined) names.push(opened);
    else if (piece === "</span>") names.pop();
    else yield [names.at(-1), piece.replace(/&(?:lt|gt|quot|#x27|amp);/g, (entity) => ENTITIES[entity])];
  }
}

function typeset(katex, { source }) {
  const { tex, isDisplayed } = partsOf(source);
  const styled = katex.renderToString(tex, { ...KATEX, displayMode: isDisplayed });
  // The page's policy allows no inline styles: even to parse one is reported as a violation.
  const markup = styled.replace(/ style="[^"]*"/g, "");
  return markup.length <= MARKUP_MAX && depthOf(markup) <= DEPTH_MAX ? markup : null;
}

function depthOf(markup) {
  let depth = 0;
  let deepest = 0;
  for (const [, end] of markup.matchAll(/<(\/?)[a-z]/g)) {
    depth += end ? -1 : 1;
    deepest = Math.max(deepest, depth);
  }
  return deepest;
}
