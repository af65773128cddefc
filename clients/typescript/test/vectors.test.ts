import assert from "node:assert/strict";
import { test } from "node:test";

import { Client, InferdError } from "../src/index.js";
import { encodeFrame, FrameReader } from "../src/wire.js";
import { fromPlain, ScriptedDaemon, toPlain, VECTORS } from "./support.js";
import type { CallName } from "../src/index.js";
import type { Frame } from "./support.js";

const HELLO = Buffer.from(VECTORS.exchanges[0]?.frames[0]?.hex ?? "", "hex");
/** Our client cannot pass descriptors. */
const WITH_A_DESCRIPTOR = "a prompt in a descriptor";
const HANDLES = new Set(["graph", "context", "contexts"]);

/** Return the message of a frame. The head of a map may be longer than it needs to be. */
function messageOf(frame: Buffer): unknown {
  return [...new FrameReader().push(frame)];
}

/** Return a daemon that sends its frames of an exchange, and expects the client's messages. */
function playing(frames: Frame[]): ScriptedDaemon {
  return new ScriptedDaemon(async (socket, reader) => {
    for (const { from, hex } of frames) {
      if (from === "daemon") socket.write(Buffer.from(hex, "hex"));
      else assert.deepEqual(messageOf(await reader.frame()), messageOf(Buffer.from(hex, "hex")));
    }
  });
}

/** Return the parts of a result or event that the vector names: the reader adds defaults. */
function asIn(means: unknown, read: unknown): unknown {
  if (Array.isArray(means)) return (read as unknown[]).map((item, index) => asIn(means[index], item));
  if (typeof means !== "object" || means === null) return read;
  const known = read as Record<string, unknown>;
  return Object.fromEntries(Object.entries(means).map(([key, value]) => [key, asIn(value, known[key])]));
}

for (const { name, frames } of VECTORS.exchanges.filter((exchange) => exchange.name !== WITH_A_DESCRIPTOR)) {
  test(`the client plays the exchange: ${name}`, { timeout: 20_000 }, async () => {
    await using daemon = playing(frames);
    await using client = await Client.connect({ path: daemon.path, software: VECTORS.software });
    const requests = frames.filter(({ from, means }) => from === "client" && means[0] === 1);
    for (const {
      means: [, id, call, params],
    } of requests) {
      const sent = frames.filter(({ from, means }) => from === "daemon" && means[1] === id);
      const events: unknown[] = [];
      const onEvent = (event: unknown): void => void events.push(event);
      const fields = fromPlain(params) as never;
      const [kind, , outcome] = sent.at(-1)?.means as [number, number, Record<string, unknown>];
      const answer = client.call(call as CallName, fields, { onEvent } as never);
      if (kind === 2) {
        const result = await answer;
        assert.deepEqual(asIn(outcome, toPlain(result)), outcome);
        for (const [key, value] of Object.entries(result)) assertHandle(key, value);
      } else {
        await assert.rejects(answer, (error) => error instanceof InferdError && error.name === outcome.name);
      }
      const expected = sent.slice(0, -1).map(({ means }) => means[2]);
      assert.deepEqual(
        events.map((event, index) => asIn(expected[index], toPlain(event))),
        expected,
      );
    }
  });
}

function assertHandle(key: string, value: unknown): void {
  if (HANDLES.has(key)) for (const handle of [value].flat()) assert.equal(typeof handle, "bigint");
}

for (const { name, hello, frames, outcome } of VECTORS.malformed_daemon) {
  test(`the client handles a malformed daemon: ${name}`, { timeout: 20_000 }, async () => {
    const data = Buffer.from(frames.join(""), "hex");
    await using daemon = new ScriptedDaemon(async (socket, reader) => {
      socket.write(hello ? HELLO : data);
      await reader.frame();
      if (!hello) return;
      await reader.frame();
      socket.write(data);
    });
    const client = new Client({ path: daemon.path });
    const got = await client.call("queue").then(
      ({ tasks }) => ({ reply: { tasks } }),
      (error: InferdError) => ({ error: error.name }),
    );
    assert.deepEqual(got, outcome);
    await client.close();
  });
}

test("a handle above 2⁵³ comes back as it was sent", async () => {
  const handle = 2n ** 63n + 5n;
  await using daemon = new ScriptedDaemon(async (socket, reader) => {
    socket.write(HELLO);
    await reader.frame();
    await reader.frame();
    socket.write(encodeFrame([2, 1, { graph: handle }]));
    assert.deepEqual(await reader.frame(), encodeFrame([1, 2, "unload", { graph: handle }]));
    socket.write(encodeFrame([2, 2, {}]));
  });
  await using client = await Client.connect({ path: daemon.path });
  const { graph } = await client.call("load_by_name", { name: "echo" });
  assert.equal(graph, handle);
  await client.call("unload", { graph });
});

test("an answer without its handle is an error of the protocol", async () => {
  await using daemon = new ScriptedDaemon(async (socket, reader) => {
    socket.write(HELLO);
    await reader.frame();
    await reader.frame();
    socket.write(encodeFrame([2, 1, {}]));
  });
  await using client = await Client.connect({ path: daemon.path });
  await assert.rejects(client.call("load_by_name", { name: "echo" }), { name: "ProtocolError" });
});
