/** The bounds of a call in time, and the pauses between attempts. */

import { setTimeout as sleep } from "node:timers/promises";

import { Timeout } from "./errors.js";

const RETRY_PAUSE_MS = 50;
const RETRY_PAUSE_MS_MAX = 1000;

/** A call's timeout and its caller's signal, as one `signal`. Close it when the call has ended. */
export class Bounds {
  readonly deadline: number;
  readonly #controller = new AbortController();
  readonly #timer: NodeJS.Timeout | undefined;
  readonly #abort: () => void;
  readonly #given: AbortSignal | undefined;

  constructor(call: string, timeoutMs: number, given?: AbortSignal) {
    given?.throwIfAborted();
    this.deadline = performance.now() + timeoutMs;
    this.#given = given;
    this.#abort = () => this.#controller.abort(given?.reason);
    given?.addEventListener("abort", this.#abort, { once: true });
    if (Number.isFinite(timeoutMs)) {
      const error = new Timeout(`${call} took longer than ${timeoutMs} ms`, {
        hint: "raise timeoutMs",
        data: { timeout: "total" },
      });
      this.#timer = setTimeout(() => this.#controller.abort(error), Math.min(timeoutMs, 2 ** 31 - 1));
      this.#timer.unref(); // the connection keeps the process running
    }
  }

  get signal(): AbortSignal {
    return this.#controller.signal;
  }

  close(): void {
    clearTimeout(this.#timer);
    this.#given?.removeEventListener("abort", this.#abort);
  }

  /** Return the outcome of `promise`, or throw the signal's reason if that comes first. */
  async race<T>(promise: Promise<T>): Promise<T> {
    const { signal } = this;
    signal.throwIfAborted();
    let abort!: () => void;
    const aborted = new Promise<never>((_, reject) => {
      abort = () => reject(signal.reason as Error);
      signal.addEventListener("abort", abort, { once: true });
    });
    try {
      return await Promise.race([promise, aborted]);
    } finally {
      signal.removeEventListener("abort", abort);
    }
  }

  async sleep(ms: number): Promise<void> {
    const done = new AbortController();
    try {
      await this.race(sleep(ms, undefined, { signal: done.signal }));
    } finally {
      done.abort();
    }
  }
}

/** Return `ms` with jitter, which only adds: many clients retry at the same time. */
export function withJitter(ms: number): number {
  return ms * (1 + Math.random() / 4);
}

/** Yield the pauses between attempts to connect again, without an end. */
export function* retryPausesMs(): Generator<number, never> {
  for (let pause = RETRY_PAUSE_MS; ; pause = Math.min(2 * pause, RETRY_PAUSE_MS_MAX)) yield withJitter(pause);
}
