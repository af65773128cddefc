/** A conversation with a model. */

import { Attachment, place } from "./attachment.js";
import { Bounds } from "./bounds.js";
import { Cancelled, errorFromWire, InvalidArgument } from "./errors.js";
import { readToolCallPart } from "./generated/protocol.js";
import { withContents } from "./parts.js";
import { addToolCalls, Stream, toText } from "./stream.js";
import { scheduling, Turn, turnInput } from "./turn.js";
import type { SessionOptions } from "./attachment.js";
import type { CallOptions, Client } from "./client.js";
import type { InferdError } from "./errors.js";
import type { ModelParameters } from "./generated/parameters.js";
import type { EndReasoningResult, HistoryResult, Metadata, RewindResult } from "./generated/protocol.js";
import type { Prompt } from "./parts.js";
import type { Request } from "./request.js";
import type { Reply, ToolCall } from "./stream.js";
import type { TurnOptions } from "./turn.js";
import type { AnswerFields, Context, Fields, Graph, Priority } from "./types.js";

export type { SessionOptions } from "./attachment.js";
export type { TurnOptions } from "./turn.js";

/** One of several answers to a prompt; `error` if it failed, and `text` is then its output so far. */
export interface Answer extends Reply {
  error: InferdError | undefined;
}

/** The part of an interrupted answer that was read; with the parameter `tools`, `rawText` replaces both texts. */
export interface AnswerSoFar {
  tokens: number[];
  text?: string | undefined;
  reasoning?: string | undefined;
  rawText?: string | undefined;
}

/**
 * A conversation with a model, made by `Client.session`. It has one turn at a time: the next call waits
 * for the end of a turn whose stream was left, and throws `SessionBusy` while another turn is read.
 *
 * A session with `resume` attaches again by its id after its connection was lost, and its streams
 * continue. Other sessions throw `ConnectionLost` or `ShuttingDown`, with the part that was read.
 */
export class Session implements AsyncDisposable {
  /** The metadata of the last turn that ended. */
  metadata: Metadata = {};
  readonly #client: Client;
  readonly #attachment: Attachment;
  readonly #trunk: Session | undefined;
  readonly #branches = new Set<Session>();
  readonly #turns = new Set<Request>();

  /** @internal */
  constructor(
    client: Client,
    readonly model: string,
    options: SessionOptions,
    attachment?: Attachment,
    trunk?: Session,
  ) {
    if (options.resume && options.sessionId === undefined) {
      throw new InvalidArgument("resume needs a sessionId", {
        hint: "pass a sessionId, by which to attach again",
      });
    }
    this.#client = client;
    this.#attachment = attachment ?? new Attachment(client, { ...options }, model);
    this.#trunk = trunk;
  }

  /** @internal */
  open(): Promise<void> {
    return this.#attachment.open();
  }

  get sessionId(): string | undefined {
    return this.#attachment.settings.sessionId;
  }

  /** The session's lease on the model, for calls. */
  get graph(): Graph {
    void this.#attachment.liveContext;
    return this.#attachment.graph as Graph;
  }

  /** The session's execution context, for calls. */
  get context(): Context {
    return this.#attachment.liveContext;
  }

  /** Whether the session existed before it was opened here, with its history. */
  get attached(): boolean {
    return this.#attachment.attached;
  }

