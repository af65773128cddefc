/** A session's attachment to the daemon: its lease on a model, its context, its connection. */

import { Bounds, retryPausesMs } from "./bounds.js";
import * as errors from "./errors.js";
import { InferdError, isLoss } from "./errors.js";
import type { CallArguments, CallOptions, Client } from "./client.js";
import type { Connection } from "./connection.js";
import type { ModelParameters } from "./generated/parameters.js";
import type { CallName, Calls, Metadata } from "./generated/protocol.js";
import type { Context, Fields, Graph, Priority } from "./types.js";

const CLOSE_MS_MAX = 5000;
/** Errors of a closing call whose object is already closed or lost, or that takes too long. */
const CLOSED_ERRORS = [
  errors.InvalidArgument,
  errors.SessionExpired,
  errors.ConnectionLost,
  errors.ShuttingDown,
  errors.Timeout,
];

export interface SessionOptions {
  /** The system prompt. */
  system?: string | undefined;
  /** The id by which the session can be opened again, with its history. */
  sessionId?: string | undefined;
  /** Whether the session may be written to disk. Default: true. */
  persist?: boolean | undefined;
  /** Attach again after the connection was lost, even by a restart of the daemon; needs a sessionId. */
  resume?: boolean | undefined;
  /** Add prompts to the history unchanged, without the chat template. */
  raw?: boolean | undefined;
  priority?: Priority | undefined;
  /** The longest wait for a place where too many sessions are open; by default the call fails at once. */
  queueTimeoutMs?: number | undefined;
  /** Parameters of the session's turns. */
  options?: ModelParameters | undefined;
  /** Parameters of the model's graph, as for `load_by_name_with_config`. */
  config?: ModelParameters | undefined;
  onProgress?: ((progress: number) => void) | undefined;
  /** Cancels the opening of the session. */
  signal?: AbortSignal | undefined;
}

/** The number of turns begun, and of tokens in the history. */
export interface Progress {
  turns: number;
  tokens: number;
}

export class Attachment {
  graph: Graph | undefined;
  context: Context | undefined;
  attached = false;
  /** Whether the daemon must have a history when the session attaches again. */
  hasHistory = false;
  connection: Connection | undefined;
  #leases = false;
  #renewing: Promise<void> | undefined;

  constructor(
    readonly client: Client,
    readonly settings: SessionOptions,
    readonly model: string,
  ) {}

  /** The context of an open session. Throws `InvalidArgument` if it is not open. */
  get liveContext(): Context {
    if (this.context !== undefined) return this.context;
    throw new errors.InvalidArgument("the session is closed", { hint: "open another session" });
  }

  /** Make a call over the session's connection. */
  call<N extends CallName>(name: N, ...[params, options]: CallArguments<N>): Promise<Calls[N]["result"]> {
    return this.client.callOver(this.connection, name, params, options);
  }

  /** Lease the model, open the context, and set its system prompt and options. */
  async open(): Promise<void> {
    const { client, settings } = this;
    const bounds = new Bounds("session", client.timeoutMs, settings.signal);
    try {
      const connection = settings.resume ? await bounds.race(client.reopen()) : await client.live(bounds);
      try {
        await this.#openContext(connection, bounds);
        await this.#initialize(bounds);
      } catch (error) {
        if (!settings.resume || !isLoss(error)) throw error;
        await this.attachAgain(bounds);
      }
    } catch (error) {
      await this.close();
      throw error;
    } finally {
      bounds.close();
    }
  }

