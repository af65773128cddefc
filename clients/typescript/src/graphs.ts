/** Graphs, which compute tensors: typed arrays in and out. */

import { withGraph } from "./embeddings.js";
import { InvalidArgument } from "./errors.js";
import { isStrings, packStrings, unpackStrings } from "./strings.js";
import type { CallOptions, Client } from "./client.js";
import type { Tensor } from "./generated/protocol.js";
import type { StringArray } from "./strings.js";
import type { Graph, Priority } from "./types.js";

/** The numbers of a tensor. */
export type NumberArray =
  | Float32Array
  | Float64Array
  | Int8Array
  | Uint8Array
  | Int16Array
  | Uint16Array
  | Int32Array
  | Uint32Array
  | BigInt64Array
  | BigUint64Array;

/** An input: numbers or strings, which are a vector without a `shape`, or a tensor with its bytes and type. */
export type GraphInput = NumberArray | StringArray | { data: NumberArray | StringArray; shape: number[] } | Tensor;

/**
 * An output. The numbers of `fp16` and `bf16` are those of a Float32Array, unchanged; `bool` is 0 and 1. Strings are
 * texts, or all bytes if one is not UTF-8.
 */
export interface GraphOutput {
  data: NumberArray | string[] | Uint8Array[];
  shape: number[];
  type: string;
}

export interface ComputeOptions extends CallOptions {
  priority?: Priority | undefined;
}

type ArrayClass = {
  readonly BYTES_PER_ELEMENT: number;
  new (buffer: ArrayBuffer): NumberArray;
};

const CLASSES: Record<string, ArrayClass> = {
  fp32: Float32Array,
  fp64: Float64Array,
  u8: Uint8Array,
  i32: Int32Array,
  i64: BigInt64Array,
  bool: Uint8Array,
  i8: Int8Array,
  i16: Int16Array,
  u16: Uint16Array,
  u32: Uint32Array,
  u64: BigUint64Array,
};
const STRING = "string";
/** The types by their numbers, with which the daemon sends those that have one. */
const NAMES = ["fp16", "fp32", "fp64", "u8", "i32", "i64", "bf16"];

/** Return the outputs of a graph by their names. The timeout holds for each call that this takes. */
export async function computeGraph(
  client: Client,
  model: string | Graph,
  inputs: Record<string, GraphInput>,
  { priority, ...options }: ComputeOptions,
): Promise<Record<string, GraphOutput>> {
  const named = Object.entries(inputs).map(([name, value]): [string, Tensor] => [name, toTensor(name, value)]);
  return await withGraph(client, model, options, async (graph) => {
    const { context } = await client.call("init_execution_context", { graph, priority }, options);
    try {
      const { outputs } = await client.call("compute", { context, inputs: named, priority }, options);
      return Object.fromEntries(outputs.map(([name, tensor]) => [name, toOutput(tensor)]));
    } finally {
      if (client.connected)
        await client.call("finalize_execution_context", { context }, { timeoutMs: 5000 }).catch(() => {});
    }
  });
}

function toTensor(name: string, value: GraphInput): Tensor {
  if (isArray(value)) return fromArray(name, value, [value.length]);
  if ("shape" in value) return fromArray(name, value.data, value.shape);
  return value;
}

function isArray(value: GraphInput): value is NumberArray | StringArray {
  return ArrayBuffer.isView(value) || Array.isArray(value);
}

function fromArray(name: string, array: NumberArray | StringArray, shape: number[]): Tensor {
  if (isStrings(array)) return { data: packStrings(name, array), dimensions: shape, type: STRING };
  const type = Object.keys(CLASSES).find((each) => array instanceof (CLASSES[each] as ArrayClass));
  if (type === undefined)
    throw new InvalidArgument(`the input ${name} is not an array that a graph takes`, {
      hint: "pass a Float32Array, an Int32Array or another typed array, a list of strings, or a tensor",
    });
  const data = new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
  return { data, dimensions: shape, type };
}

function toOutput({ data = new Uint8Array(), dimensions = [], type = "u8" }: Tensor): GraphOutput {
  const name = typeof type === "number" ? (NAMES[type] ?? `type ${type}`) : type;
  // A copy has a buffer of its own, also of a Buffer.
  const copy = new Uint8Array(data);
  if (name === STRING) return { data: unpackStrings(copy), shape: dimensions, type: name };
  const { buffer } = copy;
  if (name === "fp16" || name === "bf16") {
    const toNumber = name === "fp16" ? fromHalf : fromBrain;
    return { data: Float32Array.from(new Uint16Array(buffer), toNumber), shape: dimensions, type: name };
  }
  const found = CLASSES[name];
  if (!found)
    throw new InvalidArgument(`an output has elements of ${name}`, { hint: "use the call `compute`, which returns bytes" });
  return { data: new found(buffer), shape: dimensions, type: name };
}

/** Return a number of IEEE 754's binary16. */
function fromHalf(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0x1f) return fraction ? NaN : sign * Infinity;
  return exponent ? sign * 2 ** (exponent - 15) * (1 + fraction / 1024) : sign * 2 ** -24 * fraction;
}

const SCRATCH = new DataView(new ArrayBuffer(4));

/** Return a number of bfloat16, the upper half of a float32. */
function fromBrain(bits: number): number {
  SCRATCH.setUint32(0, bits * 0x10000);
  return SCRATCH.getFloat32(0);
}
