/** The base of all errors. */

import type { Fields } from "./types.js";

export interface ErrorOptions {
  hint?: string | undefined;
  data?: Fields | undefined;
  retryable?: boolean | undefined;
}

/**
 * An error of the daemon or of this client: the message has the values, `hint` says what to do, and
 * `data` has values for programs. Each class has its name and number in the protocol.
 */
export class InferdError extends Error {
  static readonly wire = { name: "Unknown", number: 299, wasi: 5, retryable: false };

  /** The number of the error. */
  readonly number: number;
  /** The number that a guest of wasi-nn sees. */
  readonly wasi: number;
  readonly hint: string;
  readonly data: Fields;
  /** Whether the same call may succeed later. */
  readonly retryable: boolean;

  constructor(message: string, options: ErrorOptions = {}) {
    super(message);
    const { name, number, wasi, retryable } = new.target.wire;
    this.name = name;
    this.number = number;
    this.wasi = wasi;
    this.hint = options.hint || "see the daemon's log for the cause";
    this.data = options.data ?? {};
    this.retryable = options.retryable ?? retryable;
  }

  /** The seconds after which to retry; undefined if the error is not retryable. */
  get retryAfter(): number | undefined {
    const seconds = this.data.retry_after_s;
    return this.retryable ? (typeof seconds === "number" ? seconds : 1) : undefined;
  }
}
