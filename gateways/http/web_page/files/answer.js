// An answer that arrives: its events, over several connections.

import { byId, showProgress } from "./elements.js";
import { Failure, LOST } from "./server.js";

// The codes of errors after which a turn can be continued.
const CONTINUABLE = new Set(["connection_lost", "shutting_down", "worker_crashed"]);

// Returns whether a failure has cut an answer, which can then be continued. Otherwise its turn was
// refused, and the message can be sent again.
export function isCut({ hasBegun, isContinued }, failure) {
  return hasBegun || isContinued || CONTINUABLE.has(failure.code);
}

export class Answer {
  // `view` shows the answer. A continued one is in the daemon's history, at least its question.
  constructor(view, isContinued = false) {
    Object.assign(this, { view, isContinued, hasBegun: false, lastId: null, usage: null });
  }

  // Takes over events until the end of the answer.
  async read(events) {
    for await (const { id, data, comment, isDone } of events) {
      if (isDone) return;
      if (comment) showProgress(comment.replace(/^waiting/, "Waiting"));
      if (data?.error) throw new Failure(0, data);
      if (id) this.lastId = id;
      this.add(data?.choices?.[0]?.delta);
      if (data?.usage) this.usage = data.usage;
    }
    throw new Failure(0, LOST);
  }

  add(delta) {
    if (!delta?.content && !delta?.reasoning_content) return;
    this.hasBegun = true;
    // Only a model that reasons can be asked to answer now.
    byId("answer-now").hidden = Boolean(delta.content);
    showProgress(delta.content ? "Answering…" : "Reasoning…");
    this.view.add(delta.content ?? "", delta.reasoning_content ?? "");
  }
}

export function describeUsage(usage, seconds) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const drafts = usage.completion_tokens_details;
  const accepted = drafts?.accepted_prediction_tokens ?? 0;
  const drafted = accepted + (drafts?.rejected_prediction_tokens ?? 0);
  return `${usage.completion_tokens} tokens in ${seconds.toFixed(1)} s; `
    + `${cached} of ${usage.prompt_tokens} tokens of the prompt were reused.`
    + (drafted ? ` ${accepted} of ${drafted} drafts were accepted.` : "");
}
