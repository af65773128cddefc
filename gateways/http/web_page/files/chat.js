// The open chat: a session of the daemon. Sends messages; stops, continues, edits and branches.

import { Answer, describeUsage, isCut } from "./answer.js";
import { byId, clearFailure, hasFailure, showFailure, showProgress } from "./elements.js";
import { Images, contentOf, imagesOf, sentContent } from "./images.js";
import { Messages } from "./messages.js";
import { api } from "./server.js";
import { textOf } from "./texts.js";
import { unfinished } from "./unfinished.js";

export const PREFIX = "chat_"; // sessions of other programs have other ids
const NOT_COMPLETE = "This answer is not complete.";
const LEFT = "left";
const PAUSE_MS = 1000;
const TITLE_LENGTH = 180; // the daemon's limit is 200 characters
const BUSY = 409; // the session is open in another program

// `randomUUID` exists only in secure contexts, so not on a LAN address without TLS.
export const newId = () => PREFIX + [...crypto.getRandomValues(new Uint8Array(10))]
  .map((byte) => byte.toString(16).padStart(2, "0")).join("");

// Returns the number of the message that was answered last, or -1.
export const lastQuestion = (messages) => messages.findLastIndex((message) => message.role === "user");

const isSame = (content, { text, images }) =>
  textOf(content) === text && imagesOf(content).length === images.length;

export class Chat {
  // `onChange()` is called when the list of chats may have changed, `onSession(session)` with each
  // state of the open chat; null: there is none.
  constructor(settings, onChange, onSession) {
    Object.assign(this, { settings, onChange, onSession });
    this.id = null;
    this.turn = null; // an AbortController while an answer arrives
    this.answer = null; // the answer that is shown, until the chat is read again
    this.asked = null; // the message that was sent last: its text and images
    this.attachments = null; // set once they exist, which needs the settings
    this.images = new Images();
    this.cut = ""; // the cause for which the last answer is not complete
    this.isStopping = false;
    this.reads = 0; // the reads of the chat that have not ended
    this.isPolling = false; // whether another read will follow
    this.messages = new Messages({
      edit: (index, text) => this.edit(index, text), branch: (index) => this.branch(index),
      resume: () => this.resume(showFailure), regenerate: () => this.regenerate(),
    }, () => byId("prompt").focus({ preventScroll: true }), this.images);
    this.messages.showWelcome();
  }

  get isAnswering() { return this.turn !== null; }

  // Begins a chat. With a `note`, the choices of the previous one stay.
  begin(note = "") {
    this.leave(null);
    this.settings.showChat(null, note !== "");
    this.messages.showWelcome(note);
    this.onSession(null);
  }

  async open(id) {
    this.leave(id);
    await this.refresh();
  }

  // Ends the reading of an answer, which goes on when its chat is opened again.
  pause() {
    this.turn?.abort(LEFT);
    this.turn = null;
    this.setAnswering(false);
  }

  leave(id) {
    this.pause();
    this.isPolling = false;
    this.answer = this.asked = null;
    this.cut = "";
    this.setId(id);
    clearFailure();
    showProgress("");
  }

  setId(id) {
    this.id = id;
    this.images.open(id);
    history.replaceState(null, "", id ? `#${id}` : location.pathname);
    this.onChange();
  }

  // Shows the session as the daemon has it. An answer that is computed is followed or, if another
  // program has its session, read again and again.
  async refresh(follows = true) {
    const id = this.id;
    const isCurrent = () => this.id === id && !this.isAnswering;
    this.reads += 1;
    let session;
    try {
      session = await api.session(id);
    } catch (error) {
      if (!isCurrent()) return;
      if (error.status !== 404) return hasFailure() || showFailure(error, () => this.refresh());
      this.begin();
      return showFailure(new Error("This chat was deleted, or has expired."));
    } finally {
      this.reads -= 1;
    }
    if (!isCurrent()) return;
    this.show(session);
    const isComputed = session.state !== "dormant";
    this.isPolling = isComputed && !follows;
    if (this.isPolling) setTimeout(() => isCurrent() && this.refresh(false), PAUSE_MS);
    else if (isComputed || (session.interrupted && unfinished.has(id))) await this.resume();
  }

  // Takes over the user's turns in the queue: another tab may have begun one in this chat.
  noteTurns(turns) {
    const isKnown = this.isAnswering || this.isPolling || this.reads > 0;
    if (this.id !== null && !isKnown && turns.some((turn) => turn.session_id === this.id)) this.refresh();
  }

  show(session) {
    if (this.asked !== null) {
      const at = this.lastAsked(session);
      if (at === null) this.restore(this.asked);
      else this.images.adopt(session.messages[at].content, this.asked.images);
    }
    this.answer = this.asked = null;
    this.settings.showChat(session);
    const cut = session.interrupted && session.state === "dormant" ? this.cut || NOT_COMPLETE : "";
    this.messages.show(session.messages, session.boundaries, cut);
    this.onSession(session);
  }

  async send(text, images = []) {
    if (this.isAnswering) return;
    this.messages.dropUnstored();
    this.messages.add({ role: "user", content: contentOf(text, images) });
    const answer = new Answer(this.messages.beginAnswer());
    const asked = { text, images };
    this.asked = asked;
    await this.receive(answer, (signal) => this.ask(asked, signal), (failure) => this.explain(failure, asked));
  }

  // Puts a message that was not sent back into the fields, unless they have another one.
  restore({ text, images }) {
    if (byId("prompt").value || !this.attachments.isEmpty) return;
    byId("prompt").value = text;
    this.attachments.restore(images);
  }

