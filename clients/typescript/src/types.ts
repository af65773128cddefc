/** Types of values that the protocol page describes in prose: handles, messages, priorities. */

import type { ErrorFields, Metadata, ToolCallPart } from "./generated/protocol.js";

declare const kind: unique symbol;

/** A lease on a model. Handles are opaque: compare them, and pass them to calls. */
export type Graph = bigint & { readonly [kind]: "graph" };

/** An execution context, which a session has. */
export type Context = bigint & { readonly [kind]: "context" };

export type Priority = "low" | "normal" | "high" | "urgent";

/** A map of the protocol. */
export type Fields = Record<string, unknown>;

export interface TextPart {
  type: "text";
  text: string;
}

/** The content of an image or a sound: the bytes of its file, or the file's path. */
export type MediaSource = Uint8Array | string | URL;

export interface ImagePart {
  type: "image";
  data: MediaSource;
  detail?: "auto" | "low" | "high" | undefined;
  tokens_max?: number | undefined;
  alt?: string | undefined;
}

export interface AudioPart {
  type: "audio";
  data: MediaSource;
  alt?: string | undefined;
}

export type Part = TextPart | ImagePart | AudioPart;

/** A message of a chat; the chat template gets further keys. */
export interface Message {
  role: "system" | "developer" | "user" | "assistant" | "tool" | "function";
  content?: string | Part[] | undefined;
  [key: string]: unknown;
}

/** One of the results of the call `answers`. */
export interface AnswerFields {
  text?: Uint8Array;
  reasoning?: Uint8Array;
  tool_calls?: ToolCallPart[];
  metadata?: Metadata;
  error?: ErrorFields | null;
}

/** Return a handle from the number that the daemon has sent. */
export function toHandle<H extends Graph | Context>(value: unknown): H {
  return BigInt(value as bigint | number) as H;
}

/** Return an array of the protocol, which is omitted if it is empty. */
export function list(value: unknown): unknown[] {
  return (value ?? []) as unknown[];
}
