// The messages of the open chat.

import { button, byId, copyText, element, typedText } from "./elements.js";
import { MessageBody } from "./message_body.js";
import { textOf } from "./texts.js";

const AUTHORS = { user: "You", assistant: "Answer", system: "System prompt", tool: "Tool" };
const NOT_READ = "The chat is longer than the model's context: it no longer reads the messages above.";
const NEAR_END = 80; // pixels: a reader who has scrolled further up is not moved

export class Messages {
  // The actions: `edit(index, text)` sends another text instead of a message, `branch(index)` begins
  // a branch behind an answer; an index that is null stands for the last message. `resume()`
  // continues the last answer, and `regenerate()` answers the last message again.
  // `onUse()` is called with them, because their buttons disappear with the focus. `images` has the
  // images of messages.
  constructor(actions, onUse, images) {
    this.images = images;
    this.place = byId("messages");
    this.actions = actions;
    this.onUse = onUse;
    this.drawn = new WeakMap(); // the message that each article shows
    this.texts = new WeakMap(); // its text
    this.bodies = new WeakMap(); // its body
    this.follows = true; // whether the end stays in view while the last message grows
    this.place.addEventListener("scroll", () => { this.follows = this.isNearEnd(); });
    this.sizes = new ResizeObserver(() => this.scrollToEnd(this.follows));
  }

  showWelcome(note = "") {
    this.place.replaceChildren(element("p", { className: "welcome" },
      element("strong", { textContent: "What can this machine do for you?" }),
      note || "Chats stay on this machine and share its models with all other programs."));
  }

  // `boundaries` are the numbers of messages that the daemon can go back to, `cut` is the cause for
  // which the last answer is not complete. Articles whose message is the same stay, with their focus
  // or edit.
  show(messages, boundaries, cut = "") {
    if (!messages.length) return this.showWelcome();
    const first = this.place.firstElementChild;
    const follows = this.isNearEnd();
    const isUnanswered = cut && messages.at(-1).role !== "assistant";
    const shown = isUnanswered ? [...messages, { role: "assistant", content: "" }] : messages;
    shown.forEach((each, index) => {
      const isLast = index === shown.length - 1 && each.role === "assistant";
      const message = {
        ...each, isLast, cut: isLast ? cut : "", lastDropped: each.dropped && !shown[index + 1]?.dropped,
      };
      const drawn = JSON.stringify([message, boundaries.includes(index), boundaries.includes(index + 1)]);
      const before = this.place.children[index];
      if (before && this.drawn.get(before) === drawn) return;
      const made = this.made(message, index, boundaries, before);
      this.drawn.set(made, drawn);
      if (!before) this.place.append(made);
      else if (before !== made) before.replaceWith(made);
    });
    while (this.place.children.length > shown.length) this.place.lastElementChild.remove();
    this.scrollToEnd(follows || first !== this.place.firstElementChild);
  }

  // Removes the messages of a turn that has failed, and is not in the daemon's history.
  dropUnstored() {
    for (const each of [...this.place.children]) if (!this.drawn.has(each)) each.remove();
  }

  add(message) {
    this.place.querySelector(".welcome")?.remove();
    const made = this.made(message, null, []);
    this.place.append(made);
    this.scrollToEnd(true);
    return made;
  }

  // Returns the article of a message. That of an answer is kept, since its body has grown there.
  made(message, index, boundaries, before = null) {
    const { role, content, dropped, lastDropped, isLast, cut, reasoning_content: reasoning } = message;
    const grown = this.bodies.get(before);
    const isKept = role === "assistant" && grown?.isAnswer;
    const body = isKept ? grown : new MessageBody(role);
    const article = isKept ? before : element("article");
    article.className = `message ${role}${dropped ? " dropped" : ""}`;
    if (isKept) for (const each of article.querySelectorAll(":scope > :not(.author, .body)")) each.remove();
    else article.append(element("p", { className: "author", textContent: AUTHORS[role] ?? role }), body.element);
    this.bodies.set(article, body);
    this.texts.set(article, textOf(content));
    body.show(textOf(content), reasoning ?? "");
    const pictures = isKept ? [] : this.images.shown(content);
    if (pictures.length) body.element.before(element("div", { className: "images" }, ...pictures));
    const tools = [];
    if (role === "user" && boundaries.includes(index)) {
      tools.push(button("Edit", () => this.edit(article, index, textOf(content)), { className: "small" }));
    }
    if (role === "assistant" && !cut && boundaries.includes(index + 1)) {
      tools.push(button("Branch from here", () => this.actions.branch(index), { className: "small" }));
      tools.push(button("Copy", () => copyText(textOf(content)), { className: "small" }));
      if (isLast) tools.push(this.tool("Regenerate", () => this.actions.regenerate()));
    }
    if (tools.length) article.append(element("div", { className: "tools" }, ...tools));
    if (lastDropped) article.append(element("p", { className: "full", textContent: NOT_READ }));
    if (cut) article.append(this.madeCut(cut, textOf(content)));
    return article;
  }

