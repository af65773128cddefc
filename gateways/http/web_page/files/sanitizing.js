// Markup of markdown-it and KaTeX as elements: DOMPurify keeps only these elements and attributes.
// The texts come from models, and so from any document or page that a model has read.

import "./libraries/dompurify.js";

export const ADDRESS = /^(?:https?:\/\/|mailto:)/i; // of a link

const TAGS = "a br code em s span strong";
const MATH_TAGS = "math menclose merror mfrac mi mmultiscripts mn mo mover mpadded mphantom mprescripts mroot mrow ms "
  + "mspace msqrt mstyle msub msubsup msup mtable mtd mtext mtr munder munderover";
const ATTRIBUTES = "class href title";
const MATH_ATTRIBUTES = "accent accentunder columnalign columnlines columnspacing depth display displaystyle fence "
  + "height largeop linebreak linethickness lspace mathbackground mathcolor mathsize mathvariant maxsize minsize "
  + "movablelimits notation rowalign rowlines rowspacing rspace scriptlevel separator side stretchy symmetric voffset width";

const OPTIONS = {
  RETURN_DOM_FRAGMENT: true,
  ALLOWED_TAGS: `${TAGS} ${MATH_TAGS}`.split(" "),
  ALLOWED_ATTR: `${ATTRIBUTES} ${MATH_ATTRIBUTES}`.split(" "),
  ADD_URI_SAFE_ATTR: MATH_ATTRIBUTES.split(" "), // else their values would have to be addresses
  ADD_FORBID_CONTENTS: ["annotation"], // KaTeX's source, for programs
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: ADDRESS,
};

const purify = globalThis.DOMPurify;

purify.addHook("afterSanitizeAttributes", (node) => {
  if (node.localName !== "a" || !node.hasAttribute("href")) return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

export function sanitized(markup) {
  if (!/[<&]/.test(markup)) return document.createTextNode(markup);
  return purify.sanitize(markup, OPTIONS);
}
