/** Client of inferd, a local inference daemon. */

export { Client } from "./client.js";
export { socketPath } from "./paths.js";
export { Session } from "./session.js";
export { Stream } from "./stream.js";
export * from "./errors.js";
export { LIMITS, PROTOCOL_VERSION } from "./generated/protocol.js";
export type * from "./generated/protocol.js";
export type { ModelParameters } from "./generated/parameters.js";
export type { CallArguments, CallOptions, ClientOptions } from "./client.js";
export type { EmbedOptions, Embeddings } from "./embeddings.js";
export type { Answer, AnswerSoFar, SessionOptions, TurnOptions } from "./session.js";
export type { Piece, Reply, ToolCall } from "./stream.js";
export type { Context, Fields, Graph, Message, Priority, TextPart } from "./types.js";