  // Returns the mark of an answer that is not complete, with the ways to go on.
  madeCut(cut, text) {
    const copy = text ? [button("Copy", () => copyText(text), { className: "small" })] : [];
    return element("div", { className: "cut" }, element("p", { textContent: cut }),
      element("div", { className: "tools" },
        this.tool("Continue", () => this.actions.resume(), "small primary"),
        this.tool("Regenerate", () => this.actions.regenerate()),
        button("Edit the question", () => this.editLast(), { className: "small" }),
        button("Branch from here", () => this.actions.branch(null), { className: "small" }), ...copy));
  }

  tool(label, action, className = "small") {
    return button(label, () => { this.onUse(); action(); }, { className });
  }

  editLast() {
    const article = [...this.place.querySelectorAll(".message.user")].at(-1);
    if (article) this.edit(article, null, this.texts.get(article));
  }

  edit(article, index, text) {
    const open = article.querySelector("textarea");
    if (open) return open.focus();
    const field = element("textarea", { value: text, rows: 3, "aria-label": "Edited message" });
    const before = [...article.childNodes];
    const end = () => article.replaceChildren(...before);
    const submit = () => { if (typedText(field)) { end(); this.actions.edit(index, typedText(field)); } };
    field.onkeydown = (event) => {
      if (event.key === "Escape") { end(); byId("prompt").focus(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
    };
    article.replaceChildren(field, element("div", { className: "tools" },
      button("Send again", submit, { className: "small" }), button("Cancel", end, { className: "small" })));
    field.focus();
  }

  beginAnswer() { return this.growing(this.add({ role: "assistant", content: "" })); }

  // Returns the last answer, to be read from its beginning. Its text stays until the first piece.
  growLast() {
    const last = this.place.lastElementChild;
    const article = last?.matches(".message.assistant") ? last : this.add({ role: "assistant", content: "" });
    this.drawn.delete(article);
    return this.growing(article);
  }

  // Returns an answer that grows: `add` appends text, `end` returns once it is shown, with the cause
  // for which it is not complete. `grow` shows that it goes on.
  growing(article) {
    let text = "";
    let reasoning = "";
    const body = this.bodies.get(article);
    const grow = () => {
      for (const each of article.querySelectorAll(":scope > .tools, :scope > .cut")) each.remove();
      article.classList.add("answering");
      this.place.setAttribute("aria-busy", "true"); // a screen reader reads the whole answer, not its pieces
      this.scrollToEnd(false);
    };
    grow();
    return {
      grow,
      add: (piece, thought) => {
        text += piece;
        reasoning += thought;
        body.show(text, reasoning, true);
      },
      end: (cut = "") => {
        if (text || reasoning) body.show(text, reasoning);
        article.classList.remove("answering");
        if (!this.place.querySelector(".answering")) this.place.removeAttribute("aria-busy");
        if (!cut) return;
        article.append(this.madeCut(cut, text));
        this.scrollToEnd(false);
      },
    };
  }

  observeLast() {
    if (this.observed === this.place.lastElementChild) return;
    this.sizes.disconnect();
    this.observed = this.place.lastElementChild;
    this.sizes.observe(this.observed);
  }

  isNearEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.place;
    return scrollHeight - scrollTop - clientHeight < NEAR_END;
  }

  scrollToEnd(always) {
    this.observeLast();
    if (always || this.isNearEnd()) this.place.scrollTop = this.place.scrollHeight;
  }
}
