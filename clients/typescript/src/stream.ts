/** The pieces of a turn as an async iterator, and whole replies. */

import { Bounds } from "./bounds.js";
import { InferdError, isLoss, raisedAgain } from "./errors.js";
import { readTurnEvent, readRunInferenceResult } from "./generated/protocol.js";
import type { Client } from "./client.js";
import type { Metadata, QueueEvent, StreamEvent, StreamResult, ToolCallPart } from "./generated/protocol.js";
import type { SoFar, Turn, TurnOptions } from "./turn.js";
import type { Fields } from "./types.js";

/** A piece of an answer; with some parameters its text may be empty. */
export interface Piece {
  text: string;
  /** Reasoning, with the parameter `reasoning-format`. */
  reasoning: string;
  /** Parts of tool calls, with the parameter `tools`. */
  toolCalls: ToolCallPart[];
  /** The ids of the piece's tokens. */
  tokens: number[];
}

/** A call of the function `name`; its result is a message with the role `tool` and its id as `tool_call_id`. */
export interface ToolCall {
  id: string;
  name: string;
  /** The JSON text of an object. */
  arguments: string;
}

/** A whole answer. */
export interface Reply {
  text: string;
  reasoning: string;
  toolCalls: ToolCall[];
  metadata: Metadata;
}

const PROGRESS_HINT =
  "`data` has the tokens and the text that were read; a session with `resume` continues after them by itself";

/**
 * The pieces of a turn. Reading the first piece sends the request. The turn is cancelled if its reader
 * leaves the loop, if its signal aborts, or by `cancel`.
 */
export class Stream implements AsyncIterable<Piece> {
  /** The token ids so far. */
  readonly tokens: number[] = [];
  /** With `n-probs`, the tokens' logprobs so far, as llama-server's `completion_probabilities`. */
  readonly probabilities: Fields[] = [];
  /** With `prompt-logprobs`, the logprobs of the prompt's tokens, before the first piece. */
  readonly promptLogprobs: Fields[] = [];
  readonly #text: Uint8Array[] = [];
  readonly #reasoning: Uint8Array[] = [];
  readonly #rawText: Uint8Array[] = [];
  readonly #decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  readonly #calls = new Map<number, ToolCall>();
  readonly #pieces: AsyncGenerator<Piece, void, undefined>;
  readonly #aborter = new AbortController();

  constructor(
    readonly client: Client,
    readonly turn: Turn,
    readonly options: TurnOptions,
    readonly prepare: (bounds: Bounds) => Promise<void>,
  ) {
    this.#pieces = this.#read();
  }

  [Symbol.asyncIterator](): AsyncGenerator<Piece, void, undefined> {
    return this.#pieces;
  }

  /** The metadata of the turn's end, also of a cancelled turn's; empty before. */
  get metadata(): Metadata {
    return this.turn.request?.metadata ?? {};
  }

  get text(): string {
    return toText(this.#text);
  }

  get reasoning(): string {
    return toText(this.#reasoning);
  }

  /** The text so far with tool calls as the model wrote them. */
  get rawText(): string {
    return toText(this.#rawText);
  }

  /** The tool calls so far; the arguments of the last one may be incomplete. */
  get toolCalls(): ToolCall[] {
    return [...this.#calls.values()];
  }

  /** Read the turn to its end and return the whole answer. */
  async reply(): Promise<Reply> {
    for await (const _ of this.#pieces);
    return { text: this.text, reasoning: this.reasoning, toolCalls: this.toolCalls, metadata: this.metadata };
  }

  /** Cancel the turn; its reader gets `reason`. */
  cancel(reason: unknown = new DOMException("the stream was cancelled", "AbortError")): void {
    this.#aborter.abort(reason);
  }

  async *#read(): AsyncGenerator<Piece, void, undefined> {
    const { client, turn, options } = this;
    const { signal } = this.#aborter;
    const given = options.signal ? AbortSignal.any([options.signal, signal]) : signal;
    const bounds = new Bounds("stream", options.timeoutMs ?? client.timeoutMs, given);
    try {
      await this.prepare(bounds);
      let send = () => client.retrying(bounds, () => turn.send(bounds));
      for (;;) {
        try {
          const request = await send();
          for (let event; (event = await request.nextEvent());) {
            const piece = this.#readEvent(readTurnEvent(event));
            if (piece) yield piece;
          }
          const last = this.#add({ tokens: [], ...readRunInferenceResult(request.result) }, true);
          if (last) yield last;
          return;
        } catch (error) {
          if (!turn.canRecover(error, this.tokens.length)) throw error;
          await turn.attachAgain(bounds);
          send = () => turn.sendRest(bounds, this.#soFar(), error);
        }
      }
    } catch (error) {
      throw isLoss(error) ? this.#withProgress(error) : error;
    } finally {
      turn.request?.abandon(new DOMException("the reader has left the stream", "AbortError"));
      bounds.close();
    }
  }

  #readEvent(event: StreamEvent | QueueEvent): Piece | undefined {
    if (!("waiting" in event)) {
      this.probabilities.push(...event.completion_probabilities);
      if (event.prompt_logprobs.length) {
        this.promptLogprobs.splice(event.prompt_offset); // after a loss, a turn may begin again
        this.promptLogprobs.push(...event.prompt_logprobs);
      }
      this.#rawText.push(event.raw_text.length ? event.raw_text : event.text);
      return this.#add(event);
    }
    this.options.onQueue?.(event);
    return undefined;
  }

  /** Add a part of the answer, and return its piece unless that has no content. */
  #add(
    part: Pick<StreamResult, "text" | "reasoning" | "tool_calls"> & { tokens: number[] },
    last = false,
  ): Piece | undefined {
    this.#text.push(part.text);
    this.#reasoning.push(part.reasoning);
    this.tokens.push(...part.tokens);
    addToolCalls(this.#calls, part.tool_calls);
    const text = this.#decoder.decode(part.text, { stream: !last });
    const reasoning = toText([part.reasoning]);
    if (!text && !reasoning && part.tool_calls.length === 0) return undefined;
    return { text, reasoning, toolCalls: part.tool_calls, tokens: part.tokens };
  }

  #soFar(): SoFar {
    const [text, reasoning, rawText] = [this.#text, this.#reasoning, this.#rawText].map((parts) =>
      Buffer.concat(parts),
    );
    return { tokens: this.tokens, text, reasoning, rawText } as SoFar;
  }

  #withProgress(error: InferdError): InferdError {
    return raisedAgain(error, {
      message: `${error.message}; ${this.tokens.length} tokens of the answer were read`,
      hint: `${error.hint}; ${PROGRESS_HINT}`,
      data: { ...error.data, tokens: [...this.tokens], text: this.text },
    });
  }
}

/** Add the parts of tool calls to `calls`, which are by their number in the answer. */
export function addToolCalls(calls: Map<number, ToolCall>, parts: ToolCallPart[]): void {
  for (const { index, id, name, dropped, ...part } of parts) {
    const call = calls.get(index) ?? { id, name, arguments: "" };
    if (dropped) calls.delete(index);
    else calls.set(index, { ...call, arguments: call.arguments + part.arguments });
  }
}

/** Return the text of UTF-8 in parts. */
export function toText(parts: Uint8Array[]): string {
  return Buffer.concat(parts).toString();
}
