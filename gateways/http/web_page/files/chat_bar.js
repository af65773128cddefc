// The bar above the open chat: its title, the time that it stays, and its files.

import { byId, clearFailure, showFailure, showProgress } from "./elements.js";
import { asJson, asMarkdown, download, fileName } from "./export.js";
import { fateOf } from "./retention.js";
import { api } from "./server.js";

const KINDS = {
  "export-markdown": ["md", "text/markdown", asMarkdown],
  "export-json": ["json", "application/json", asJson],
};

export class ChatBar {
  // `onChange()` is called when the list of chats has changed.
  constructor(onChange) {
    this.onChange = onChange;
    this.session = null;
    byId("keep").onclick = () => this.update({ kept: !this.session.kept });
    byId("rename").onclick = () => this.rename();
    byId("title-form").onsubmit = (event) => { event.preventDefault(); this.store(); };
    byId("title-field").onkeydown = (event) => {
      if (event.key === "Escape") { event.preventDefault(); this.endRename(); }
    };
    byId("title-cancel").onclick = () => this.endRename();
    for (const [id, kind] of Object.entries(KINDS)) byId(id).onclick = () => this.save(...kind);
  }

  // Shows a chat; null: there is none.
  show(session) {
    if (session?.id !== this.session?.id) byId("title-form").hidden = true;
    this.session = session;
    byId("chat-bar").hidden = session === null;
    if (session === null) return;
    byId("chat-title").textContent = session.title || "Chat";
    byId("chat-title").hidden = !byId("title-form").hidden;
    byId("fate").textContent = fateOf(session, Date.now() / 1000);
    byId("keep").setAttribute("aria-pressed", String(Boolean(session.kept)));
  }

  async update(fields) {
    clearFailure();
    const { id } = this.session;
    try {
      const session = await api.update(id, fields);
      if (this.session?.id === id) this.show({ ...this.session, ...session });
      this.onChange();
    } catch (error) {
      showFailure(error);
    }
  }

  rename() {
    byId("title-field").value = this.session.title;
    byId("title-form").hidden = false;
    byId("chat-title").hidden = true;
    byId("title-field").select();
    byId("title-field").focus();
  }

  endRename() {
    byId("title-form").hidden = true;
    byId("chat-title").hidden = false;
    byId("rename").focus();
  }

  async store() {
    const title = byId("title-field").value.trim();
    this.endRename();
    await this.update({ title });
  }

  // Saves the chat as a file, as the daemon has it.
  async save(suffix, type, form) {
    clearFailure();
    try {
      const session = await api.session(this.session.id);
      download(fileName(session.title, suffix), type, await form(session));
      showProgress("Saved.");
    } catch (error) {
      showFailure(error);
    }
  }
}
