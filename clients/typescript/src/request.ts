/** A request under way: its events, its credit and its reply. */

import { InferdError, raisedAgain } from "./errors.js";
import { LIMITS } from "./generated/protocol.js";
import type { Fields } from "./types.js";

/** The connection over which a request is sent. */
export interface Sender {
  grantCredit(request: Request, events: number): void;
  cancelRequest(request: Request): void;
}

/**
 * A request, which its connection writes and one reader reads. It is done when its reader has an
 * outcome, and `settled` when the daemon has answered or the connection was lost.
 */
export class Request {
  /** Whether an event has arrived. */
  begun = false;
  /** Whether it was given up before the daemon's answer. */
  abandoned = false;
  answered = false;
  /** Whether the connection was lost before the answer. */
  lost = false;
  error: unknown;
  /** The metadata of a turn in the answer, also in that of a cancelled turn. */
  metadata: Fields = {};
  readonly settled: Promise<void>;
  readonly credit: number;
  #result: Fields | undefined;
  #failed = false;
  #events: Fields[] = [];
  #consumed = 0;
  #wake: (() => void) | undefined;
  #settle!: () => void;
  readonly #sender: Sender;

  constructor(
    sender: Sender,
    readonly id: number,
    readonly call: string,
    params: Fields,
  ) {
    this.#sender = sender;
    this.credit = typeof params.credit === "number" ? params.credit : LIMITS.CREDIT_DEFAULT;
    this.settled = new Promise((resolve) => (this.#settle = resolve));
  }

  get done(): boolean {
    return this.#failed || this.#result !== undefined;
  }

  /** Return the next event, or undefined after the last one. Throws the request's error. */
  async nextEvent(): Promise<Fields | undefined> {
    while (this.#events.length === 0 && !this.done) {
      await new Promise<void>((resolve) => (this.#wake = resolve));
    }
    const event = this.#events.shift();
    if (event !== undefined) this.#countEvent(event);
    else if (this.#failed) throw this.error instanceof InferdError ? raisedAgain(this.error) : this.error;
    return event;
  }

  /** Wait for the first event or the outcome, and return whether there was an event or a result. */
  async firstNews(): Promise<boolean> {
    while (!this.begun && !this.done) await new Promise<void>((resolve) => (this.#wake = resolve));
    return this.begun || !this.#failed;
  }

  /** Return the result, once the reader has taken all events. */
  get result(): Fields {
    return this.#result ?? {};
  }

  /** Return credit for events that the reader has taken, each time for half of what it may take. */
  #countEvent(event: Fields): void {
    if ((this.call !== "stream" && this.call !== "resume") || "waiting" in event) return;
    this.#consumed += 1;
    if (this.#consumed < Math.max(1, this.credit >> 1)) return;
    this.#sender.grantCredit(this, this.#consumed);
    this.#consumed = 0;
  }

  /** Cancel the request unless it is answered; its reader gets `error` at once. */
  abandon(error: unknown): void {
    if (this.answered || this.abandoned) return;
    this.abandoned = true;
    this.#events = [];
    this.#finish(undefined, error);
    this.#sender.cancelRequest(this);
  }

  /** @internal Add an event that has arrived. */
  addEvent(event: Fields): void {
    this.begun = true;
    if (this.abandoned) return;
    this.#events.push(event);
    this.#wake?.();
  }

  /** @internal Set the daemon's answer; `fields` of an error are its data. */
  answer(fields: Fields, error?: unknown): void {
    this.answered = true;
    this.metadata = (fields.metadata ?? {}) as Fields;
    this.#finish(fields, error);
    this.#settle();
  }

  #finish(result: Fields | undefined, error: unknown): void {
    if (!this.done) {
      this.#failed = error !== undefined;
      this.error = error;
      this.#result = this.#failed ? undefined : result;
    }
    this.#wake?.();
  }
}
