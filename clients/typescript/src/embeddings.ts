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
const TEXT_HEADER_BYTES = 5;

export interface EmbedOptions extends CallOptions {
  /** none, mean, cls, last or rank; by default the model's own, else mean. */
  pooling?: string | undefined;
  /** −1 none, 0 the largest number is 32760, 1 taxicab, 2 euclidean (the default), p for the p-norm. */
  normalize?: number | undefined;
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
  if (typeof model !== "string") return await embedBatches(client, model, texts, options);
  const { config, signal } = options;
  const params = { name: model, config: config ? JSON.stringify(config) : "" };
  const { graph } = await client.call("load_by_name_with_config", params, { signal });
  try {
    return await embedBatches(client, graph, texts, options);
  } finally {
    if (client.connected)
      await client.call("unload", { graph, keep: true }, { timeoutMs: 5000 }).catch(() => {});
  }
}

async function embedBatches(
  client: Client,
  graph: Graph,
  texts: string[],
  { pooling, normalize, priority, ...options }: EmbedOptions,
): Promise<Embeddings> {
  const vectors: Float32Array[] = [];
  const tokens: number[] = [];
  let last: EmbedResult | undefined;
  for (const batch of batches(texts, pooling === "none" ? 1 : TEXTS_PER_CALL)) {
    const params = { graph, texts: batch, pooling, normalize, priority };
    last = await client.call("embed", params, options).catch((error: unknown) => {
      throw withIndexFrom(error, vectors.length);
    });
    vectors.push(...last.embeddings.map(toFloats));
    tokens.push(...last.tokens);
  }
  if (!last) throw new InvalidArgument("there are no texts to embed", { hint: 'pass ["one", "another"]' });
  return {
    vectors,
    tokens,
    size: last.size,
    pooling: last.pooling,
    model: last.model,
    fingerprint: last.fingerprint,
  };
}

/** Yield the texts in lists that one call takes. */
function* batches(texts: string[], textsMax: number): Generator<string[]> {
  const bytesMax = LIMITS.FRAME_BYTES_MAX - ENVELOPE_BYTES;
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

/** Return `error` with the index of its text among all texts. */
function withIndexFrom(error: unknown, first: number): unknown {
  if (!(error instanceof InferdError) || typeof error.data.index !== "number") return error;
  const index = first + error.data.index;
  return raisedAgain(error, { message: `text ${index}: ${error.message}`, data: { ...error.data, index } });
}

function toFloats(bytes: Uint8Array): Float32Array {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  return Float32Array.from({ length: bytes.byteLength / 4 }, (_, at) => view.getFloat32(4 * at, true));
}
