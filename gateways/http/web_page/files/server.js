// Requests to the gateway: JSON, streams of events, and their errors.

const KEY = "inferd-key";
// The API's own hint names a header, which users of the page cannot set.
const UNKNOWN_KEY = "the gateway does not know this key (enter another, or ask its operator for one)";

export class Failure extends Error {
  // An error of a response or, with status 0, of a connection or a stream. `retryAfter` is a number
  // of seconds, or null.
  constructor(status, body, retryAfter = null) {
    super(status === 401 ? UNKNOWN_KEY : body?.error?.message ?? `the gateway answered with status ${status}`);
    this.status = status;
    this.code = body?.error?.code ?? null;
    this.retryAfter = retryAfter;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
};

function headers(body) {
  const found = body === undefined ? {} : { "Content-Type": "application/json" };
  return key.get() ? { ...found, Authorization: `Bearer ${key.get()}` } : found;
}

async function open(method, path, body, signal, more = {}) {
  let response;
  try {
    response = await fetch(path, {
      method, signal, headers: { ...headers(body), ...more }, body: body && JSON.stringify(body), cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(0, { error: { message: "the gateway does not answer (check that it runs)" } });
  }
  if (response.ok) return response;
  const retryAfter = Number(response.headers.get("Retry-After")) || null;
  throw new Failure(response.status, await response.json().catch(() => null), retryAfter);
}

export async function send(method, path, body) {
  return (await open(method, path, body)).json();
}

const ownPath = (path) => `/v1/inferd/${path}`;
const sessionPath = (id, action = "") => ownPath(`sessions/${encodeURIComponent(id)}${action}`);

export const api = {
  caller: () => send("GET", ownPath("caller")),
  models: () => send("GET", ownPath("models")),
  model: (name) => send("GET", ownPath(`models/${encodeURIComponent(name)}`)),
  usage: (query) => send("GET", ownPath(`usage?${new URLSearchParams(query)}`)),
  sessions: (query) => send("GET", ownPath(`sessions?${new URLSearchParams(query)}`)),
  session: (id) => send("GET", sessionPath(id)),
  // The bytes of an image in the messages of a session.
  media: async (id, sha256) => (await open("GET", sessionPath(id, `/media/${sha256}`))).blob(),
  create: (fields) => send("POST", ownPath("sessions"), fields),
  update: (id, fields) => send("PATCH", sessionPath(id), fields),
  remove: (id, undo) => send("DELETE", sessionPath(id, `?undo=${undo}`)),
  restore: (id) => send("POST", sessionPath(id, "/restore"), {}),
  deletions: () => send("GET", ownPath("deletions")),
  forgetDeletions: () => send("DELETE", ownPath("deletions")),
  fork: (id, fields) => send("POST", sessionPath(id, "/fork"), fields),
  rewind: (id, messages) => send("POST", sessionPath(id, "/rewind"), { messages }),
  cancel: (id) => send("POST", sessionPath(id, "/cancel"), {}),
  endReasoning: (id) => send("POST", sessionPath(id, "/end-reasoning"), {}),
  unload: (model) => send("POST", ownPath("models/unload"), { model }),
  swap: (model, to) => send("POST", ownPath("models/swap"), { model, to }),
  load: (model) => events("POST", ownPath("models/load"), { model, stream: true }),
  events: (signal) => events("GET", ownPath("events"), undefined, signal),
  chat: (fields, signal) => events("POST", "/v1/chat/completions", { ...fields, stream: true }, signal),
  // The last answer of a session after the event `lastId`, or all of it.
  rest: (id, lastId, signal) =>
    events("GET", sessionPath(id, "/events"), undefined, signal, lastId ? { "Last-Event-ID": lastId } : {}),
};

// Yields the events of a response: `{event, data, id, isDone}`, or `{comment}`. EventSource cannot send a key.
async function* events(method, path, body, signal, more) {
  const response = await open(method, path, body, signal, more);
  if (response.status === 204) return yield { ...NO_EVENT, isDone: true };
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) yield parse(block);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(0, LOST);
  } finally {
    reader.cancel().catch(() => {});
  }
}

export const LOST = {
  error: { message: "the connection to the gateway was lost (continue once it is back)", code: "connection_lost" },
};
const NO_EVENT = { event: "message", data: null, id: null, comment: "", isDone: false };

function parse(block) {
  const found = { ...NO_EVENT };
  for (const line of block.split("\n")) {
    if (line.startsWith(":")) found.comment = line.slice(1).trim();
    else if (line.startsWith("event: ")) found.event = line.slice(7);
    else if (line.startsWith("id: ")) found.id = line.slice(4);
    else if (line === "data: [DONE]") found.isDone = true;
    else if (line.startsWith("data: ")) found.data = JSON.parse(line.slice(6));
  }
  return found;
}
