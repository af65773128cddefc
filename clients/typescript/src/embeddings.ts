/** Embeddings of any number of texts, in calls that fit into frames. */

import { InferdError, InvalidArgument, raisedAgain } from "./errors.js";
import { LIMITS } from "./generated/protocol.js";
import type { CallOptions, Client } from "./client.js";
import type { ModelParameters } from "./generated/parameters.js";
import type { EmbedResult } from "./generated/protocol.js";
import type { Graph, Priority } from "./types.js";

/** This many vectors of 16 384 numbers fit in an answer. */
const TEXTS_PER_CALL = 64;
/** Bytes of a frame that the texts leave to everything else. */
const ENVELOPE_BYTES = 4096;
export const TEXTS_BYTES_MAX = LIMITS.FRAME_BYTES_MAX - ENVELOPE_BYTES;
const TEXT_HEADER_BYTES = 5;

export interface EmbedOptions extends CallOptions {
  /** none, mean, cls, last or rank; by default the model's own, else mean. */
  pooling?: string | undefined;
  /** −1 none, 0 the largest number is 32760, 1 taxicab, 2 euclidean (the default), p for the p-norm. */
  normalize?: number | undefined;
  /** Leave out the end of texts that are too long, instead of refusing them. */
  truncate?: boolean | undefined;
  priority?: Priority | undefined;
  /** Parameters of the model's graph. */
  config?: ModelParameters | undefined;
}

/** The embeddings of texts. */
export interface Embeddings {
  /** One vector for each text in their order; with the pooling `none` those of its tokens, joined. */
  vectors: Float32Array[];
  /** The length of a vector. */
  size: number;
  /** The number of tokens of each text. */
  tokens: number[];
  /** The indexes of the texts whose end was left out. */
  truncated: number[];
  pooling: string;
  model: string;
  fingerprint: string;
}

/** Return the embeddings of `texts`. The timeout holds for each call that this takes. */
export async function embedTexts(
  client: Client,
  model: string | Graph,
  texts: string[],
  options: EmbedOptions,
): Promise<Embeddings> {
  return await withGraph(client, model, options, (graph) => embedBatches(client, graph, texts, options));
}

/** Return the result of `call` with a graph of `model`, which may be a graph. */
export async function withGraph<T>(
  client: Client,
  model: string | Graph,
  { config, signal }: { config?: ModelParameters | undefined; signal?: AbortSignal | undefined },
  call: (graph: Graph) => Promise<T>,
): Promise<T> {
  if (typeof model !== "string") return await call(model);
  const params = { name: model, config: config ? JSON.stringify(config) : "" };
  const { graph } = await client.call("load_by_name_with_config", params, { signal });
  try {
    return await call(graph);
  } finally {
    if (client.connected)
      await client.call("unload", { graph, keep: true }, { timeoutMs: 5000 }).catch(() => {});
  }
}

async function embedBatches(
  client: Client,
  graph: Graph,
  texts: string[],
  { pooling, normalize, truncate, priority, ...options }: EmbedOptions,
): Promise<Embeddings> {
  const vectors: Float32Array[] = [];
  const tokens: number[] = [];
  const truncated: number[] = [];
  let last: EmbedResult | undefined;
  for (const batch of batches(texts, pooling === "none" ? 1 : TEXTS_PER_CALL, TEXTS_BYTES_MAX)) {
    const params = { graph, texts: batch, pooling, normalize, truncate, priority };
    const first = vectors.length;
    last = await client.call("embed", params, options).catch((error: unknown) => {
      throw withIndexFrom(error, first, "text");
    });
    vectors.push(...last.embeddings.map(toFloats));
    tokens.push(...last.tokens);
    truncated.push(...last.truncated.map((index) => first + index));
  }
  if (!last) throw new InvalidArgument("there are no texts to embed", { hint: 'pass ["one", "another"]' });
  return {
    vectors,
    tokens,
    truncated,
    size: last.size,
    pooling: last.pooling,
    model: last.model,
    fingerprint: last.fingerprint,
  };
}

/** Yield the texts in lists of at most `textsMax` and, unless a text is longer, `bytesMax`. */
export function* batches(texts: string[], textsMax: number, bytesMax: number): Generator<string[]> {
  let batch: string[] = [];
  let bytes = 0;
  for (const text of texts) {
    const size = Buffer.byteLength(text) + TEXT_HEADER_BYTES;
    if (batch.length === textsMax || (batch.length > 0 && bytes + size > bytesMax)) {
      yield batch;
      batch = [];
      bytes = 0;
    }
    batch.push(text);
    bytes += size;
  }
  if (batch.length > 0) yield batch;
}

/** Return `error` with the index of its text, a `kind`, among all texts. */
export function withIndexFrom(error: unknown, first: number, kind: string): unknown {
  if (!(error instanceof InferdError) || typeof error.data.index !== "number") return error;
  const index = first + error.data.index;
  return raisedAgain(error, { message: `${kind} ${index}: ${error.message}`, data: { ...error.data, index } });
}

function toFloats(bytes: Uint8Array): Float32Array {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  return Float32Array.from({ length: bytes.byteLength / 4 }, (_, at) => view.getFloat32(4 * at, true));
}
