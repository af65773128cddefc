import assert from "node:assert/strict";
import { test } from "node:test";

import { Busy, Client } from "../src/index.js";
import { WAITING_MAX } from "../src/connection.js";
import { encodeFrame, FrameReader } from "../src/wire.js";
import { ScriptedDaemon } from "./support.js";
import type { ByteReader } from "./support.js";

function hello(requests_max = 256): Buffer {
  const limits = { frame_bytes_max: 1 << 20, requests_max, credit_default: 64 };
  return encodeFrame([0, { protocol: [1, 7], software: "a script", instance: 1, limits }]);
}

async function message(reader: ByteReader): Promise<unknown[]> {
  return [...new FrameReader().push(await reader.frame())][0] as unknown[];
}

const busy = (retry_after_s: number): object => ({
  name: "Busy",
  message: "full",
  retryable: true,
  data: { retry_after_s },
});

test("a call that is refused for now is repeated after the daemon's time", { timeout: 20_000 }, async () => {
  await using daemon = new ScriptedDaemon(async (socket, reader) => {
    socket.write(hello());
    await message(reader);
    for (const id of [1, 2]) {
      assert.deepEqual((await message(reader)).slice(0, 3), [1, id, "queue"]);
      socket.write(encodeFrame([3, id, busy(0.05)]));
    }
    await message(reader);
    socket.write(encodeFrame([2, 3, { tasks: [] }]));
    await message(reader);
    socket.write(encodeFrame([3, 4, busy(3600)]));
  });
  await using client = await Client.connect({ path: daemon.path, retries: 2, timeoutMs: 10_000 });
  const before = performance.now();
  assert.deepEqual(await client.call("queue"), { tasks: [] });
  assert.ok(performance.now() - before >= 99);
  // The time exceeds the call's: it fails at once.
  await assert.rejects(client.call("queue"), (error) => error instanceof Busy && error.retryAfter === 3600);
});

test("a turn is not repeated after its first event", { timeout: 20_000 }, async () => {
  await using daemon = new ScriptedDaemon(async (socket, reader) => {
    socket.write(hello());
    await message(reader);
    await message(reader);
    socket.write(encodeFrame([4, 1, { tokens: [1], text: Buffer.from("a") }]));
    socket.write(encodeFrame([3, 1, busy(0)]));
  });
  await using client = await Client.connect({ path: daemon.path, retries: 5 });
  const texts: unknown[] = [];
  const context = 5n as never;
  const onEvent = (event: object): void => void texts.push("text" in event && String(event.text));
  await assert.rejects(client.call("stream", { context }, { onEvent }), Busy);
  assert.deepEqual(texts, ["a"]);
});

test("a call past its timeout is cancelled in the daemon", { timeout: 20_000 }, async () => {
  const seen: unknown[] = [];
  await using daemon = new ScriptedDaemon(async (socket, reader) => {
    socket.write(hello());
    await message(reader);
    for (let id = 1; id <= 3; id += 1) {
      const got = await message(reader);
      seen.push(got);
      if (id > 1) socket.write(encodeFrame([2, id, { tasks: [] }]));
    }
  });
  await using client = await Client.connect({ path: daemon.path });
  await assert.rejects(client.call("queue", {}, { timeoutMs: 20 }), {
    name: "Timeout",
    data: { timeout: "total" },
    retryable: false,
  });
  await client.call("queue");
  assert.deepEqual(seen, [
    [1, 1, "queue", {}],
    [1, 2, "cancel", { request: 1 }],
    [1, 3, "queue", {}],
  ]);
});

