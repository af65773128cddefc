import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { Client, ConnectionLost, InferdError, ModelNotFound } from "../src/index.js";
import { runningDaemon } from "../src/testing.js";
import { echoModel, tasksBecome } from "./support.js";
import type { RunningDaemon } from "../src/testing.js";

const CONFIG = echoModel("echo") + echoModel("slow", { step_ms: 50 }, 1) + echoModel("rank", { ranks: true });
let daemon: RunningDaemon;
let client: Client;

before(async () => {
  daemon = await runningDaemon({ config: CONFIG });
  client = await Client.connect({ path: daemon.socket });
});

after(async () => {
  await client.close();
  await daemon[Symbol.asyncDispose]();
});

test("the calls of wasi-nn compute a prompt", async () => {
  const { graph, ctx_size, not_applied } = await client.call("load_by_name", { name: "echo" });
  assert.deepEqual([ctx_size, not_applied], [4096, {}]);
  const { context, attached } = await client.call("init_execution_context", { graph });
  assert.equal(attached, false);
  await client.call("set_input", { context, index: 0, tensor: { data: Buffer.from("hé") } });
  await client.call("compute", { context });
  const { data } = await client.call("get_output", { context });
  assert.equal(Buffer.from(data).toString(), "hé");
  await client.call("finalize_execution_context", { context });
  await client.call("unload", { graph });
});

test("a list of the daemon has handles and their types", async () => {
  await using session = await client.session("echo");
  const { sessions } = await client.call("sessions");
  assert.ok(sessions.some(({ context, model }) => context === session.context && model === "echo"));
  const { models } = await client.call("models");
  assert.deepEqual(models.map(({ name }) => name).sort(), ["echo", "rank", "slow"]);
  const {
    models: [shown],
  } = await client.call("show", { name: "echo" });
  assert.equal(shown?.file_info, null);
  assert.equal((await client.call("stats")).stats.pid, daemon.pid);
});

test("an error has its class, number, hint and data", async () => {
  await assert.rejects(client.call("load_by_name", { name: "none" }), (error) => {
    assert.ok(error instanceof ModelNotFound && error instanceof InferdError);
    assert.deepEqual(
      [error.name, error.number, error.wasi, error.retryable],
      ["ModelNotFound", 103, 103, false],
    );
    assert.deepEqual((error.data.models as string[]).sort(), ["echo", "rank", "slow"]);
    assert.equal(error.retryAfter, undefined);
    assert.ok(error.hint && error.stack?.includes("client.test"));
    return true;
  });
});

test("an unknown call or model parameter is refused by the daemon", async () => {
  await assert.rejects(client.call("sing" as "queue"), { name: "UnsupportedOperation" });
  await using session = await client.session("echo");
  await assert.rejects(session.chat("x", { options: { colour: 1 } as object }), { name: "InvalidArgument" });
});

test("a request that exceeds the daemon's frame size is refused before it is sent", async () => {
  await using session = await client.session("echo");
  const bytes = client.server.limits.frame_bytes_max;
  await assert.rejects(session.chat("x".repeat(bytes)), { name: "TooLarge" });
  assert.equal((await session.chat("still connected")).text, "still connected");
});

test("an aborted call is cancelled in the daemon", async () => {
  await using session = await client.session("slow");
  await client.call("set_input", {
    context: session.context,
    index: 0,
    tensor: { data: Buffer.from("x".repeat(100)) },
  });
  const aborter = new AbortController();
  const computing = client.call("compute", { context: session.context }, { signal: aborter.signal });
  await tasksBecome(client, 1);
  aborter.abort(new Error("enough"));
  await assert.rejects(computing, /enough/);
  await tasksBecome(client, 0);
  await assert.rejects(client.call("queue", {}, { signal: aborter.signal }), /enough/);
});

test("calls may report progress, and an error of their callback ends them", async () => {
  const progress: number[] = [];
  const params = { name: "slow", progress: true };
  await client.call("load_by_name", params, { onEvent: (event) => void progress.push(event.progress) });
  assert.ok(progress.every((value) => value >= 0 && value <= 1));
  await using session = await client.session("slow");
  const onEvent = (): void => {
    throw new Error("not so");
  };
  const stream = { context: session.context, prompt: "x".repeat(100) };
  await assert.rejects(client.call("stream", stream, { onEvent }), /not so/);
  await tasksBecome(client, 0);
});

test("embeddings of many texts come in their order", async () => {
  const texts = Array.from({ length: 130 }, (_, index) => `text ${index}`);
  const all = await client.embed("echo", texts, { pooling: "last" });
  assert.deepEqual([all.vectors.length, all.tokens.length, all.size], [130, 130, 16]);
  const { graph } = await client.call("load_by_name", { name: "echo" });
  const [one] = (await client.embed(graph, ["text 99"], { pooling: "last" })).vectors;
  assert.deepEqual(all.vectors[99], one);
  assert.equal(one?.length, 16);
  await client.call("unload", { graph, keep: true });
  const long = [...texts, "x".repeat(5000)];
  await assert.rejects(
    client.embed("echo", long),
    (error) => error instanceof InferdError && error.data.index === 130,
  );
  const cut = await client.embed("echo", long, { truncate: true });
  assert.deepEqual([all.truncated, cut.truncated, cut.vectors.length], [[], [130], 131]);
  await assert.rejects(client.embed("echo", []), { name: "InvalidArgument" });
});

