import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { Client } from "../src/index.js";
import { runningDaemon } from "../src/testing.js";
import { echoModel, tasksBecome } from "./support.js";
import type { Piece, QueueEvent } from "../src/index.js";
import type { RunningDaemon } from "../src/testing.js";

const CONFIG =
  echoModel("echo") + echoModel("slow", { step_ms: 20 }, 1) + echoModel("code", { fim: true, step_ms: 5 });
const LONG = "abcdefghij".repeat(20);
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

test("a stream yields the pieces of an answer", async () => {
  await using session = await client.session("echo", { system: "You are brief." });
  const stream = session.stream("hé!");
  const pieces: Piece[] = [];
  for await (const piece of stream) pieces.push(piece);
  assert.deepEqual(
    pieces.map(({ text }) => text),
    ["h", "é", "!"],
  );
  assert.deepEqual(stream.tokens, [104, 195, 169, 33]);
  assert.deepEqual(
    [stream.text, stream.metadata.stop_reason, stream.metadata.output_tokens],
    ["hé!", "eos", 5],
  );
  assert.deepEqual(session.metadata, stream.metadata);
});

test("a conversation goes on over turns, and can go back", async () => {
  await using session = await client.session("echo", { raw: true });
  const first = await session.chat("one");
  const second = await session.chat("two");
  assert.deepEqual([first.text, second.text], ["one", "two"]);
  assert.ok((second.metadata.input_tokens ?? 0) > (first.metadata.input_tokens ?? 0));
  assert.equal((await session.rewind({ turns: 1 })).turns, 1);
  assert.equal((await session.chat([{ role: "user", content: "three" }])).text, "three");
  const { messages, turns } = await session.history();
  assert.deepEqual([messages.map((message) => message["content"]), turns], [["three", "three"], [0, 0]]);
  await session.reset("Be brief.");
  assert.equal((await session.rewind({ tokens: 0 })).tokens, 0);
});

test("options of a session and of a turn reach the daemon", async () => {
  await using session = await client.session("echo", { options: { "n-predict": 3 }, priority: "high" });
  assert.equal((await session.chat("abcdef")).text, "abc");
  assert.equal((await session.chat("abcdef", { options: { stop: "b" } })).text, "a");
  await session.setOptions({ "n-predict": 2 }, { priority: "low" });
  assert.equal((await session.chat("abcdef")).text, "ab");
  const { sessions } = await client.call("sessions");
  assert.equal(sessions.find(({ context }) => context === session.context)?.priority, "low");
});

test("a place in a file is filled in, and a newer call with the same key supersedes the older one", async () => {
  const place = { prefix: "ab", suffix: "yz" };
  assert.equal((await client.infill("code", place)).text, "ab|yz");
  await using session = await client.session("code");
  const older = session.stream({ prefix: LONG.repeat(10), suffix: "" }, { supersede: "buffer" });
  let begin = () => {};
  const begun = new Promise<void>((resolve) => (begin = resolve));
  const superseded = assert.rejects(async () => {
    for await (const { text } of older) if (text) begin();
  }, /a newer request with the same key/);
  await begun;
  assert.equal((await client.infill("code", place, { supersede: "buffer" })).text, "ab|yz");
  await superseded;
});

test("a reader that leaves its loop cancels the turn", async () => {
  await using session = await client.session("slow");
  const stream = session.stream(LONG);
  for await (const { text } of stream) if (text === "c") break;
  assert.equal(stream.text, "abc");
  assert.equal((await session.chat("next")).text, "next"); // waits for the end of the turn
  assert.equal(stream.metadata.stop_reason, "Cancelled");
});

test("a signal cancels the turn at once", async () => {
  await using session = await client.session("slow");
  const aborter = new AbortController();
  const stream = session.stream(LONG, { signal: aborter.signal });
  await assert.rejects(async () => {
    for await (const { text } of stream) if (text === "b") aborter.abort(new Error("stopped by the user"));
  }, /stopped by the user/);
  assert.equal((await session.chat("next")).text, "next");
  assert.deepEqual(await client.call("queue"), { tasks: [] });
  await assert.rejects(session.chat("x", { signal: AbortSignal.abort(new Error("before")) }), /before/);
});

