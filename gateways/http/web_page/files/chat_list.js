// The list of the user's chats.

import { button, byId, element, redraw, showFailure } from "./elements.js";
import { PREFIX } from "./chat.js";
import { api } from "./server.js";

export class ChatList {
  constructor(settings) {
    this.settings = settings;
    this.chat = null; // set once the chat exists, which needs the list
    this.reads = 0;
  }

  async refresh() {
    const number = (this.reads += 1);
    let sessions;
    try {
      sessions = (await api.sessions()).data;
    } catch {
      return; // the state of the connection is shown elsewhere
    }
    if (number !== this.reads) return; // a later answer is shown, or will be
    const own = sessions.filter((session) => session.id.startsWith(PREFIX) && session.turns > 0);
    redraw(byId("chat-list"), own.map((session) => this.made(session.id)));
  }

  made(id) {
    const name = this.settings.nameOf(id);
    const current = id === this.chat.id;
    const open = button(name, () => this.open(id), { className: "open", title: name });
    if (current) open.setAttribute("aria-current", "true");
    open.dataset.name = `open ${id}`;
    const remove = button("×", () => this.remove(id), { className: "delete", "aria-label": `Delete ${name}`, title: "Delete" });
    remove.dataset.name = `delete ${id}`;
    return element("li", { className: current ? "current" : "" }, open, remove);
  }

  open(id) {
    byId("columns").classList.remove("with-chats");
    byId("show-chats").setAttribute("aria-expanded", "false");
    this.chat.open(id);
    byId("prompt").focus();
  }

  async remove(id) {
    try {
      await api.remove(id);
    } catch (error) {
      if (error.status !== 404) return showFailure(error);
    }
    byId("prompt").focus();
    if (this.chat.id === id) this.chat.begin();
    else this.refresh();
  }
}
