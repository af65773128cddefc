/** The client: its connection to the daemon, any call over it, and sessions. */

import { Bounds, retryPausesMs, withJitter } from "./bounds.js";
import { Connection } from "./connection.js";
import { embedTexts } from "./embeddings.js";
import { computeGraph } from "./graphs.js";
import { rerankDocuments } from "./reranking.js";
import { ConnectionLost, InferdError, InvalidArgument, ShuttingDown, unreadable } from "./errors.js";
import { PROTOCOL_VERSION, READERS } from "./generated/protocol.js";
import { socketPath } from "./paths.js";
import { Session } from "./session.js";
import type { EmbedOptions, Embeddings } from "./embeddings.js";
import type { ComputeOptions, GraphInput, GraphOutput } from "./graphs.js";
import type { Ranking, RerankOptions } from "./reranking.js";
import type { CallName, Calls, Infill, ServerHello, UsageResult } from "./generated/protocol.js";
import type { Request } from "./request.js";
import type { SessionOptions, TurnOptions } from "./session.js";
import type { Reply } from "./stream.js";
import type { Prompt } from "./parts.js";
import type { Fields, Graph } from "./types.js";

const RETRY_MS_MAX = 30_000;

export interface ClientOptions {
  /** The daemon's socket; by default `INFERD_SOCKET`, else the user's own, else the system's. */
  path?: string | undefined;
  /** The default timeout of each call; Infinity for none. Default: 10 minutes. */
  timeoutMs?: number | undefined;
  /** Default: 5 s. */
  connectTimeoutMs?: number | undefined;
  /** How long a client with `reconnect`, or a session with `resume`, tries to connect again. Default: 1 minute. */
  resumeTimeoutMs?: number | undefined;
  /** How many times a call that is refused for now is repeated. Default: 0. */
  retries?: number | undefined;
  /** Connect again with the first call after the connection was lost. */
  reconnect?: boolean | undefined;
  /** Free text for the daemon's log. */
  software?: string | undefined;
  /** The name of this program among those of its user, which share fairly. */
  label?: string | undefined;
  /** The user on behalf of whom a gateway acts. */
  onBehalfOf?: string | undefined;
}

export interface CallOptions {
  timeoutMs?: number | undefined;
  /** Cancels the call in the daemon, too; the call then throws the signal's reason. */
  signal?: AbortSignal | undefined;
}

type EventOption<N extends CallName> = { onEvent?: ((event: Calls[N]["event"]) => void) | undefined };

/** The arguments of a call: the params may be omitted where none is required. */
export type CallArguments<N extends CallName> =
  Record<never, never> extends Calls[N]["params"]
    ? [params?: Calls[N]["params"], options?: CallOptions & EventOption<N>]
    : [params: Calls[N]["params"], options?: CallOptions & EventOption<N>];

/** A column by which usage is grouped; hours and days are those of UTC. */
export type UsageColumn = "user" | "model" | "label" | "key" | "hour" | "day";

export interface UsageOptions extends CallOptions {
  /** The last milliseconds, from the beginning of an hour on. Default: 7 days. */
  sinceMs?: number | undefined;
  /** The usage of all users, with the right `see-all`. */
  allUsers?: boolean | undefined;
}

/**
 * A client of the daemon. It connects at `connect` or with the first call, and any number of calls
 * may share it. Close it, or declare it with `await using`: an open connection keeps the process
 * running.
 */
export class Client implements AsyncDisposable {
  readonly path: string;
  /** @internal */ readonly reconnects: boolean;
  /** @internal */ readonly resumeTimeoutMs: number;
  /** @internal */ readonly retries: number;
  /** @internal */ readonly timeoutMs: number;
  readonly #options: ClientOptions;
  #connection: Connection | undefined;
  #opening: Promise<Connection> | undefined;
  #closed = false;

  constructor(options: ClientOptions = {}) {
    this.path = options.path ?? socketPath();
    this.timeoutMs = options.timeoutMs ?? 600_000;
    this.resumeTimeoutMs = options.resumeTimeoutMs ?? 60_000;
    this.retries = options.retries ?? 0;
    this.reconnects = options.reconnect ?? false;
    this.#options = options;
    if (!(
      this.timeoutMs > 0 &&
      this.resumeTimeoutMs > 0 &&
      (options.connectTimeoutMs ?? 1) > 0 &&
      this.retries >= 0
    )) {
      throw new InvalidArgument("a timeout or the number of retries is out of range", {
        hint: "timeouts are above 0 ms, retries 0 or more",
      });
    }
  }

  /** Return a client that is connected. */
  static async connect(options: ClientOptions = {}): Promise<Client> {
    const client = new Client(options);
    await client.open();
    return client;
  }