test("a turn counts in the usage of its user", async () => {
  const count = async (): Promise<number> => {
    const { usage } = await client.usage(["model", "day"], { sinceMs: 3_600_000 });
    return usage.reduce((sum, row) => sum + Number(row["requests"]), 0);
  };
  const before = await count();
  await using session = await client.session("slow");
  await session.chat("one");
  assert.equal(await count(), before + 1);
  assert.deepEqual((await client.usage()).limits, []);
});

test("`cancel` of a stream and of a session end a turn", async () => {
  await using session = await client.session("slow");
  const stream = session.stream(LONG);
  const reading = stream.reply();
  await tasksBecome(client, 1);
  stream.cancel();
  await assert.rejects(reading, { name: "AbortError" });
  // Another text: the echo model's prompt is the last message alone, so the same one would add nothing.
  const other = session.stream(LONG.toUpperCase());
  await other[Symbol.asyncIterator]().next();
  assert.equal(await session.cancel(), true);
  await assert.rejects(other.reply(), { name: "Cancelled" });
  assert.equal(await session.cancel(), false);
});

test("`endReasoning` of a session makes the answer begin", async () => {
  await using session = await client.session("slow");
  assert.equal((await session.endReasoning()).reason, "no_turn");
  const stream = session.stream(`<think>${LONG.repeat(4)}</think>The answer.`, {
    options: { "reasoning-format": "deepseek" },
  });
  const pieces = stream[Symbol.asyncIterator]();
  while (!stream.reasoning) await pieces.next();
  const found = await session.endReasoning();
  assert.equal(found.ended, true);
  const reply = await stream.reply();
  assert.ok(reply.reasoning.length > 0 && reply.reasoning.length < 2 * LONG.length, reply.reasoning);
  assert.match(reply.text, /The answer\.$/);
  assert.equal((await session.endReasoning()).ended, false);
});

test("a timeout ends a turn in the daemon", async () => {
  await using session = await client.session("slow");
  await assert.rejects(session.chat(LONG, { timeoutMs: 100 }), { name: "Timeout" });
  assert.equal((await session.chat("next")).text, "next");
});

test("a session has one turn at a time", async () => {
  await using session = await client.session("slow");
  const stream = session.stream(LONG);
  await stream[Symbol.asyncIterator]().next();
  await assert.rejects(
    session.chat("x"),
    (error) =>
      (error as { name: string }).name === "SessionBusy" && (error as { retryable: boolean }).retryable,
  );
});

test("the daemon waits for a slow reader: credit follows what was consumed", async () => {
  await using session = await client.session("echo");
  const pieces = session.stream(LONG)[Symbol.asyncIterator]();
  const sent = async (): Promise<number | undefined> => (await client.call("queue")).tasks[0]?.output_tokens;
  const read = async (count: number): Promise<void> => {
    for (; count > 0; count -= 1) await pieces.next();
  };
  const stays = async (tokens: number): Promise<void> => {
    while ((await sent()) !== tokens);
    for (let check = 0; check < 20; check += 1) assert.equal(await sent(), tokens);
  };
  await read(1);
  await stays(64);
  await read(30);
  await stays(64); // 31 are read: less than half of the credit
  await read(1);
  await stays(96);
  await read(32);
  await stays(128);
});

test("a turn that waits gets its place in the queue", async () => {
  await using first = await client.session("slow");
  await using second = await client.session("slow");
  const pieces = first.stream(LONG)[Symbol.asyncIterator]();
  await pieces.next();
  const places: QueueEvent[] = [];
  const waiting = second.chat("x", { onQueue: (place) => places.push(place) });
  while (places.length === 0) await client.call("queue");
  await pieces.return();
  assert.equal((await waiting).text, "x");
  assert.deepEqual([places[0]?.position, places[0]?.waiting], [1, 1]);
});

