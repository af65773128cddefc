/** A session's request for a streamed turn, and the decision how it continues after a loss. */

import * as errors from "./errors.js";
import { isLoss } from "./errors.js";
import { isInfill, messagesOf, withContents } from "./parts.js";
import type { Attachment, Progress } from "./attachment.js";
import type { Bounds } from "./bounds.js";
import type { CallOptions } from "./client.js";
import type { ModelParameters } from "./generated/parameters.js";
import type { QueueEvent, ResumeParams } from "./generated/protocol.js";
import type { Prompt } from "./parts.js";
import type { Request } from "./request.js";
import type { Fields, Priority } from "./types.js";

/** A turn fails after this many losses of its connection in a row without a new token. */
const LOSSES_MAX = 8;

export interface TurnOptions extends CallOptions {
  /** Add the prompt unchanged, without the chat template. */
  raw?: boolean | undefined;
  /** A newer call with the same key cancels this one, which then fails with `Cancelled`. */
  supersede?: string | undefined;
  /** Parameters for this turn. */
  options?: ModelParameters | undefined;
  priority?: Priority | undefined;
  /** The turn must begin within this time. */
  queueTimeoutMs?: number | undefined;
  /** Is called with the turn's place in the queue while it waits. */
  onQueue?: ((place: QueueEvent) => void) | undefined;
  /** The caller's span, as in W3C's Trace Context. */
  traceparent?: string | undefined;
}

/** The part of an answer that a client has. */
export interface SoFar {
  tokens: number[];
  text: Uint8Array;
  reasoning: Uint8Array;
  rawText: Uint8Array;
}

export type RecoveryStep = "repeat" | "answer" | "resume" | "fail";

/**
 * Return how a turn continues of which `tokensRead` tokens were read: it is requested again (the daemon
 * received nothing of it), an answer to its input is requested (no turn began), or it is resumed.
 *
 * `before` is the session's progress when the turn was requested. `resumable`: the daemon has the rest of
 * the session's last turn. `refused`: the daemon answered that the turn had not begun.
 */
export function recoveryStep(
  before: Progress | undefined,
  after: Progress,
  resumable: boolean,
  tokensRead: number,
  refused: boolean,
): RecoveryStep {
  if (!before) return "repeat";
  if (after.turns === before.turns && after.tokens === before.tokens && tokensRead === 0) return "repeat";
  if (resumable && after.turns > before.turns) return "resume";
  if (tokensRead === 0 && (refused || after.turns === before.turns)) return "answer";
  return "fail";
}

/** Return the fields by which a turn is scheduled, of its call's options. */
export function scheduling(options: TurnOptions, timeoutMs: number): Fields {
  const totalMs = options.timeoutMs ?? timeoutMs;
  return {
    priority: options.priority,
    queue_timeout_s: options.queueTimeoutMs === undefined ? undefined : options.queueTimeoutMs / 1000,
    timeout_s: Number.isFinite(totalMs) ? totalMs / 1000 : undefined,
    traceparent: options.traceparent,
  };
}

/** Return the fields of a turn's input. */
export function turnInput(prompt: Prompt | undefined, options: TurnOptions): Fields {
  return { ...promptFields(prompt), raw: options.raw, options: options.options, supersede: options.supersede };
}

function promptFields(prompt: Prompt | undefined): Fields {
  if (typeof prompt === "string") return { prompt };
  if (isInfill(prompt)) return { infill: { ...prompt } };
  return { messages: prompt && messagesOf(prompt) };
}

export class Turn {
  /** The last request for the turn. */
  request: Request | undefined;
  #before: Progress | undefined;
  #losses = 0;
  #tokensAtLoss = 0;
  #over = false;
  #call: "stream" | "resume";
  #params: Fields;
  readonly #attachment: Attachment;
  readonly #onRequest: (request: Request) => void;