  /** The daemon's hello: its software, protocol and limits. Throws `ConnectionLost` before the client is open. */
  get server(): ServerHello {
    if (this.#connection) return this.#connection.server;
    throw new ConnectionLost("the client is not open", { hint: "await Client.connect(), or make a call" });
  }

  /** Whether the connection stands. */
  get connected(): boolean {
    return this.#connection !== undefined && !this.#connection.lost;
  }

  /** Make any call of the protocol. The result has its defaults, and handles as `Graph` and `Context`. */
  call<N extends CallName>(name: N, ...[params, options]: CallArguments<N>): Promise<Calls[N]["result"]> {
    return this.callOver(undefined, name, params, options);
  }

  /** Return a conversation with a model, which is loaded if necessary. */
  async session(model: string, options: SessionOptions = {}): Promise<Session> {
    const session = new Session(this, model, options);
    await session.open();
    return session;
  }

  /** Return a model's answer to one prompt, in a session of its own. */
  async chat(model: string, prompt: Prompt, options: TurnOptions = {}): Promise<Reply> {
    await using session = await this.session(model, { signal: options.signal });
    return await session.chat(prompt, options);
  }

  /** Return documents by their scores for a query, by a reranking model or a graph that is loaded. */
  rerank(
    model: string | Graph,
    query: string,
    documents: string[],
    options: RerankOptions = {},
  ): Promise<Ranking> {
    return rerankDocuments(this, model, query, documents, options);
  }

  /**
   * Return the text that a model writes between the `prefix` and the `suffix` of a place, in a session of its own.
   * Sessions stream it with such a place as the prompt.
   */
  infill(model: string, place: Infill, options: TurnOptions = {}): Promise<Reply> {
    return this.chat(model, place, options);
  }

  /** Return the embeddings of texts by a model, or by a graph that is loaded. */
  embed(model: string | Graph, texts: string[], options: EmbedOptions = {}): Promise<Embeddings> {
    return embedTexts(this, model, texts, options);
  }

  /**
   * Return the outputs of a graph, such as one in ONNX, by their names. `model` is its name, or a graph that is loaded,
   * with which each computation takes fewer calls.
   */
  compute(
    model: string | Graph,
    inputs: Record<string, GraphInput>,
    options: ComputeOptions = {},
  ): Promise<Record<string, GraphOutput>> {
    return computeGraph(this, model, inputs, options);
  }

  /** Return the user's usage, in sums by columns such as `model` and `day`, and the user's limits. */
  usage(by: UsageColumn[] = ["model"], options: UsageOptions = {}): Promise<UsageResult> {
    const { sinceMs = 604_800_000, allUsers = false, ...call } = options;
    return this.call("usage", { by, since_s: sinceMs / 1000, all: allUsers }, call);
  }

  /** Close the connection, which ends its calls, graphs and contexts. */
  async close(): Promise<void> {
    this.#closed = true;
    const opening = this.#opening;
    this.#connection?.lose(closedError(this.path));
    await opening?.then(
      (connection) => connection.lose(closedError(this.path)),
      () => {},
    );
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  /** @internal Make a call over a connection, by default over the client's. */
  async callOver<N extends CallName>(
    connection: Connection | undefined,
    name: N,
    params: unknown = {},
    options: CallOptions & EventOption<N> = {},
  ): Promise<Calls[N]["result"]> {
    const bounds = new Bounds(name, options.timeoutMs ?? this.timeoutMs, options.signal);
    let request: Request | undefined;
    try {
      const over = connection ?? (await this.live(bounds));
      request = await this.retrying(bounds, async () => over.request(name, params as Fields, bounds.signal));
      const readers = READERS[name];
      for (let event; (event = await request.nextEvent());) options.onEvent?.(read(event, readers.event));
      return read(request.result, readers.result);
    } catch (error) {
      request?.abandon(error); // `onEvent` may have thrown it
      throw error;
    } finally {
      bounds.close();
    }
  }

  /** @internal Return the request of the first attempt that is not refused for now, or of the last one. */
  async retrying(bounds: Bounds, attempt: () => Promise<Request>): Promise<Request> {
    for (let retries = this.retries; ; retries -= 1) {
      const request = await attempt();
      // A request with its first event is never repeated.
      if (retries <= 0 || (await bounds.race(request.firstNews()))) return request;
      const { error } = request;
      if (!(error instanceof InferdError) || !error.retryable || error instanceof ShuttingDown)
        return request;
      const pauseMs = withJitter(Math.min(1000 * (error.retryAfter ?? 0), RETRY_MS_MAX));
      if (performance.now() + pauseMs > bounds.deadline) return request;
      await bounds.sleep(pauseMs);
    }
  }

  /** @internal Return the connection, a new one if it was lost and the client reconnects. */
  async live(bounds: Bounds): Promise<Connection> {
    if (!this.#connection?.lost || !this.reconnects) return await bounds.race(this.open());
    const until = Math.min(bounds.deadline, performance.now() + this.resumeTimeoutMs);
    for (const pauseMs of retryPausesMs()) {
      try {
        return await bounds.race(this.reopen());
      } catch (error) {
        const final = !(error instanceof ConnectionLost || (error instanceof InferdError && error.retryable));
        if (final || this.#closed || performance.now() + pauseMs > until) throw error;
      }
      await bounds.sleep(pauseMs);
    }
    throw new Error("the pauses do not end");
  }

  /** Connect, unless the client is connected or its connection was lost. */
  async open(): Promise<Connection> {
    return this.#connection ?? (await this.reopen());
  }

  /** @internal Return the connection, or a new one if it was lost; callers share one attempt. */
  async reopen(): Promise<Connection> {
    if (this.#closed) throw closedError(this.path);
    if (this.#connection && !this.#connection.lost) return this.#connection;
    this.#opening ??= this.#connect().finally(() => (this.#opening = undefined));
    return await this.#opening;
  }

  async #connect(): Promise<Connection> {
    const { software, label, onBehalfOf, connectTimeoutMs } = this.#options;
    const hello = {
      protocol: PROTOCOL_VERSION,
      software: software ?? "inferd typescript client",
      label: label || undefined,
      on_behalf_of: onBehalfOf || undefined,
    };
    const connection = await Connection.open(this.path, hello, connectTimeoutMs ?? 5000);
    if (this.#closed) throw closedError(this.path);
    this.#connection = connection;
    return connection;
  }
}

function read<T>(fields: Fields, reader: ((fields: Fields) => T) | null): T {
  try {
    return reader ? reader(fields) : (fields as T);
  } catch (error) {
    throw unreadable(error);
  }
}

function closedError(path: string): ConnectionLost {
  return new ConnectionLost(`the client of ${path} is closed`, { hint: "make a new client" });
}