test("tool calls and reasoning are apart from the text", async () => {
  await using session = await client.session("echo");
  const tools = [{ type: "function", function: { name: "now" } }];
  const called = await session.chat('{"name": "now", "arguments": {"zone": "UTC"}}', {
    options: { tools, "tool-choice": "required" },
  });
  assert.deepEqual(
    called.toolCalls.map(({ name, arguments: text }) => [name, JSON.parse(text)]),
    [["now", { zone: "UTC" }]],
  );
  assert.deepEqual([called.text, called.toolCalls[0]?.id.length], ["", 9]);
  const thought = await session.chat("<think>why</think>so", { options: { "reasoning-format": "deepseek" } });
  assert.deepEqual([thought.reasoning.trim(), thought.text.trim()], ["why", "so"]);
});

test("several answers come from one prompt", async () => {
  await using session = await client.session("echo");
  const answers = await session.answers("hi", 3);
  assert.deepEqual(
    answers.map(({ text, error }) => [text, error]),
    Array(3).fill(["hi", undefined]),
  );
  assert.equal(session.metadata.stop_reason, "eos");
});

test("logprobs come with the pieces", async () => {
  await using session = await client.session("echo");
  const stream = session.stream("ab", { options: { "n-probs": 1 } });
  await stream.reply();
  assert.deepEqual(
    stream.probabilities.slice(0, 2).map(({ token }) => token),
    ["a", "b"],
  );
});

test("logprobs of a prompt come before the first piece", async () => {
  await using session = await client.session("echo", { raw: true });
  const stream = session.stream("abc", { options: { "prompt-logprobs": 0, "n-predict": 1 } });
  await stream.reply();
  assert.deepEqual(
    stream.promptLogprobs.map(({ token, logprob }) => [token, logprob]).slice(0, 3),
    [
      ["<|prompt|>", null],
      ["a", stream.promptLogprobs[1]?.["logprob"]],
      ["b", -1 / 16],
    ],
  );
  assert.equal(stream.promptLogprobs.length, 5);
});

test("branches are independent, and are closed with their session", async () => {
  const session = await client.session("echo");
  await session.chat("one");
  const [left, right] = await session.fork(2);
  assert.ok(left && right && left.context !== right.context);
  await left.chat("two");
  assert.equal((await right.rewind({ turns: 1 })).turns, 0);
  await left.close();
  const open = right.context;
  await session.close();
  assert.ok(!(await client.call("sessions")).sessions.some(({ context }) => context === open));
  await assert.rejects(right.chat("x"), { name: "InvalidArgument" });
  await assert.rejects(session.chat("x"), { name: "InvalidArgument" });
});

test("a session with an id is opened again with its history, until it is deleted", async () => {
  const first = await client.session("echo", { sessionId: "notes" });
  await first.chat("one");
  await first.close();
  const again = await client.session("echo", { sessionId: "notes" });
  assert.deepEqual([first.sessionId, again.attached], ["notes", true]);
  assert.equal((await again.rewind({ turns: 1 })).turns, 0);
  await again.delete();
  await using last = await client.session("echo", { sessionId: "notes" });
  assert.equal(last.attached, false);
  await last.delete();
  await assert.rejects(client.session("echo", { resume: true }), { name: "InvalidArgument" });
});

test("a session that cannot be opened leaves nothing behind", async () => {
  const before = (await client.call("models")).models.map(({ leases }) => leases);
  await assert.rejects(client.session("echo", { options: { "n-predict": -7 } }), { name: "InvalidArgument" });
  assert.deepEqual(
    (await client.call("models")).models.map(({ leases }) => leases),
    before,
  );
});

test("a session and its branches wait for a place where too many are open", { timeout: 60_000 }, async () => {
  await using small = await runningDaemon({ config: `[daemon]\nsessions-max = 2\n${CONFIG}` });
  await using other = await Client.connect({ path: small.socket });
  const queueTimeoutMs = 30_000;
  const [first, second] = [await other.session("echo"), await other.session("echo", { queueTimeoutMs })];
  await assert.rejects(other.session("echo"), { name: "Busy", retryable: true });
  const waiting = second.fork();
  while ((await other.call("stats")).stats.sessions_waiting === 0);
  await first.close();
  const [branch] = await waiting;
  assert.equal((await branch?.chat("x"))?.text, "x");
});
