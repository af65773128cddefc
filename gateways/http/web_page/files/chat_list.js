// The list of the user's chats: the latest ones, or those that a search has found.

import { button, byId, element, hasFailure, redraw, showFailure } from "./elements.js";
import { PREFIX } from "./chat.js";
import { noteOf, rulesOf } from "./retention.js";
import { api } from "./server.js";

const SHOWN = 50; // at first, and more with each use of "Show more"
const SHOWN_MAX = 1000; // the gateway's limit of one list
const TYPING_MS = 150;
const UNTITLED = "Chat";

export class ChatList {
  // `remove(id, title)` deletes a chat.
  constructor(remove) {
    this.remove = remove;
    this.chat = null; // set once the chat exists, which needs the list
    this.reads = 0;
    this.shown = SHOWN;
    let typing = 0;
    byId("search").oninput = () => {
      clearTimeout(typing);
      typing = setTimeout(() => { this.shown = SHOWN; this.refresh(); }, TYPING_MS);
    };
    byId("more-chats").onclick = () => this.showMore();
  }

  async showMore() {
    const next = byId("chat-list").children.length;
    this.shown = Math.min(this.shown + SHOWN, SHOWN_MAX);
    await this.refresh();
    byId("chat-list").children[next]?.querySelector(".open").focus();
  }

  async refresh() {
    const number = (this.reads += 1);
    const search = byId("search").value.trim();
    let found;
    try {
      found = await api.sessions({ limit: this.shown, prefix: PREFIX, ...(search && { search }) });
    } catch (error) {
      // The state of the connection is shown elsewhere.
      if (error.status !== 0 && error.status !== 503 && !hasFailure()) showFailure(error, () => this.refresh());
      return;
    }
    if (number !== this.reads) return; // a later answer is shown, or will be
    this.show(found, search);
  }

  show({ data, has_more: hasMore, dormant }, search) {
    const chats = data.filter((session) => session.turns > 0 || session.interrupted || session.state !== "dormant");
    const now = Date.now() / 1000;
    redraw(byId("chat-list"), chats.map((session) => this.made(session, now)));
    byId("more-chats").hidden = !hasMore || this.shown >= SHOWN_MAX;
    const count = `${hasMore ? "More than " : ""}${chats.length} found`;
    byId("found").textContent = search ? (chats.length ? count : "No chat has this in its title or first message.") : "";
    byId("rules").textContent = dormant ? rulesOf(dormant) : "";
  }

  made(session, now) {
    const { id, title } = session;
    const name = title || UNTITLED;
    const note = noteOf(session, now);
    const isCurrent = id === this.chat.id;
    const open = element("button", {
      type: "button", className: "open", title: name, "aria-label": name, "aria-description": note, onclick: () => this.open(id),
    },
      element("span", { className: "title", textContent: name, dir: "auto" }));
    if (note) open.append(element("span", { className: "note", textContent: note }));
    if (isCurrent) open.setAttribute("aria-current", "true");
    open.dataset.name = `open ${id}`;
    const remove = button("×", () => { this.remove(id, name); byId("prompt").focus(); },
      { className: "delete", "aria-label": `Delete ${name}`, title: "Delete" });
    remove.dataset.name = `delete ${id}`;
    return element("li", { className: isCurrent ? "current" : "" }, open, remove);
  }

  open(id) {
    byId("columns").classList.remove("with-chats");
    byId("show-chats").setAttribute("aria-expanded", "false");
    this.chat.open(id);
    byId("prompt").focus();
  }
}