  /** Lease the model and open the context; if either fails, close both. */
  async #openContext(connection: Connection, bounds: Bounds): Promise<void> {
    try {
      await this.#leaseAndOpen(connection, bounds);
    } catch (error) {
      await this.close();
      throw error;
    }
  }

  async #leaseAndOpen(connection: Connection, bounds: Bounds): Promise<void> {
    const { sessionId, persist, config, onProgress, priority } = this.settings;
    const within: CallOptions = { signal: bounds.signal, timeoutMs: Infinity };
    this.connection = connection;
    this.graph = this.context = undefined;
    const name = {
      name: this.model,
      config: config ? JSON.stringify(config) : undefined,
      progress: onProgress && true,
    };
    const onEvent = onProgress && (({ progress }: { progress: number }) => onProgress(progress));
    const { graph } = await this.call("load_by_name_with_config", name, { ...within, onEvent });
    this.graph = graph;
    this.#leases = true;
    const fields = { graph, priority, ...place(this.settings) };
    const opened =
      sessionId === undefined
        ? await this.call("init_execution_context", fields, within)
        : await this.call(
            "init_execution_context_with_session_id",
            { ...fields, session_id: sessionId, persist },
            within,
          );
    this.context = opened.context;
    this.attached = opened.attached;
  }

  async #initialize(bounds: Bounds): Promise<void> {
    const { system, options } = this.settings;
    const within: CallOptions = { signal: bounds.signal, timeoutMs: Infinity };
    const context = this.liveContext;
    if (system !== undefined && !this.attached) await this.call("reset", { context, system }, within);
    this.hasHistory = this.attached || system !== undefined;
    if (options) await this.call("set_options", { context, options }, within);
  }

  /** Return the attachment of a branch, which shares this lease. */
  branch(context: Context, sessionId: string | undefined): Attachment {
    const resume = this.settings.resume && sessionId !== undefined;
    const settings = { ...this.settings, sessionId, resume, options: undefined, onProgress: undefined };
    const branch = new Attachment(this.client, settings, this.model);
    Object.assign(branch, { graph: this.graph, context, connection: this.connection, hasHistory: true });
    return branch;
  }

  /** Close the context and end the lease; a session with an id can be attached again. */
  async close(): Promise<void> {
    const { context, graph, connection } = this;
    const leases = this.#leases;
    this.context = this.graph = undefined;
    this.#leases = false;
    if (!connection || connection.lost) return; // the daemon has closed them
    const within = { timeoutMs: CLOSE_MS_MAX };
    if (context) await unlessClosed(this.call("finalize_execution_context", { context, keep: true }, within));
    if (graph && leases) await unlessClosed(this.call("unload", { graph, keep: true }, within));
  }

  /** Attach again if the connection was lost and the session resumes. */
  async ensureConnected(bounds: Bounds): Promise<void> {
    if (this.settings.resume && this.connection?.lost) await this.attachAgain(bounds);
  }

  /** Attach over a new connection once the present one has ended. Throws `SessionExpired` if the history is lost. */
  async attachAgain(bounds: Bounds): Promise<void> {
    this.#renewing ??= this.#renew().finally(() => (this.#renewing = undefined));
    await bounds.race(this.#renewing);
  }

  /** Open again a context that was idle for too long, over the same connection. */
  async openAgain(bounds: Bounds): Promise<void> {
    const connection = this.connection;
    await this.close();
    await this.#openContext(connection as Connection, bounds);
    await this.#restore(bounds);
  }

  async #restore(bounds: Bounds): Promise<void> {
    if (this.attached) return;
    if (!this.hasHistory) return await this.#initialize(bounds);
    await this.close();
    throw new errors.SessionExpired(`the daemon no longer has the session ${this.settings.sessionId}`, {
      hint: "open it again to begin without a history; `inferd status` may show the cause",
    });
  }

  async #renew(): Promise<void> {
    const bounds = new Bounds("attaching the session again", this.client.resumeTimeoutMs);
    try {
      // After `ShuttingDown` the old daemon still answers; the next one listens after its end.
      await bounds.race(this.connection?.ended ?? Promise.resolve());
      for (const pauseMs of retryPausesMs()) {
        try {
          await this.#openContext(await bounds.race(this.client.reopen()), bounds);
          return await this.#restore(bounds);
        } catch (error) {
          const passes = isLoss(error) || (error instanceof InferdError && error.retryable);
          if (!passes || performance.now() + pauseMs > bounds.deadline) throw error;
          if (error instanceof errors.ShuttingDown)
            await bounds.race(this.connection?.ended ?? Promise.resolve());
        }
        await bounds.sleep(pauseMs);
      }
    } finally {
      bounds.close();
    }
  }

  /** Return the session's progress, as reported by the daemon. */
  async progress(options: CallOptions): Promise<Progress> {
    const { sessions } = await this.call("sessions", { session_id: this.settings.sessionId }, options);
    const found = sessions.find(({ context }) => context === this.context);
    if (found) return { turns: found.turns, tokens: found.tokens };
    throw new errors.SessionExpired(`the session ${this.settings.sessionId} is no longer open`);
  }

  /**
   * Return whether a session that was just attached can resume its last turn: it was interrupted, or has
   * ended and its end can be read again.
   */
  async canResume(options: CallOptions): Promise<boolean> {
    const { data } = await this.call("get_output", { context: this.liveContext, index: 1 }, options);
    const metadata = JSON.parse(Buffer.from(data).toString()) as Metadata;
    return metadata.stop_reason != null;
  }
}

/** Return the fields of the wait for a place. */
export function place({ priority, queueTimeoutMs }: SessionOptions): Fields {
  return queueTimeoutMs ? { priority, queue_timeout_s: queueTimeoutMs / 1000 } : {};
}

async function unlessClosed(closing: Promise<unknown>): Promise<void> {
  await closing.catch((error: unknown) => {
    if (!CLOSED_ERRORS.some((kind) => error instanceof kind)) throw error;
  });
}
