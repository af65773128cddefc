/** Documents by their scores for a query, in calls that fit into frames. */

import { batches, TEXTS_BYTES_MAX, withGraph, withIndexFrom } from "./embeddings.js";
import { Busy, InvalidArgument } from "./errors.js";
import type { CallOptions, Client } from "./client.js";
import type { ModelParameters } from "./generated/parameters.js";
import type { RerankResult } from "./generated/protocol.js";
import type { Graph, Priority } from "./types.js";

/** The most documents of one call. */
const DOCUMENTS_PER_CALL = 256;

export interface RerankOptions extends CallOptions {
  /** The number of documents to return; by default all. */
  topN?: number | undefined;
  /** Leave out the end of documents that are too long, instead of refusing them. */
  truncate?: boolean | undefined;
  priority?: Priority | undefined;
  /** Parameters of the model's graph. */
  config?: ModelParameters | undefined;
}

/** A document with its score. */
export interface RankedDocument {
  /** Its place in the request, from 0. */
  index: number;
  /** From 0 to 1: `rawScore` if the model returns probabilities, else its sigmoid. */
  score: number;
  /** The model's output. */
  rawScore: number;
  document: string;
}

/** Documents by descending score. */
export interface Ranking {
  documents: RankedDocument[];
  /** The indexes of the documents whose end was left out. */
  truncated: number[];
  /** The number of tokens of all documents, each with the query. */
  tokens: number;
  /** Of these, the tokens of the query that were not computed again for each document. */
  cachedTokens: number;
  model: string;
  fingerprint: string;
}

/** Return `documents` by their scores for a query. The timeout holds for each call that this takes. */
export async function rerankDocuments(
  client: Client,
  model: string | Graph,
  query: string,
  documents: string[],
  options: RerankOptions,
): Promise<Ranking> {
  if (documents.length === 0) throw new InvalidArgument("there are no documents", { hint: 'pass ["one", "another"]' });
  if (options.topN !== undefined && options.topN < 1)
    throw new InvalidArgument(`topN is ${options.topN}`, { hint: "leave it out for all documents" });
  return await withGraph(client, model, options, (graph) => rerankBatches(client, graph, query, documents, options));
}

async function rerankBatches(
  client: Client,
  graph: Graph,
  query: string,
  documents: string[],
  { topN = 0, truncate = false, priority, config: _, ...options }: RerankOptions,
): Promise<Ranking> {
  const found: RankedDocument[] = [];
  const results: RerankResult[] = [];
  const truncated: number[] = [];
  let begin = 0;
  const bytesMax = TEXTS_BYTES_MAX - Buffer.byteLength(query);
  for (const batch of batches(documents, DOCUMENTS_PER_CALL, bytesMax)) {
    const params = { graph, query, documents: batch, top_n: topN, truncate, priority };
    const first = begin;
    const result = await client.call("rerank", params, options).catch((error: unknown) => {
      throw withIndexFrom(error, first, "document");
    });
    result.indexes.forEach((index, at) => {
      const [score = NaN, rawScore = NaN] = [result.scores[at], result.raw_scores[at]];
      found.push({ index: first + index, score, rawScore, document: batch[index] ?? "" });
    });
    truncated.push(...result.truncated.map((index) => first + index));
    results.push(result);
    begin += batch.length;
  }
  const [{ model, fingerprint }] = results as [RerankResult, ...RerankResult[]];
  if (results.some((result) => result.fingerprint !== fingerprint))
    throw new Busy("the model was swapped while it ranked the documents", { hint: "repeat the call" });
  found.sort((a, b) => b.rawScore - a.rawScore || a.index - b.index);
  const sum = (count: (result: RerankResult) => number) => results.reduce((total, each) => total + count(each), 0);
  return {
    documents: topN ? found.slice(0, topN) : found,
    truncated,
    tokens: sum((result) => result.tokens),
    cachedTokens: sum((result) => result.cached_tokens),
    model,
    fingerprint,
  };
}
