// The open chat: a session of the daemon. Sends messages, stops, edits and branches.

import { byId, clearFailure, showFailure, showProgress } from "./elements.js";
import { Messages } from "./messages.js";
import { api } from "./server.js";

export const PREFIX = "chat_"; // sessions of other programs have other ids

// `randomUUID` exists only in secure contexts, so not on a LAN address without TLS.
export const newId = () => PREFIX + [...crypto.getRandomValues(new Uint8Array(10))]
  .map((byte) => byte.toString(16).padStart(2, "0")).join("");

export class Chat {
  // `onChange()` is called when the list of chats may have changed.
  constructor(settings, onChange) {
    this.settings = settings;
    this.onChange = onChange;
    this.id = null;
    this.turn = null; // an AbortController while an answer arrives
    this.messages = new Messages((index, text) => this.edit(index, text), (index) => this.branch(index));
    this.messages.showWelcome();
  }

  get isAnswering() { return this.turn !== null; }

  begin() {
    this.stop();
    this.setId(null);
    this.settings.setChatModel(null);
    this.messages.showWelcome();
    clearFailure();
    showProgress("");
  }

  async open(id) {
    this.stop();
    this.setId(id);
    clearFailure();
    showProgress("");
    await this.refresh();
  }

  setId(id) {
    this.id = id;
    history.replaceState(null, "", id ? `#${id}` : location.pathname);
    this.onChange();
  }

  // Shows the session as the daemon has it; one that is being answered elsewhere is read again.
  async refresh() {
    const id = this.id;
    try {
      const session = await api.session(id);
      if (this.id !== id || this.isAnswering) return;
      this.settings.setChatModel(session.model);
      this.messages.show(session.messages, session.boundaries);
      if (session.state !== "dormant") setTimeout(() => this.id === id && this.refresh(), 1000);
    } catch (error) {
      if (this.id !== id) return;
      if (error.status !== 404) return showFailure(error, () => this.refresh());
      this.begin();
      showFailure(new Error("This chat was deleted, or has expired."));
    }
  }

  async send(text) {
    if (this.isAnswering) return;
    clearFailure();
    this.turn = new AbortController();
    this.setAnswering(true);
    this.messages.dropUnstored();
    this.messages.add({ role: "user", content: text });
    const answer = this.messages.beginAnswer();
    const { signal } = this.turn;
    let failure = null;
    try {
      if (this.id === null) await this.create(text);
      signal.throwIfAborted();
      await this.receive(text, answer, signal);
    } catch (error) {
      if (error.name !== "AbortError") failure = error;
    }
    answer.end();
    const stopped = signal.aborted;
    this.turn = null;
    this.setAnswering(false);
    showProgress(stopped ? "Stopped." : failure ? "" : this.usage ?? "");
    if (signal.reason === "left") return;
    if (stopped && this.id) await api.cancel(this.id).catch(() => {});
    if (this.id) await this.refresh();
    if (failure) this.explain(failure, text);
    this.onChange();
  }

  explain(failure, text) {
    const field = byId("prompt");
    const again = () => {
      if (field.value === text) field.value = "";
      this.send(text);
    };
    showFailure(failure, again);
    if (failure.retryAfter) showProgress(`The daemon suggests to try again in ${failure.retryAfter} s.`);
    if (!field.value) field.value = text;
  }

  async create(text) {
    const id = newId();
    await api.create({ id, ...this.settings.forSession() });
    this.settings.noteUse();
    this.settings.nameChat(id, text);
    this.setId(id);
  }

  async receive(text, answer, signal) {
    const begin = performance.now();
    this.usage = null;
    showProgress("Waiting…");
    const fields = { ...this.settings.forTurn(), session_id: this.id, stream_options: { include_usage: true } };
    for await (const { data, comment } of api.chat({ ...fields, messages: [{ role: "user", content: text }] }, signal)) {
      if (comment) showProgress(comment.replace(/^waiting/, "Waiting"));
      if (data?.error) throw Object.assign(new Error(data.error.message), { code: data.error.code });
      const delta = data?.choices?.[0]?.delta;
      if (delta?.content || delta?.reasoning_content) {
        showProgress("Answering…");
        answer.add(delta.content ?? "", delta.reasoning_content ?? "");
      }
      if (data?.usage) this.usage = describe(data.usage, (performance.now() - begin) / 1000);
    }
  }

  stop(reason = "left") {
    this.turn?.abort(reason === "left" ? "left" : new DOMException("stopped", "AbortError"));
  }

  async edit(index, text) {
    if (this.isAnswering) return;
    try {
      const session = await api.rewind(this.id, index);
      if (session) this.messages.show(...(await this.read()));
    } catch (error) {
      return showFailure(error);
    }
    await this.send(text);
  }

  async read() {
    const session = await api.session(this.id);
    return [session.messages, session.boundaries];
  }

  async branch(index) {
    if (this.isAnswering) return;
    const id = newId();
    try {
      await api.fork(this.id, { id, messages: index + 1 });
    } catch (error) {
      return showFailure(error);
    }
    this.settings.nameChat(id, `${this.settings.nameOf(this.id)} (branch)`);
    await this.open(id);
    showProgress("This is a branch: the other chat stays as it is.");
    byId("prompt").focus();
  }

  setAnswering(isAnswering) {
    byId("send").hidden = isAnswering;
    byId("stop").hidden = !isAnswering;
  }
}

function describe(usage, seconds) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  return `${usage.completion_tokens} tokens in ${seconds.toFixed(1)} s; `
    + `${cached} of ${usage.prompt_tokens} tokens of the prompt were reused.`;
}
