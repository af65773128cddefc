/** Client of inferd, a local inference daemon. */

export { Client } from "./client.js";
export { audio, image } from "./parts.js";
export { socketPath } from "./paths.js";
export { Session } from "./session.js";
export { Stream } from "./stream.js";
export * from "./errors.js";
export { LIMITS, PROTOCOL_VERSION } from "./generated/protocol.js";
export type * from "./generated/protocol.js";
export type { ModelParameters } from "./generated/parameters.js";
export type { CallArguments, CallOptions, ClientOptions, UsageColumn, UsageOptions } from "./client.js";
export type { EmbedOptions, Embeddings } from "./embeddings.js";
export type { ComputeOptions, GraphInput, GraphOutput, NumberArray } from "./graphs.js";
export type { StringArray } from "./strings.js";
export type { RankedDocument, Ranking, RerankOptions } from "./reranking.js";
export type { ImageOptions, Prompt } from "./parts.js";
export type { Answer, AnswerSoFar, SessionOptions, TurnOptions } from "./session.js";
export type { Piece, Reply, ToolCall } from "./stream.js";
export type {
  AudioPart,
  Context,
  Fields,
  Graph,
  ImagePart,
  MediaSource,
  Message,
  Part,
  Priority,
  TextPart,
} from "./types.js";