  constructor(
    attachment: Attachment,
    call: "stream" | "resume",
    params: Fields,
    onRequest: (request: Request) => void,
  ) {
    this.#attachment = attachment;
    this.#call = call;
    this.#params = params;
    this.#onRequest = onRequest;
  }

  /** Send the request for the turn. */
  async send(bounds: Bounds): Promise<Request> {
    if (this.#attachment.settings.resume) this.#noteBefore(await this.#progress(bounds));
    return await this.#send(bounds, this.#call, this.#params);
  }

  /** Note the session's progress before the turn; a turn to resume has begun already. */
  #noteBefore({ turns, tokens }: Progress): void {
    this.#before = { turns: this.#call === "resume" ? turns - 1 : turns, tokens };
  }

  async #progress(bounds: Bounds): Promise<Progress> {
    try {
      return await this.#attachment.progress(within(bounds));
    } catch (error) {
      if (!(error instanceof errors.SessionExpired)) throw error;
      await this.#attachment.openAgain(bounds);
      return await this.#attachment.progress(within(bounds));
    }
  }

  async #send(bounds: Bounds, call: "stream" | "resume", params: Fields): Promise<Request> {
    const contents = await withContents(params);
    const { client, liveContext } = this.#attachment;
    const connection = this.#attachment.connection ?? (await client.live(bounds));
    this.request = connection.request(call, { ...contents, context: liveContext }, bounds.signal);
    this.#attachment.hasHistory = true;
    this.#onRequest(this.request);
    return this.request;
  }

  /** Return whether the turn, which failed with `error`, can be continued after `tokensRead` tokens. */
  canRecover(error: unknown, tokensRead: number): boolean {
    if (!this.#attachment.settings.resume || this.#over || !isLoss(error)) return false;
    this.#losses = tokensRead > this.#tokensAtLoss ? 1 : this.#losses + 1;
    this.#tokensAtLoss = tokensRead;
    return this.#losses <= LOSSES_MAX;
  }

  async attachAgain(bounds: Bounds): Promise<void> {
    await this.#attachment.attachAgain(bounds);
  }

  /** Send a request for the rest of a turn that failed with `error`, over the new connection. */
  async sendRest(bounds: Bounds, soFar: SoFar, error: unknown): Promise<Request> {
    const after = await this.#attachment.progress(within(bounds));
    const resumable = await this.#attachment.canResume(within(bounds));
    const refused = error instanceof errors.ShuttingDown && this.request?.lost === false;
    const step = recoveryStep(this.#before, after, resumable, soFar.tokens.length, refused);
    if (step === "resume") return await this.#send(bounds, "resume", this.#restParams(soFar));
    if (step === "fail" || (step === "answer" && this.#call === "resume")) {
      this.#over = true;
      throw new errors.ConnectionLost("the daemon no longer has the turn's output", {
        hint: "the session's history has its answer: continue with the next turn, or `rewind`",
      });
    }
    if (step === "answer") this.#params = { ...this.#params, prompt: undefined, messages: undefined, infill: undefined };
    this.#noteBefore(after);
    return await this.#send(bounds, this.#call, this.#params);
  }

  #restParams(soFar: SoFar): Fields {
    const { prompt, messages, raw, options, ...scheduled } = this.#params;
    const given = (this.#call === "resume" ? this.#params : {}) as Partial<ResumeParams>;
    return {
      ...scheduled,
      tokens: [...(given.tokens ?? []), ...soFar.tokens],
      text: joined(given.text, soFar.text),
      reasoning: joined(given.reasoning, soFar.reasoning),
      raw_text: joined(given.raw_text?.length ? given.raw_text : given.text, soFar.rawText),
    };
  }
}

function within(bounds: Bounds): CallOptions {
  return { signal: bounds.signal, timeoutMs: Infinity };
}

function joined(first: Uint8Array | undefined, second: Uint8Array): Uint8Array {
  return first ? Buffer.concat([first, second]) : second;
}