  /**
   * Stream a turn that answers `prompt`: a text, texts and images such as
   * `["What is this?", image("a.png")]`, or messages. Without it the turn answers the present history.
   */
  stream(prompt?: Prompt, options: TurnOptions = {}): Stream {
    const { raw, priority } = this.#attachment.settings;
    const settings = { ...options, raw: options.raw ?? raw, priority: options.priority ?? priority };
    const queue_events = options.onQueue ? true : undefined;
    const params = {
      ...turnInput(prompt, settings),
      ...scheduling(settings, this.#client.timeoutMs),
      queue_events,
    };
    return this.#stream("stream", params, settings);
  }

  /** Compute a turn as `stream` does, and return its whole answer. */
  async chat(prompt?: Prompt, options: TurnOptions = {}): Promise<Reply> {
    return await this.stream(prompt, options).reply();
  }

  /**
   * Continue the turn that a restart of the daemon or a lost connection has interrupted; the stream begins
   * after the part that was read. The session is then `attached`.
   */
  resume(soFar: AnswerSoFar = { tokens: [] }, options: TurnOptions = {}): Stream {
    const { tokens, text = "", reasoning = "", rawText = "" } = soFar;
    const read = {
      tokens,
      text: Buffer.from(text),
      reasoning: Buffer.from(reasoning),
      raw_text: Buffer.from(rawText),
    };
    const queue_events = options.onQueue ? true : undefined;
    return this.#stream(
      "resume",
      { ...read, ...scheduling(options, this.#client.timeoutMs), queue_events },
      options,
    );
  }

  #stream(call: "stream" | "resume", params: Fields, options: TurnOptions): Stream {
    void this.#attachment.liveContext;
    const turn = new Turn(this.#attachment, call, params, (request) => this.#track(request));
    return new Stream(this.#client, turn, options, (bounds) => this.#endPrevious(bounds));
  }

  /** Return `n` answers to one prompt, which is computed once; the conversation continues from the first one. */
  async answers(prompt: Prompt | undefined, n = 2, options: TurnOptions = {}): Promise<Answer[]> {
    const { raw, priority } = this.#attachment.settings;
    const settings = { ...options, raw: options.raw ?? raw, priority: options.priority ?? priority };
    const input = { ...turnInput(prompt, settings), ...scheduling(settings, this.#client.timeoutMs) };
    const contents = await withContents(input);
    await this.#ready(options);
    const { answers } = await this.#attachment.call(
      "answers",
      { ...contents, context: this.context, n },
      options,
    );
    this.#attachment.hasHistory = true;
    const read = answers.map(readAnswer);
    this.metadata = read[0]?.metadata ?? {};
    return read;
  }

  /** Set parameters and a priority for the next turns. */
  async setOptions(
    options: ModelParameters,
    settings: CallOptions & { priority?: Priority | undefined } = {},
  ): Promise<void> {
    const { priority, ...call } = settings;
    await this.#ready(call);
    await this.#attachment.call("set_options", { context: this.context, options, priority }, call);
    this.#attachment.settings.priority = priority ?? this.#attachment.settings.priority;
  }

  /** Clear the history; the system prompt stays, or becomes `system`. */
  async reset(system?: string, options: CallOptions = {}): Promise<void> {
    await this.#ready(options);
    this.#attachment.settings.system = system ?? this.#attachment.settings.system;
    await this.#attachment.call(
      "reset",
      { context: this.context, system: this.#attachment.settings.system },
      options,
    );
  }

  /** Drop the last `turns`, questions and answers, or all except the first `tokens`. */
  async rewind(to: { turns: number } | { tokens: number }, options: CallOptions = {}): Promise<RewindResult> {
    await this.#ready(options);
    return await this.#attachment.call("rewind", { context: this.context, ...to }, options);
  }

  /** Return the messages, with the answer so far, and the turns that `rewind` can remove. */
  async history(options: CallOptions = {}): Promise<HistoryResult> {
    return await this.#attachment.call("history", { context: this.context }, options);
  }

  /** Return the bytes of an image or a sound in the messages, by its hash in the history. */
  async media(sha256: string, options: CallOptions = {}): Promise<Uint8Array> {
    const parts: Uint8Array[] = [];
    for (let offset = 0, size = 1; offset < size;) {
      const part = await this.#attachment.call(
        "session_media",
        { context: this.context, sha256, offset },
        options,
      );
      parts.push(part.data);
      offset += part.data.length;
      size = part.data.length > 0 ? part.size : 0;
    }
    return Buffer.concat(parts);
  }

  /** Return `n` sessions that branch off from the present state. They are closed with this one, or by themselves. */
  async fork(n = 1, options: CallOptions & { sessionIds?: string[] | undefined } = {}): Promise<Session[]> {
    const { sessionIds, ...call } = options;
    await this.#ready(call);
    const { contexts } = await this.#attachment.call(
      "fork_session",
      { context: this.context, n, session_ids: sessionIds, ...place(this.#attachment.settings) },
      call,
    );
    return contexts.map((context, index) => {
      const attachment = this.#attachment.branch(context, sessionIds?.[index]);
      const branch = new Session(this.#client, this.model, attachment.settings, attachment, this);
      this.#branches.add(branch);
      return branch;
    });
  }

  /** Delete the session and its stored data, and close it. */
  async delete(options: CallOptions = {}): Promise<void> {
    await this.#ready(options);
    await this.#attachment.call("delete_session", { context: this.context }, options);
    this.#attachment.context = undefined;
    await this.close();
  }

  /** Cancel the turn under way; return whether there was one. */
  async cancel(options: CallOptions = {}): Promise<boolean> {
    return (await this.#attachment.call("cancel", { context: this.context }, options)).cancelled;
  }

  /** End the present thought of the turn under way, so that its answer begins now; without `ended` it has a reason. */
  async endReasoning(options: CallOptions = {}): Promise<EndReasoningResult> {
    return this.#attachment.call("end_reasoning", { context: this.context }, options);
  }

  /** Close the session, which cancels its turn; one with an id can be opened again. */
  async close(): Promise<void> {
    for (const branch of [...this.#branches]) await branch.close();
    if (this.#trunk) this.#trunk.#branches.delete(this);
    for (const request of this.#turns) request.abandon(new Cancelled("the session was closed"));
    await this.#attachment.close();
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  #track(request: Request): void {
    this.#turns.add(request);
    void request.settled.then(() => {
      this.#turns.delete(request);
      if (Object.keys(request.metadata).length > 0) this.metadata = request.metadata;
    });
  }

  async #ready({ timeoutMs, signal }: CallOptions): Promise<void> {
    const bounds = new Bounds("session", timeoutMs ?? this.#client.timeoutMs, signal);
    try {
      await this.#endPrevious(bounds);
    } finally {
      bounds.close();
    }
  }

  /** Wait for the end of turns that were given up; others continue, and the daemon answers `SessionBusy`. */
  async #endPrevious(bounds: Bounds): Promise<void> {
    await this.#attachment.ensureConnected(bounds);
    for (const request of this.#turns) {
      if (request.abandoned) await bounds.race(request.settled);
    }
  }
}

function readAnswer(fields: AnswerFields): Answer {
  const calls = new Map<number, ToolCall>();
  addToolCalls(
    calls,
    (fields.tool_calls ?? []).map((part) => readToolCallPart(part as unknown as Fields)),
  );
  return {
    text: toText([fields.text ?? new Uint8Array()]),
    reasoning: toText([fields.reasoning ?? new Uint8Array()]),
    toolCalls: [...calls.values()],
    metadata: fields.metadata ?? {},
    error: fields.error ? errorFromWire(fields.error as unknown as Fields) : undefined,
  };
}
