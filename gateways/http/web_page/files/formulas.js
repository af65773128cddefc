// Formulas in Markdown: `$…$` and `\(…\)` in a line, `$$…$$` and `\[…\]` displayed. No plugin of
// markdown-it has all four, inside paragraphs and as blocks. A token's content is the formula with
// its delimiters as they were written, so that one that cannot be typeset is shown so.

const DELIMITERS = [["$$", "$$"], ["\\[", "\\]"], ["\\(", "\\)"], ["$", "$"]];
const DISPLAYED = DELIMITERS.slice(0, 2);
const LINES_MAX = 200; // of a displayed formula: else each line that begins one would search the rest

export function formulas(markdown) {
  // Before `escape`, which takes `\(` as an escaped parenthesis; before `fence`, as first of all blocks.
  markdown.inline.ruler.before("escape", "formula", readInline);
  const interrupted = { alt: ["paragraph", "reference", "blockquote", "list"] };
  markdown.block.ruler.before("fence", "formula", readBlock, interrupted);
  markdown.renderer.rules.formula = (tokens, index) =>
    `<code class="formula">${markdown.utils.escapeHtml(tokens[index].content)}</code>`;
}

// Splits a formula as it was written into its TeX, and whether it is displayed.
export function partsOf(source) {
  const width = source.startsWith("$") && !source.startsWith("$$") ? 1 : 2;
  const isDisplayed = DISPLAYED.some(([open]) => source.startsWith(open));
  return { tex: source.slice(width, -width), isDisplayed };
}

const delimitersAt = (text, at, kinds) => kinds.find(([open]) => text.startsWith(open, at));

function readInline(state, silent) {
  const { src, pos } = state;
  const found = delimitersAt(src, pos, DELIMITERS);
  if (!found) return false;
  const [open, close] = found;
  const begin = pos + open.length;
  const end = nextEnd(state, close, begin);
  const isFormula = end >= 0 && end + close.length <= state.posMax && src.slice(begin, end).trim()
    && (open !== "$" || !isMoney(src, pos, end));
  if (!isFormula && open !== "$$") return false;
  const after = isFormula ? end + close.length : begin; // the second of two dollar signs begins nothing
  if (!silent && isFormula) state.push("formula", "", 0).content = src.slice(pos, after);
  if (!silent && !isFormula) state.pending += open;
  state.pos = after;
  return true;
}

// As in Pandoc, a dollar sign before a space opens nothing, and one behind a space or before a digit
// closes nothing: "$5 and $6" has no formula. Nor have "US$5 (6 CA$)", "$HOME:$PATH" and "$5 or 6$".
function isMoney(text, open, close) {
  return /[\s$]/.test(text[open + 1]) || /\s/.test(text[close - 1])
    || /[0-9A-Za-z]/.test(text[open - 1] ?? "") || /[0-9A-Z_]/.test(text[close + 1] ?? "")
    || /^\d[\d.,]*\s+[A-Za-z]{2}/.test(text.slice(open + 1, close));
}

// Returns the place of the next closing delimiter that is not escaped, or -1. It is kept for the
// next search, so that many opening delimiters do not each search the whole text.
function nextEnd(state, close, from) {
  const known = (state.formulaEnds ??= {})[close];
  if (known && known.from <= from && (known.at < 0 || known.at >= from)) return known.at;
  let at = state.src.indexOf(close, from);
  while (at >= 0 && isEscaped(state.src, at)) at = state.src.indexOf(close, at + 1);
  state.formulaEnds[close] = { from, at };
  return at;
}

function isEscaped(text, at) {
  let begin = at;
  while (text[begin - 1] === "\\") begin -= 1;
  return (at - begin) % 2 === 1;
}

// A displayed formula whose delimiters begin and end lines; without an empty line, as in TeX.
function readBlock(state, first, end, silent) {
  const { src } = state;
  const open = state.bMarks[first] + state.tShift[first];
  const found = delimitersAt(src, open, DISPLAYED);
  if (!found || state.sCount[first] - state.blkIndent >= 4) return false;
  const last = lastLine(state, first, Math.min(end, first + LINES_MAX), ...found);
  if (last < 0) return false;
  if (silent) return true;
  const token = state.push("formula", "", 0);
  token.block = true;
  token.content = state.getLines(first, last + 1, state.sCount[first], false).trim();
  token.map = [first, last + 1];
  state.line = last + 1;
  return true;
}

function lastLine(state, first, end, open, close) {
  for (let line = first; line < end; line += 1) {
    let begin = state.bMarks[line] + state.tShift[line];
    if (line > first && (begin >= state.eMarks[line] || state.sCount[line] < state.blkIndent)) return -1;
    if (line === first) begin += open.length;
    const text = state.src.slice(begin, state.eMarks[line]).trimEnd();
    const at = text.indexOf(close);
    if (at >= 0) return at === text.length - close.length ? line : -1;
  }
  return -1;
}
