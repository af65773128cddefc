/** A chat with a real model, in the directory of `INFERD_TEST_MODELS`. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { Client } from "../src/index.js";
import { runningDaemon } from "../src/testing.js";

const modelsDir = process.env.INFERD_TEST_MODELS;

test("a real model streams its answer, and remembers the conversation", { timeout: 280_000 }, async () => {
  assert.ok(modelsDir, "INFERD_TEST_MODELS is not set: the pytest module sets it");
  await using daemon = await runningDaemon({ modelsDir, config: "[defaults]\nthreads = 1\n" });
  await using client = await Client.connect({ path: daemon.socket });
  const options = { temp: 0, "n-predict": 12 };
  const progress: number[] = [];
  await using session = await client.session("smollm2", {
    system: "You are brief.",
    options,
    onProgress: (part) => progress.push(part),
  });
  const stream = session.stream("Name three colours.");
  let pieces = 0;
  for await (const { text } of stream) pieces += text.length > 0 ? 1 : 0;
  assert.ok(pieces > 3 && stream.text.trim().length > 5, stream.text);
  assert.ok(progress.length > 0);
  const again = await session.chat("And three animals.");
  assert.ok((again.metadata.cached_tokens ?? 0) > (stream.metadata.input_tokens ?? Infinity));
  const object = { type: "object", properties: { colour: { enum: ["red", "blue"] } }, required: ["colour"] };
  const { text } = await client.chat("smollm2", "A colour, as JSON.", {
    options: { "json-schema": object, temp: 0 },
  });
  assert.match((JSON.parse(text) as { colour: string }).colour, /^(red|blue)$/);
});
