import assert from "node:assert/strict";
import { test } from "node:test";

import { InvalidArgument, ProtocolError, TooLarge } from "../src/index.js";
import { encodeFrame, FrameReader } from "../src/wire.js";
import { fromPlain, toPlain, VECTORS } from "./support.js";

const FRAMES = VECTORS.exchanges.flatMap(({ frames }) => frames);
const HANDLE = 2n ** 63n + 1n;

function decoded(data: Buffer): unknown[] {
  return [...new FrameReader().push(data)];
}

test("each frame of the vectors is read with its meaning", () => {
  assert.ok(FRAMES.length > 150);
  for (const { hex, means } of FRAMES) assert.deepEqual(toPlain(decoded(Buffer.from(hex, "hex"))), [means]);
});

test("each frame of the vectors is written with its bytes, except that the head of a map may be longer", () => {
  for (const { hex, means } of FRAMES) {
    const written = encodeFrame(fromPlain(means) as unknown[]);
    if (!hex.includes("de000")) assert.equal(written.toString("hex"), hex);
    assert.deepEqual(decoded(written), decoded(Buffer.from(hex, "hex")));
  }
});

test("frames are read in whatever parts they arrive", () => {
  const data = Buffer.concat(FRAMES.slice(0, 40).map(({ hex }) => Buffer.from(hex, "hex")));
  const whole = decoded(data);
  for (const size of [1, 3, 7, 64, 1000]) {
    const reader = new FrameReader();
    const parts = [];
    for (let at = 0; at < data.length; at += size) parts.push(...reader.push(data.subarray(at, at + size)));
    assert.deepEqual(parts, whole);
  }
});

test("keys with the value undefined are dropped, and nil is sent", () => {
  assert.deepEqual(decoded(encodeFrame([1, { a: undefined, b: null, c: { d: undefined } }])), [
    [1, { b: null, c: {} }],
  ]);
});

test("integers and handles of 64 bits keep their value", () => {
  const values = [
    2 ** 31,
    2 ** 32,
    2 ** 32 - 1,
    2 ** 53 - 1,
    -(2 ** 31),
    -(2 ** 31) - 1,
    -(2 ** 53) + 1,
    0.5,
    1e20,
  ];
  assert.deepEqual(decoded(encodeFrame(values)), [values]);
  assert.deepEqual(decoded(encodeFrame([HANDLE, -(2n ** 63n), 5n])), [[HANDLE, -(2n ** 63n), 5]]);
  // An int of the protocol is never sent as a float.
  for (const value of [2 ** 32, -(2 ** 40), 4294967297n])
    assert.doesNotMatch(encodeFrame([value]).toString("hex"), /^.{10}c[ab]/);
});

test("a key named __proto__ is sent as any other", () => {
  const message = [JSON.parse('{"__proto__": 1}') as unknown];
  assert.match(encodeFrame(message).toString("latin1"), /__proto__/);
});

test("values without a form in the protocol are refused", () => {
  const loop: unknown[] = [];
  loop.push(loop);
  const values = [
    () => 1,
    Symbol("s"),
    [undefined],
    new Date(0),
    new Map(),
    "\ud800",
    { "\udc00": 1 },
    2n ** 64n,
    loop,
  ];
  for (const value of values) assert.throws(() => encodeFrame([value]), InvalidArgument);
});

test("a frame that is too large is never written", () => {
  const message = ["x".repeat(100)];
  const size = encodeFrame(message).length - 4;
  assert.equal(encodeFrame(message, size).length, size + 4);
  assert.throws(
    () => encodeFrame(message, size - 1),
    (error) => error instanceof TooLarge && error.data.bytes === size,
  );
});

test("the encoder is usable after a refused value", () => {
  assert.throws(() => encodeFrame([() => 1]), InvalidArgument);
  assert.deepEqual(decoded(encodeFrame([1])), [[1]]);
});

test("bytes that are not the protocol's give an error", () => {
  const bodies = ["", "81a16101", "9302", "c1", "dfffffffff", "ddffffffff", "92a5ff", "93020181a1", "d9ff"];
  for (const body of bodies) {
    const data = Buffer.alloc(4 + body.length / 2);
    data.writeUInt32LE(body.length / 2);
    data.write(body, 4, "hex");
    assert.throws(() => decoded(data), ProtocolError, body);
  }
  assert.throws(() => decoded(Buffer.from("HTTP/1.1 400 Bad Request")), TooLarge);
});

test("damaged frames end in messages or errors of the protocol", () => {
  for (const { hex } of FRAMES.filter((frame) => frame.hex.length < 800)) {
    const data = Buffer.from(hex, "hex");
    for (let at = 0; at < data.length; at += 1) {
      const damaged = Buffer.from(data);
      damaged[at] = (damaged[at] as number) ^ 0x55;
      try {
        decoded(damaged);
      } catch (error) {
        assert.ok(error instanceof ProtocolError || error instanceof TooLarge, String(error));
      }
    }
  }
});
