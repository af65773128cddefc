// Chats that are deleted and can still be restored. The daemon keeps them meanwhile; the browser's
// storage has their names, so that Undo is still there after a reload.

import { button, byId, clearFailure, element, showFailure } from "./elements.js";
import { lossesOf } from "./retention.js";
import { api } from "./server.js";
import { read, write } from "./entries.js";

const NAME = "inferd-deletions";
const UNDO_S = 60;
const SHOWN_S = 30; // Undo disappears earlier than the daemon forgets the chat
const TICK_MS = 1000;
const SHOWN_MAX = 3; // the latest ones

// Returns the deletions of a stored entry that can still be undone, the latest first.
export function undoable(stored, now) {
  return Object.entries(stored)
    .map(([id, text]) => ({ id, until: Number(text.split(" ", 1)[0]), title: text.replace(/^\S* ?/, "") }))
    // An entry from a clock that was ahead must not stay for ever.
    .filter(({ until }) => until > now && until <= now + SHOWN_S)
    .sort((a, b) => b.until - a.until)
    .slice(0, SHOWN_MAX);
}

export class Deletions {
  // `onChange(id)` is called when a chat was deleted or restored.
  constructor(onChange) {
    this.onChange = onChange;
    this.place = byId("deletions");
    this.shown = "";
    window.addEventListener("storage", (event) => { if (event.key === NAME) this.draw(); });
    setInterval(() => this.draw(), TICK_MS);
    this.draw();
  }

  async remove(id, title) {
    clearFailure();
    try {
      const { restorable_s: seconds } = await api.remove(id, UNDO_S);
      if (seconds) this.store({ ...read(NAME), [id]: `${now() + SHOWN_S} ${title}` });
    } catch (error) {
      if (error.status !== 404) return showFailure(error, () => this.remove(id, title));
    }
    this.onChange(id);
  }

  async undo(id) {
    clearFailure();
    try {
      await api.restore(id);
    } catch (error) {
      if (error.status !== 404) return showFailure(error, () => this.undo(id));
      showFailure(new Error("It is too late: the chat is no longer on this machine."));
    }
    const { [id]: _, ...others } = read(NAME);
    this.store(others);
    byId("prompt").focus();
    this.onChange(id);
  }

  store(entries) {
    const kept = undoable(entries, now());
    write(NAME, Object.fromEntries(kept.map(({ id, until, title }) => [id, `${until} ${title}`])));
    this.shown = "";
    this.place.replaceChildren();
    this.draw();
  }

  draw() {
    const chats = undoable(read(NAME), now());
    const shown = JSON.stringify(chats);
    // A bar that is read or reached for stays; the daemon has the chat for longer.
    if (shown === this.shown || (chats.length < this.place.children.length && this.place.matches(":hover, :focus-within"))) return;
    this.shown = shown;
    this.place.replaceChildren(...chats.map(({ id, title }) => element("p", {},
      element("span", { textContent: `“${title}” is deleted.` }),
      button("Undo", () => this.undo(id), { className: "small", "aria-label": `Undo deleting ${title}` }))));
  }
}

const now = () => Math.round(Date.now() / 1000);

// Shows the chats that the daemon has deleted by itself, until the user has read it.
export async function showLosses() {
  const place = byId("losses");
  const { data } = await api.deletions();
  if (!data.length) return place.replaceChildren();
  const read = button("OK", async () => {
    await api.forgetDeletions().then(() => place.replaceChildren(), showFailure);
    byId("prompt").focus();
  }, { className: "small", "aria-label": "OK, I have read which chats were deleted" });
  place.replaceChildren(element("div", {}, ...lossesOf(data).map((text) => element("p", { textContent: text }))), read);
}
