// The messages of the open chat.

import { button, byId, copyText, element, typedText } from "./elements.js";
import { MessageBody } from "./message_body.js";

const AUTHORS = { user: "You", assistant: "Answer", system: "System prompt", tool: "Tool" };
const NOT_READ = "The chat is longer than the model's context: it no longer reads the messages above.";
const NEAR_END = 80; // pixels: a reader who has scrolled further up is not moved

export class Messages {
  // `onEdit(index, text)` sends another text instead of a message, `onBranch(index)` begins a
  // branch behind an answer.
  constructor(onEdit, onBranch) {
    this.place = byId("messages");
    this.onEdit = onEdit;
    this.onBranch = onBranch;
    this.drawn = new WeakMap(); // the message that each article shows
    this.bodies = new WeakMap(); // its body
    this.follows = true; // whether the end stays in view while the last message grows
    this.place.addEventListener("scroll", () => { this.follows = this.isNearEnd(); });
    this.sizes = new ResizeObserver(() => this.scrollToEnd(this.follows));
  }

  showWelcome() {
    this.place.replaceChildren(element("p", { className: "welcome" },
      element("strong", { textContent: "What can this machine do for you?" }),
      "Chats stay on this machine and share its models with all other programs."));
  }

  // `boundaries` are the numbers of messages that the daemon can go back to. Articles whose message
  // is the same stay, with their focus or edit.
  show(messages, boundaries) {
    if (!messages.length) return this.showWelcome();
    const first = this.place.firstElementChild;
    const follows = this.isNearEnd();
    messages.forEach((each, index) => {
      const message = { ...each, lastDropped: each.dropped && !messages[index + 1]?.dropped };
      const drawn = JSON.stringify([message, boundaries.includes(index), boundaries.includes(index + 1)]);
      const before = this.place.children[index];
      if (before && this.drawn.get(before) === drawn) return;
      const made = this.made(message, index, boundaries, before);
      this.drawn.set(made, drawn);
      if (!before) this.place.append(made);
      else if (before !== made) before.replaceWith(made);
    });
    while (this.place.children.length > messages.length) this.place.lastElementChild.remove();
    this.scrollToEnd(follows || first !== this.place.firstElementChild);
  }

  // Removes the messages of a turn that has failed, and is not in the daemon's history.
  dropUnstored() {
    for (const each of [...this.place.children]) if (!this.drawn.has(each)) each.remove();
  }

  add(message) {
    this.place.querySelector(".welcome")?.remove();
    const made = this.made(message, -1, []);
    this.place.append(made);
    this.scrollToEnd(true);
    return made;
  }

  // Returns the article of a message. That of an answer is kept, since its body has grown there.
  made({ role, content, dropped, lastDropped, reasoning_content: reasoning }, index, boundaries, before = null) {
    const grown = this.bodies.get(before);
    const isKept = role === "assistant" && grown?.isAnswer;
    const body = isKept ? grown : new MessageBody(role);
    const article = isKept ? before : element("article");
    article.className = `message ${role}${dropped ? " dropped" : ""}`;
    if (isKept) for (const each of article.querySelectorAll(":scope > :not(.author, .body)")) each.remove();
    else article.append(element("p", { className: "author", textContent: AUTHORS[role] ?? role }), body.element);
    this.bodies.set(article, body);
    body.show(textOf(content), reasoning ?? "");
    const tools = element("div", { className: "tools" });
    if (role === "user" && boundaries.includes(index)) {
      tools.append(button("Edit", () => this.edit(article, index, textOf(content)), { className: "small" }));
    }
    if (role === "assistant" && boundaries.includes(index + 1)) {
      tools.append(button("Branch from here", () => this.onBranch(index), { className: "small" }));
      tools.append(button("Copy", () => copyText(textOf(content)), { className: "small" }));
    }
    if (tools.hasChildNodes()) article.append(tools);
    if (lastDropped) article.append(element("p", { className: "full", textContent: NOT_READ }));
    return article;
  }

  edit(article, index, text) {
    const field = element("textarea", { value: text, rows: 3, "aria-label": "Edited message" });
    const before = [...article.childNodes];
    const end = () => article.replaceChildren(...before);
    const submit = () => { if (typedText(field)) { end(); this.onEdit(index, typedText(field)); } };
    field.onkeydown = (event) => {
      if (event.key === "Escape") { end(); byId("prompt").focus(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
    };
    article.replaceChildren(field, element("div", { className: "tools" },
      button("Send again", submit, { className: "small" }), button("Cancel", end, { className: "small" })));
    field.focus();
  }

  // Returns an answer that grows: `add` appends text, `end` returns once it is shown.
  beginAnswer() {
    const article = this.add({ role: "assistant", content: "" });
    article.classList.add("answering");
    this.place.setAttribute("aria-busy", "true"); // a screen reader reads the whole answer, not its pieces
    let text = "";
    let reasoning = "";
    const body = this.bodies.get(article);
    return {
      add: (piece, thought) => {
        text += piece;
        reasoning += thought;
        body.show(text, reasoning, true);
      },
      end: () => {
        body.show(text, reasoning);
        article.classList.remove("answering");
        this.place.removeAttribute("aria-busy");
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

function textOf(content) {
  if (typeof content === "string") return content;
  return (content ?? []).map((part) => part.text ?? "").join("");
}
