import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";

import { Client, ConnectionLost, SessionExpired } from "../src/index.js";
import { runningDaemon } from "../src/testing.js";
import { recoveryStep } from "../src/turn.js";
import { echoModel, LossyPath, tasksBecome } from "./support.js";
import type { RunningDaemon } from "../src/testing.js";

const CONFIG = echoModel("echo") + echoModel("slow", { step_ms: 20 }, 1);
const TEXT = "abcdefghij".repeat(3);
/** It runs before and after each test. */
let daemon: RunningDaemon;

before(async () => {
  daemon = await runningDaemon({ config: CONFIG });
});

after(async () => {
  await daemon[Symbol.asyncDispose]();
});

test("a stream that lost its daemon has what was read", { timeout: 60_000 }, async () => {
  await using plain = await Client.connect({ path: daemon.socket });
  const session = await plain.session("slow");
  const reading = (async () => {
    for await (const { text } of session.stream(TEXT)) if (text === "c") await daemon.kill();
  })();
  await assert.rejects(
    reading,
    (error) => error instanceof ConnectionLost && /^abc/.test(error.data.text as string),
  );
  await daemon.start();
});

test(
  "a session with `resume` continues its stream after the daemon was killed",
  { timeout: 60_000 },
  async () => {
    await using tenacious = await Client.connect({ path: daemon.socket });
    await using session = await tenacious.session("slow", {
      sessionId: "long",
      resume: true,
      system: "Hello.",
    });
    const stream = session.stream(TEXT);
    let text = "";
    for await (const piece of stream) {
      text += piece.text;
      if (text === "abcd" || text === TEXT.slice(0, 20)) {
        await daemon.kill();
        await daemon.start();
      }
    }
    assert.equal(text, TEXT);
    assert.equal(stream.metadata.stop_reason, "eos");
    await daemon.stop();
    const waiting = session.chat("and on");
    await daemon.start();
    assert.equal((await waiting).text, "and on");
    await session.delete();
  },
);

test("the rest and the end of a turn that ended unread are read once", { timeout: 60_000 }, async () => {
  await using path = new LossyPath(daemon.socket);
  await using client = await Client.connect({ path: path.path });
  await using session = await client.session("slow", { sessionId: "unread", resume: true });
  const stream = session.stream(TEXT);
  let text = "";
  let cut: Promise<void> | undefined;
  for await (const piece of stream) {
    text += piece.text;
    if (text !== "abc") continue;
    path.loses = true;
    cut = path.cutAfter("stop_reason");
  }
  await cut;
  assert.equal(text, TEXT);
  assert.deepEqual([stream.tokens.length, stream.metadata.stop_reason], [TEXT.length, "eos"]);
  const { sessions } = await client.call("sessions");
  assert.deepEqual(
    sessions.map(({ turns }) => turns),
    [1],
    "it was not computed again",
  );
  await session.delete();
});

test("another client continues an interrupted turn after what was read", { timeout: 60_000 }, async () => {
  await using client = await Client.connect({ path: daemon.socket });
  const lost = await Client.connect({ path: daemon.socket });
  const stream = (await lost.session("slow", { sessionId: "taken over" })).stream(TEXT);
  await assert.rejects(async () => {
    for await (const { text } of stream) if (text === "e") await lost.close();
  }, ConnectionLost);
  const { tokens, text } = stream;
  await tasksBecome(client, 0);
  await using session = await client.session("slow", { sessionId: "taken over" });
  assert.ok(session.attached);
  assert.equal(text + (await session.resume({ tokens, text }).reply()).text, TEXT);
  await session.delete();
});

test(
  "a turn that a daemon refuses because it ends is computed by the next one",
  { timeout: 60_000 },
  async () => {
    await using client = await Client.connect({ path: daemon.socket });
    await using first = await client.session("slow");
    await using second = await client.session("slow", { sessionId: "second", resume: true });
    const running = first.stream(TEXT);
    await running[Symbol.asyncIterator]().next();
    const waiting = second.chat("later");
    await tasksBecome(client, 2);
    const stopped = daemon.stop();
    assert.equal((await running.reply()).text, TEXT); // the daemon finishes what has begun
    await stopped;
    await daemon.start();
    assert.equal((await waiting).text, "later");
    await second.delete();
  },
);

test("a session that was idle for too long is opened again", { timeout: 60_000 }, async () => {
  await using impatient = await runningDaemon({ config: `[daemon]\nidle-timeout-ms = 50\n${CONFIG}` });
  await using client = await Client.connect({ path: impatient.socket });
  const session = await client.session("echo", { sessionId: "idle", resume: true });
  await session.chat("one");
  while ((await client.call("sessions")).sessions.length > 0) await sleep(5);
  assert.equal((await session.chat("two")).text, "two");
  while ((await client.call("sessions")).sessions.length > 0) await sleep(5);
  await client.call("delete_session", { session_id: "idle" });
  await assert.rejects(session.chat("three"), SessionExpired);
});

test(
  "a session that is open elsewhere is refused, and leaves nothing behind",
  { timeout: 60_000 },
  async () => {
    await using client = await Client.connect({ path: daemon.socket });
    await using other = await Client.connect({ path: daemon.socket });
    await using _ = await other.session("echo", { sessionId: "taken" });
    await assert.rejects(client.session("echo", { sessionId: "taken" }), { name: "SessionBusy" });
    const { models } = await client.call("models");
    assert.equal(models.find(({ name }) => name === "echo")?.leases, 1);
  },
);

test("a turn continues by what the daemon has received of it", () => {
  const before = { turns: 1, tokens: 10 };
  const cases: [Parameters<typeof recoveryStep>, string][] = [
    [[undefined, before, false, 0, false], "repeat"],
    [[before, before, false, 0, false], "repeat"],
    [[before, { turns: 1, tokens: 15 }, false, 0, false], "answer"],
    [[before, { turns: 2, tokens: 15 }, false, 0, true], "answer"],
    [[before, { turns: 2, tokens: 15 }, true, 0, false], "resume"],
    [[before, { turns: 2, tokens: 15 }, true, 3, false], "resume"],
    [[before, { turns: 2, tokens: 15 }, false, 0, false], "fail"],
    [[before, { turns: 2, tokens: 15 }, false, 3, true], "fail"],
    [[before, before, true, 3, false], "fail"],
  ];
  for (const [given, step] of cases) assert.equal(recoveryStep(...given), step, JSON.stringify(given));
});
