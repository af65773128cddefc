/** Frames without sockets: values to bytes, and bytes to messages. */

import { decode, Encoder } from "@msgpack/msgpack";

import { InvalidArgument, ProtocolError, TooLarge, unreadable } from "./errors.js";
import { LIMITS } from "./generated/protocol.js";
import type { InferdError } from "./errors.js";

export const Kind = { HELLO: 0, REQUEST: 1, REPLY: 2, ERROR: 3, EVENT: 4, CREDIT: 5, GOODBYE: 6 } as const;
export type Message = unknown[];

const HEADER_BYTES = 4;
const INT_MIN = -(2n ** 63n);
const INT_END = 2n ** 64n;
const encoder = new Encoder({ useBigInt64: true });

/**
 * Return a message as a frame.
 *
 * Throws `InvalidArgument` if a value has no form in the protocol, and `TooLarge` if the body exceeds
 * `bytesMax`, so that a frame that the daemon would refuse is never sent.
 */
export function encodeFrame(message: Message, bytesMax: number = LIMITS.FRAME_BYTES_MAX): Buffer {
  const body = encoder.encodeSharedRef(toWire(message, 1));
  if (body.length > bytesMax) {
    throw new TooLarge(`the message has ${body.length} bytes; the limit is ${bytesMax}`, {
      hint: "send less, or in parts",
      data: { bytes: body.length, frame_bytes_max: bytesMax },
    });
  }
  const frame = Buffer.allocUnsafe(HEADER_BYTES + body.length);
  frame.writeUInt32LE(body.length);
  frame.set(body, HEADER_BYTES);
  return frame;
}

/** Return `value` in the types that the encoder sends as the protocol means them. */
function toWire(value: unknown, level: number): unknown {
  switch (typeof value) {
    case "string":
      if (value.isWellFormed()) return value;
      throw refused("a text with half of a surrogate pair", "use text.toWellFormed()");
    case "number":
      // The encoder would send integers of more than 32 bits as floats.
      return Number.isSafeInteger(value) && isLong(value) ? BigInt(value) : value;
    case "bigint":
      return isLong(value) ? inRange(value) : Number(value);
    case "boolean":
      return value;
    case "object":
      return value === null ? null : objectToWire(value, level);
    default:
      throw refused(`a value of the type ${typeof value}`, "send texts, numbers, arrays and plain objects");
  }
}

function objectToWire(value: object, level: number): unknown {
  if (ArrayBuffer.isView(value)) return new Uint8Array(value.buffer, value.byteOffset, value.byteLength);
  if (level > LIMITS.NESTING_MAX) throw refused("a value that contains itself, or has too many levels");
  if (Array.isArray(value)) return Array.from(value, (item) => toWire(item, level + 1));
  const prototype: unknown = Object.getPrototypeOf(value);
  if (prototype !== null && prototype !== Object.prototype) {
    throw refused(`a ${value.constructor.name}`, "send a plain object");
  }
  const entries = Object.entries(value).filter(([, item]) => item !== undefined);
  return Object.fromEntries(entries.map(([key, item]) => [toWire(key, level), toWire(item, level + 1)]));
}

function isLong(value: number | bigint): boolean {
  return value >= 2 ** 32 || value < -(2 ** 31);
}

function inRange(value: bigint): bigint {
  if (value >= INT_MIN && value < INT_END) return value;
  throw refused(`the number ${value}`, "integers have 64 bits");
}

function refused(what: string, hint?: string): InferdError {
  return new InvalidArgument(`${what} cannot be sent`, { hint });
}

/** Return `value` with integers as numbers; a handle above 2⁵³ stays a bigint. */
function toNumbers(value: unknown): unknown {
  if (typeof value === "bigint") {
    const number = Number(value);
    return Number.isSafeInteger(number) ? number : value;
  }
  if (typeof value !== "object" || value === null || ArrayBuffer.isView(value)) return value;
  if (Array.isArray(value)) return value.map(toNumbers);
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, toNumbers(item)]));
}

/** Cuts the bytes of a connection into messages. */
export class FrameReader {
  #chunks: Buffer[] = [];
  #bytes = 0;
  #missing = HEADER_BYTES;

  /** Add received bytes, and yield each message that they complete. Throws `ProtocolError` or `TooLarge`. */
  *push(chunk: Buffer): Generator<Message> {
    this.#chunks.push(chunk);
    this.#bytes += chunk.length;
    if (this.#bytes < this.#missing) return;
    let data = this.#chunks.length === 1 ? chunk : Buffer.concat(this.#chunks, this.#bytes);
    for (;;) {
      const size = data.length < HEADER_BYTES ? 0 : data.readUInt32LE();
      if (size > LIMITS.REPLY_BYTES_MAX) {
        throw new TooLarge(
          `the daemon sent a frame of ${size} bytes; the limit is ${LIMITS.REPLY_BYTES_MAX}`,
        );
      }
      this.#missing = HEADER_BYTES + size;
      if (data.length < this.#missing) break;
      yield decodeMessage(data.subarray(HEADER_BYTES, this.#missing));
      data = data.subarray(this.#missing);
    }
    this.#chunks = [data];
    this.#bytes = data.length;
  }
}

function decodeMessage(body: Buffer): Message {
  let message: unknown;
  try {
    message = toNumbers(decode(body, { useBigInt64: true }));
  } catch (error) {
    throw unreadable(error);
  }
  if (Array.isArray(message)) return message;
  throw new ProtocolError("the daemon sent a message that is not an array");
}
