/** Tensors of graphs as typed arrays, on the model `echo`, which returns its inputs, and a graph that copies strings. */

import assert from "node:assert/strict";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";

import { Client, InferdError } from "../src/index.js";
import { runningDaemon } from "../src/testing.js";
import { echoModel } from "./support.js";
import type { GraphInput } from "../src/index.js";
import type { RunningDaemon } from "../src/testing.js";

/** A graph in ONNX that copies its input `x0` of strings to `y0`. */
const TEXTS = "CAo6QQoSCgJ4MBICeTAiCElkZW50aXR5EgVncmFwaFoRCgJ4MBILCgkICBIFCgMSAW5iEQoCeTASCwoJCAgSBQoDEgFuQgQKABAS";

let models: string;
let daemon: RunningDaemon;
let client: Client;

before(async () => {
  models = mkdtempSync(join(tmpdir(), "inferd-models-"));
  writeFileSync(join(models, "texts.onnx"), Buffer.from(TEXTS, "base64"));
  daemon = await runningDaemon({ config: echoModel("echo"), modelsDir: models });
  client = await Client.connect({ path: daemon.socket });
});

after(async () => {
  await client.close();
  await daemon[Symbol.asyncDispose]();
  rmSync(models, { recursive: true });
});

test("each typed array is a tensor of its type, and comes back as one", async () => {
  const inputs: [string, GraphInput & ArrayBufferView][] = [
    ["fp32", Float32Array.of(0.5, -1e30)],
    ["fp64", Float64Array.of(0.1, 1e300)],
    ["i8", Int8Array.of(-128, 127)],
    ["u8", Uint8Array.of(0, 255)],
    ["i16", Int16Array.of(-32768, 32767)],
    ["u16", Uint16Array.of(0, 65535)],
    ["i32", Int32Array.of(-(2 ** 31), 7)],
    ["u32", Uint32Array.of(0, 2 ** 32 - 1)],
    ["i64", BigInt64Array.of(-(2n ** 63n), 7n)],
    ["u64", BigUint64Array.of(0n, 2n ** 64n - 1n)],
  ];
  const outputs = await client.compute("echo", Object.fromEntries(inputs), { priority: "low" });
  for (const [type, data] of inputs) assert.deepEqual(outputs[type], { data, shape: [2], type });
});

test("shapes, truth values and small floating-point types pass", async () => {
  const backing = Float32Array.of(9, 1, 2, 3, 4);
  const outputs = await client.compute("echo", {
    part: { data: backing.subarray(1), shape: [2, 2] },
    none: { data: new Int32Array(), shape: [0, 3] },
    truth: { data: Uint8Array.of(1, 0), dimensions: [2], type: "bool" },
    half: { data: Uint8Array.of(0x00, 0x3e, 0x01, 0x00, 0x00, 0xfc), dimensions: [3], type: "fp16" },
    brain: { data: Uint8Array.of(0xc0, 0x3f), dimensions: [1], type: "bf16" },
  });
  assert.deepEqual(outputs.part, { data: Float32Array.of(1, 2, 3, 4), shape: [2, 2], type: "fp32" });
  assert.deepEqual(outputs.none, { data: new Int32Array(), shape: [0, 3], type: "i32" });
  assert.deepEqual(outputs.truth, { data: Uint8Array.of(1, 0), shape: [2], type: "bool" });
  assert.deepEqual(outputs.half?.data, Float32Array.of(1.5, 2 ** -24, -Infinity));
  assert.deepEqual(outputs.brain?.data, Float32Array.of(1.5));
});

test("strings of a graph in ONNX are texts", async () => {
  const outputs = await client.compute("texts", { x0: ["one", "", "zwölf\0\u{1f40d}", "\ufeffBOM"] });
  assert.deepEqual(outputs.y0, { data: ["one", "", "zwölf\0\u{1f40d}", "\ufeffBOM"], shape: [4], type: "string" });
  const rows = await client.compute("texts", { x0: [Buffer.from("bytes"), new Uint8Array([0xc3, 0xa4])] });
  assert.deepEqual(rows.y0, { data: ["bytes", "ä"], shape: [2], type: "string" });
  const none = await client.compute("texts", { x0: [] });
  assert.deepEqual(none.y0, { data: [], shape: [0], type: "string" });
  await assert.rejects(client.compute("texts", { x0: [Uint8Array.of(0xff)] }), /not UTF-8/);
  await assert.rejects(client.compute("texts", { x0: ["\ud800"] }), /half a surrogate pair/);
  await assert.rejects(client.compute("texts", { x0: { data: ["a", "b"], shape: [3] } }), InferdError);
});

test("strings have shapes, and are bytes if one is not UTF-8", async () => {
  const { x, y } = await client.compute("echo", {
    x: { data: ["a", "b", "c", "d"], shape: [2, 2] },
    y: ["a", Uint8Array.of(0xff, 0)],
  });
  assert.deepEqual(x, { data: ["a", "b", "c", "d"], shape: [2, 2], type: "string" });
  assert.deepEqual(y?.data, [Uint8Array.of(0x61), Uint8Array.of(0xff, 0)]);
  const cut = { data: Uint8Array.of(2, 0, 0, 0, 0x61), dimensions: [1], type: "string" };
  await assert.rejects(client.compute("echo", { x: cut }), InferdError);
});

test("a graph that is loaded is used as it is, and nothing stays open", async () => {
  const { graph } = await client.call("load_by_name", { name: "echo" });
  const { x } = await client.compute(graph, { x: Int32Array.of(5) });
  assert.deepEqual(x?.data, Int32Array.of(5));
  const { sessions } = await client.call("sessions");
  assert.deepEqual(sessions, []);
  const { models } = await client.call("show", { name: "echo" });
  assert.equal(models[0]?.leases, 1);
  await client.call("unload", { graph });
});

test("another array is refused by name", async () => {
  const numbers = { data: [1, "a"], shape: [2] } as unknown as GraphInput;
  await assert.rejects(client.compute("echo", { x: numbers }), /the input x is not an array/);
});