test("documents are ranked together, whatever calls they take", async () => {
  const texts = Array.from({ length: 300 }, (_, index) => `text ${index}`);
  const all = await client.rerank("rank", "a query", texts);
  assert.deepEqual(all.documents.map((one) => one.index).sort((a, b) => a - b), [...texts.keys()]);
  for (const [at, one] of all.documents.entries()) {
    assert.equal(one.document, texts[one.index]);
    assert.ok(Math.abs(one.score - 1 / (1 + Math.exp(-one.rawScore))) < 1e-6);
    assert.ok(one.rawScore <= (all.documents[at - 1]?.rawScore ?? Infinity));
  }
  assert.ok(all.cachedTokens > all.tokens / 3 && all.truncated.length === 0);
  const top = await client.rerank("rank", "a query", texts, { topN: 3 });
  assert.deepEqual(top.documents, all.documents.slice(0, 3));
  const long = [...texts, "x".repeat(5000)];
  await assert.rejects(
    client.rerank("rank", "a query", long),
    (error) => error instanceof InferdError && error.data.index === 300 && /^document 300: /.test(error.message),
  );
  assert.deepEqual((await client.rerank("rank", "a query", long, { truncate: true })).truncated, [300]);
  await assert.rejects(client.rerank("rank", "a query", []), { name: "InvalidArgument" });
  await assert.rejects(client.rerank("rank", "a query", ["a"], { topN: 0 }), { name: "InvalidArgument" });
  await assert.rejects(client.rerank("echo", "a query", ["a"]), { name: "UnsupportedOperation" });
});

test("one question takes one line", async () => {
  const before = (await client.call("sessions")).sessions.length;
  assert.equal((await client.chat("echo", "hello")).text, "hello");
  assert.equal((await client.call("sessions")).sessions.length, before);
});

test("many calls share a connection, more than the daemon takes at a time", async () => {
  const calls = Array.from({ length: 1000 }, () => client.call("queue"));
  assert.equal((await Promise.all(calls)).length, 1000);
  assert.equal((await client.call("stats")).stats.connections, 1);
});

test(
  "a lost connection is final without `reconnect`, and opened again with it",
  { timeout: 60_000 },
  async () => {
    await using other = await runningDaemon({ config: CONFIG });
    await using plain = await Client.connect({ path: other.socket });
    await using tenacious = await Client.connect({ path: other.socket, reconnect: true });
    await other.kill();
    await assert.rejects(plain.call("queue"), ConnectionLost);
    const waiting = tenacious.call("queue");
    await other.start();
    assert.deepEqual(await waiting, { tasks: [] });
    assert.deepEqual([plain.connected, tenacious.connected], [false, true]);
    await assert.rejects(plain.call("queue"), ConnectionLost);
  },
);

test("calls share one attempt to connect", async () => {
  await using other = new Client({ path: daemon.socket });
  assert.throws(() => other.server, ConnectionLost);
  await Promise.all([other.call("queue"), other.call("models"), other.open()]);
  assert.equal((await client.call("stats")).stats.connections, 2);
});

test("a closed client fails its calls and all later ones", async () => {
  const other = await Client.connect({ path: daemon.socket });
  const context = (await other.session("slow")).context;
  const computing = other.call("stream", { context, prompt: "x".repeat(50) });
  await other.close();
  await other.close();
  await assert.rejects(computing, ConnectionLost);
  await assert.rejects(other.call("queue"), ConnectionLost);
});

test("a missing daemon, and a path that cannot be one, are errors with a hint", async () => {
  await assert.rejects(
    Client.connect({ path: `${daemon.directory}/none` }),
    (error) => error instanceof ConnectionLost && /inferd start/.test(error.hint),
  );
  await assert.rejects(Client.connect({ path: `/${"x".repeat(200)}` }), { name: "InvalidArgument" });
  assert.throws(() => new Client({ timeoutMs: 0 }), { name: "InvalidArgument" });
});

test("a label names the program, and a bad one is the daemon's refusal", async () => {
  await using labelled = await Client.connect({ path: daemon.socket, label: "tests" });
  await using session = await labelled.session("echo");
  const { sessions } = await labelled.call("sessions");
  assert.deepEqual(
    sessions.map(({ context, label }) => [context, label]),
    [[session.context, "tests"]],
  );
  const bad = new Client({ path: daemon.socket, label: "/" });
  await assert.rejects(bad.call("queue"), { name: "InvalidArgument" });
  await bad.close();
});