  async* ask({ text, images }, signal) {
    const content = await sentContent(text, images);
    signal.throwIfAborted();
    if (this.id === null) {
      const session = await api.create({ id: newId(), ...this.settings.forSession() });
      signal.throwIfAborted(); // another chat may be open now
      this.settings.adopt(session);
      this.setId(session.id);
    } else {
      await this.settings.save();
      signal.throwIfAborted();
    }
    unfinished.add(this.id);
    const fields = { ...this.settings.forTurn(), session_id: this.id, stream_options: { include_usage: true } };
    yield* api.chat({ ...fields, messages: [{ role: "user", content }] }, signal);
  }

  // Continues the last answer, or follows it where it is computed. `explain(failure)` is called if
  // another program has the session.
  async resume(explain = null) {
    if (this.isAnswering || this.id === null) return;
    const answer = this.answer ?? new Answer(this.messages.growLast(), true);
    if (this.answer) answer.isContinued = true;
    await this.receive(answer, (signal) => {
      unfinished.add(this.id);
      answer.view.grow();
      return api.rest(this.id, answer.lastId, signal);
    }, explain);
  }

  // Shows an answer until its end. `explain(failure)` is called for a turn that was refused.
  async receive(answer, open, explain = null) {
    clearFailure();
    const begin = performance.now();
    const turn = new AbortController();
    Object.assign(this, { turn, answer, cut: "", isStopping: false });
    this.setAnswering(true);
    showProgress("Waiting…");
    let failure = null;
    try {
      await answer.read(open(turn.signal));
    } catch (error) {
      failure = error;
    }
    if (turn.signal.reason === LEFT) return;
    const isStopped = this.isStopping;
    if (isStopped) failure = null;
    // The mark is shown before all else: other requests may wait for the daemon.
    const isIncomplete = failure !== null && failure.status !== BUSY && isCut(answer, failure);
    this.cut = isIncomplete ? `This answer was cut: ${failure.message}` : "";
    answer.view.end(this.cut);
    this.turn = null;
    this.setAnswering(false);
    unfinished.delete(this.id);
    const usage = answer.usage && describeUsage(answer.usage, (performance.now() - begin) / 1000);
    showProgress(isStopped ? "Stopped." : failure ? "" : usage ?? "");
    if (failure && !isIncomplete) explain?.(failure);
    await this.settle(failure === null && !isStopped);
  }

  // Reads the chat again after a turn.
  async settle(follows) {
    if (this.id !== null) await this.refresh(follows);
    this.onChange();
  }

  explain(failure, asked) {
    const { text, images } = asked;
    const field = byId("prompt");
    const again = () => {
      if (field.value === text) {
        field.value = "";
        this.attachments.clear();
      }
      this.send(text, images);
    };
    showFailure(failure, again);
    if (failure.retryAfter) showProgress(`The daemon suggests to try again in ${failure.retryAfter} s.`);
    this.restore(asked);
  }

  // Ends the turn in the daemon first: otherwise another tab, which reads with this one, continues it.
  async stop() {
    const { turn, id } = this;
    if (turn === null || this.isStopping) return;
    this.isStopping = true;
    showProgress("Stopping…");
    const pause = new Promise((resolve) => setTimeout(resolve, PAUSE_MS)); // the daemon may be away
    if (id !== null) await Promise.race([api.cancel(id).catch(() => {}), pause]);
    turn.abort();
  }

  // Ends the reasoning of the answer under way, which then begins.
  async endReasoning() {
    if (this.turn === null || this.id === null) return;
    try {
      await api.endReasoning(this.id);
    } catch (error) {
      showFailure(error, () => this.endReasoning());
    }
  }

  // Sends another text instead of that of a message, with the same images; null: of the last one.
  async edit(index, text) {
    if (this.isAnswering) return;
    clearFailure();
    let images = this.asked?.images ?? [];
    try {
      const session = await api.session(this.id);
      const at = index ?? this.lastAsked(session);
      if (at !== null) {
        images = await this.images.attached(session.messages[at].content);
        await api.rewind(this.id, at);
        this.messages.show(session.messages.slice(0, at), session.boundaries.filter((each) => each <= at));
      }
    } catch (error) {
      return showFailure(error, () => this.edit(index, text));
    }
    await this.send(text, images);
  }

  // Returns the number of the message that was sent last. Null: the daemon does not have it.
  lastAsked({ messages }) {
    const at = lastQuestion(messages);
    return at < 0 || (this.asked !== null && !isSame(messages[at].content, this.asked)) ? null : at;
  }

  async regenerate() {
    if (this.isAnswering) return;
    clearFailure();
    try {
      const { messages } = await api.session(this.id);
      const text = this.asked?.text ?? textOf(messages[lastQuestion(messages)].content);
      await this.edit(null, text);
    } catch (error) {
      showFailure(error, () => this.regenerate());
    }
  }

  // Begins a chat with the messages up to an answer; null: with all messages.
  async branch(index) {
    if (this.isAnswering) return;
    const id = newId();
    clearFailure();
    let title;
    try {
      const session = await api.session(this.id);
      title = `${session.title.slice(0, TITLE_LENGTH)} (branch)`;
      await api.fork(this.id, { id, messages: index === null ? session.messages.length : index + 1 });
    } catch (error) {
      return showFailure(error, () => this.branch(index));
    }
    await api.update(id, { title }).catch(showFailure);
    await this.open(id);
    showProgress("This is a branch: the other chat stays as it is.");
    byId("prompt").focus();
  }

  setAnswering(isAnswering) {
    byId("send").hidden = isAnswering;
    byId("stop").hidden = !isAnswering;
    if (!isAnswering) byId("answer-now").hidden = true;
  }
}
