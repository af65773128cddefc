// The body of a message: an answer below its reasoning. Every other message is shown as it was typed.

import { setText } from "./code_block.js";
import { element } from "./elements.js";
import { Rendering } from "./rendering.js";

export class MessageBody {
  constructor(role) {
    this.isAnswer = role === "assistant";
    this.text = "";
    if (!this.isAnswer) {
      this.element = element("div", { className: "body typed", dir: "auto" });
      return;
    }
    this.reasoning = element("p", { className: "reasoning", dir: "auto" });
    const place = element("div", { className: "text" });
    this.rendering = new Rendering(place);
    this.element = element("div", { className: "body" }, place);
  }

  // Shows a text: at once, except that one which is a continuation of the shown text is drawn in
  // steps. One that `grows` will be followed by a longer one.
  show(text, reasoning = "", grows = false) {
    if (!this.isAnswer) {
      this.element.textContent = text;
      return;
    }
    const isContinued = !grows && this.text !== "" && text.startsWith(this.text);
    this.text = text;
    setText(this.reasoning, reasoning);
    if (!reasoning) this.reasoning.remove();
    else if (!this.reasoning.parentNode) this.element.prepend(this.reasoning);
    if (grows || isContinued) this.rendering.follow(text, !grows);
    else this.rendering.show(text);
  }
}
