/** Tensors of strings: each string after its length, 4 bytes with the lowest first. */

import { InvalidArgument, unreadable } from "./errors.js";

const ENCODER = new TextEncoder();
const DECODER = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const LENGTH_BYTES = 4;

/** The elements of a tensor of strings: texts, or their bytes. */
export type StringArray = readonly (string | Uint8Array)[];

/** Return the bytes of an input's strings. */
export function packStrings(name: string, strings: StringArray): Uint8Array {
  const parts = strings.map((one) => (typeof one === "string" ? encode(name, one) : one));
  const data = new Uint8Array(parts.reduce((size, part) => size + LENGTH_BYTES + part.length, 0));
  const view = new DataView(data.buffer);
  let at = 0;
  for (const part of parts) {
    view.setUint32(at, part.length, true);
    data.set(part, at + LENGTH_BYTES);
    at += LENGTH_BYTES + part.length;
  }
  return data;
}

/** Return whether `value` has only strings and bytes. */
export function isStrings(value: unknown): value is StringArray {
  return Array.isArray(value) && value.every((one) => typeof one === "string" || one instanceof Uint8Array);
}

function encode(name: string, text: string): Uint8Array {
  if (!text.isWellFormed())
    throw new InvalidArgument(`the input ${name} has a text with half a surrogate pair`, {
      hint: "send whole characters",
    });
  return ENCODER.encode(text);
}

/** Return the strings of an output: texts, or bytes if one of them is not UTF-8. */
export function unpackStrings(data: Uint8Array<ArrayBuffer>): string[] | Uint8Array[] {
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  const found: Uint8Array[] = [];
  for (let at = 0; at < data.length; ) {
    const start = at + LENGTH_BYTES;
    at = start <= data.length ? start + view.getUint32(at, true) : start;
    if (at > data.length) throw unreadable("a string is cut off");
    found.push(data.slice(start, at));
  }
  try {
    return found.map((one) => DECODER.decode(one));
  } catch {
    return found;
  }
}
