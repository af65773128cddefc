// Colors of code and typeset formulas, computed by a worker of the browser, so that neither their
// time nor an input that takes for ever stops the page.

const LOAD_MS_MAX = 30_000; // of a library, over a slow network
const WORK_MS_MAX = 3_000; // of one piece of code or one formula
const WAITING_MAX = 1_000;

let worker = null;
let timer = 0;
const waiting = []; // the first one is being computed

// Returns the parts of colored code (see typesetting_worker.js), or null where there are no colors.
export const colorCode = (code, language, lengths) => request({ kind: "code", code, language, lengths });

// Returns a formula's markup, which has to be sanitized, or null if it cannot be typeset.
export const typesetFormula = (source) => request({ kind: "formula", source });

function request(message) {
  return new Promise((resolve) => {
    if (waiting.length >= WAITING_MAX) return resolve(null);
    waiting.push({ message, resolve });
    if (waiting.length === 1) begin();
  });
}

function begin() {
  if (!worker) {
    worker = new Worker(new URL("./typesetting_worker.js", import.meta.url), { type: "module" });
    worker.onmessage = ({ data }) => (data.began ? limit(WORK_MS_MAX) : finish(data.result));
    worker.onerror = (event) => { event.preventDefault(); giveUp(); };
  }
  limit(LOAD_MS_MAX);
  worker.postMessage(waiting[0].message);
}

function limit(ms) {
  clearTimeout(timer);
  timer = setTimeout(giveUp, ms);
}

function giveUp() {
  worker.terminate();
  worker = null;
  finish(null);
}

function finish(result) {
  clearTimeout(timer);
  waiting.shift().resolve(result);
  if (waiting.length) begin();
}