test(
  "at most as many requests as the daemon takes are sent, and one that was not sent needs no cancel",
  { timeout: 20_000 },
  async () => {
    const sent: unknown[] = [];
    let release!: () => void;
    const released = new Promise<void>((resolve) => (release = resolve));
    await using daemon = new ScriptedDaemon(async (socket, reader) => {
      socket.write(hello(16 + 4));
      await message(reader);
      for (let id = 1; id <= 4; id += 1) sent.push((await message(reader))[1]);
      await released;
      for (const [answered, next] of [
        [1, 5],
        [2, 7],
      ]) {
        socket.write(encodeFrame([2, answered, { tasks: [] }]));
        const [, id] = await message(reader);
        assert.equal(id, next);
        sent.push(id);
      }
      for (const id of [3, 4, 5, 7]) socket.write(encodeFrame([2, id, { tasks: [] }]));
    });
    await using client = await Client.connect({ path: daemon.path });
    const aborter = new AbortController();
    const calls = Array.from({ length: 7 }, (_, index) =>
      client.call("queue", {}, index === 5 ? { signal: aborter.signal } : {}),
    );
    const aborted = assert.rejects(calls[5] as Promise<unknown>, { name: "AbortError" });
    calls.splice(5, 1);
    while (sent.length < 4) await new Promise(setImmediate);
    aborter.abort();
    await aborted;
    release();
    await Promise.all(calls);
    assert.deepEqual(sent, [1, 2, 3, 4, 5, 7]);
  },
);

test("requests that wait to be sent are bounded", { timeout: 20_000 }, async () => {
  await using daemon = new ScriptedDaemon(async (socket, reader) => {
    socket.write(hello(17));
    for (;;) await message(reader).catch(() => undefined);
  });
  const client = await Client.connect({ path: daemon.path });
  const outcomes = Array.from({ length: WAITING_MAX + 2 }, () =>
    client.call("queue").catch((error: Error) => error.name),
  );
  assert.equal(await outcomes.at(-1), "Busy");
  await client.close();
  assert.equal(await outcomes.at(-2), "ConnectionLost");
});

test(
  "a goodbye fails the calls under way with its error, and later ones as lost",
  { timeout: 20_000 },
  async () => {
    await using daemon = new ScriptedDaemon(async (socket, reader) => {
      socket.write(hello());
      await message(reader);
      await message(reader);
      socket.end(encodeFrame([6, { name: "ShuttingDown", message: "bye", retryable: true }]));
    });
    await using client = await Client.connect({ path: daemon.path });
    await assert.rejects(client.call("queue"), { name: "ShuttingDown", retryAfter: 1 });
    await assert.rejects(
      client.call("queue"),
      (error) => (error as { data: { cause: string } }).data.cause === "ShuttingDown",
    );
  },
);

test("a daemon that sends no hello is given up", { timeout: 20_000 }, async () => {
  await using daemon = new ScriptedDaemon(async () => {});
  await assert.rejects(Client.connect({ path: daemon.path, connectTimeoutMs: 50 }), {
    name: "ConnectionLost",
  });
});

test(
  "events of the queue use no credit, and half of the credit is returned at a time",
  { timeout: 20_000 },
  async () => {
    const credits: unknown[] = [];
    await using daemon = new ScriptedDaemon(async (socket, reader) => {
      socket.write(hello());
      await message(reader);
      await message(reader);
      for (let position = 9; position > 0; position -= 1)
        socket.write(encodeFrame([4, 1, { position, waiting: 9, starts_in_s: null }]));
      for (let token = 0; token < 7; token += 1) socket.write(encodeFrame([4, 1, { tokens: [token] }]));
      for (let count = 0; count < 2; count += 1) credits.push(await message(reader));
      socket.write(encodeFrame([2, 1, {}]));
      assert.deepEqual(await message(reader), [1, 2, "queue", {}]); // no further credit came
      socket.write(encodeFrame([2, 2, { tasks: [] }]));
    });
    await using client = await Client.connect({ path: daemon.path });
    let events = 0;
    await client.call("stream", { context: 5n as never, credit: 6 }, { onEvent: () => (events += 1) });
    await client.call("queue");
    assert.deepEqual(
      [events, credits],
      [
        16,
        [
          [5, 1, 3],
          [5, 1, 3],
        ],
      ],
    );
  },
);
