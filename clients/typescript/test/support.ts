/** What the tests share: echo models, the vectors, a daemon that plays a script. */

import assert from "node:assert/strict";
import { once } from "node:events";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { connect, createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import type { Socket } from "node:net";

import type { Client } from "../src/index.js";
import type { Message } from "../src/wire.js";

export interface Frame {
  from: "client" | "daemon";
  hex: string;
  means: Message;
}

interface Case {
  name: string;
  hello: boolean;
  frames: string[];
  outcome: { error?: string; reply?: unknown };
}

const ROOT = join(import.meta.dirname, "../../../..");

export const VECTORS = JSON.parse(readFileSync(join(ROOT, "docs/protocol-vectors.json"), "utf8")) as {
  software: string;
  exchanges: { name: string; frames: Frame[] }[];
  malformed_daemon: Case[];
};

/** Return the configuration of an echo model. */
export function echoModel(name: string, options: Record<string, number | string | boolean> = {}, slots = 4): string {
  const lines = Object.entries(options).map(([key, value]) => `${key} = ${JSON.stringify(value)}`);
  return [
    `[models.${name}]`,
    'backend = "echo"',
    `slots = ${slots}`,
    `[models.${name}.echo]`,
    ...lines,
    "",
  ].join("\n");
}

/** Wait until the daemon has `count` tasks. */
export async function tasksBecome(client: Client, count: number): Promise<void> {
  while ((await client.call("queue")).tasks.length !== count) await sleep(5);
}

/** Return `value` in the form of the vectors, in which bytes are `{"$bin": HEX}`. */
export function toPlain(value: unknown): unknown {
  if (value instanceof Uint8Array) return { $bin: Buffer.from(value).toString("hex") };
  if (Array.isArray(value)) return value.map(toPlain);
  if (typeof value === "bigint") return Number(value);
  if (typeof value !== "object" || value === null) return value;
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, toPlain(item)]));
}

/** Return what the vectors write as `value`. */
export function fromPlain(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(fromPlain);
  if (typeof value !== "object" || value === null) return value;
  const bytes = (value as { $bin?: string }).$bin;
  if (bytes !== undefined) return new Uint8Array(Buffer.from(bytes, "hex"));
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, fromPlain(item)]));
}

/** Reads a socket by numbers of bytes. */
export class ByteReader {
  #data = Buffer.alloc(0);

  constructor(readonly socket: Socket) {
    socket.pause();
  }

  async read(size: number): Promise<Buffer> {
    while (this.#data.length < size) {
      const chunk = this.socket.read() as Buffer | null;
      if (chunk) this.#data = Buffer.concat([this.#data, chunk]);
      else if (this.socket.readableEnded) throw new Error("the client has closed the connection");
      else await Promise.race([once(this.socket, "readable"), once(this.socket, "end")]);
    }
    const bytes = this.#data.subarray(0, size);
    this.#data = this.#data.subarray(size);
    return bytes;
  }

  /** Return the next frame, with its length. */
  async frame(): Promise<Buffer> {
    const head = await this.read(4);
    return Buffer.concat([head, await this.read(head.readUInt32LE())]);
  }
}

/** A daemon that plays a script on each connection. */
export class ScriptedDaemon implements AsyncDisposable {
  readonly #directory = mkdtempSync(join(tmpdir(), "inferd-script-"));
  readonly path = join(this.#directory, "socket");
  readonly #server;
  readonly #sockets = new Set<Socket>();
  /** Failures of the script. */
  readonly failures: unknown[] = [];

  constructor(script: (socket: Socket, reader: ByteReader) => Promise<void>) {
    this.#server = createServer((socket) => {
      this.#sockets.add(socket);
      socket.on("error", () => {});
      script(socket, new ByteReader(socket)).catch((error: unknown) => this.failures.push(error));
    });
    this.#server.listen(this.path);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const socket of this.#sockets) socket.destroy();
    this.#server.close();
    rmSync(this.#directory, { recursive: true });
    assert.deepEqual(this.failures, []);
  }
}

/** A socket before a daemon's, which can lose what the daemon sends. */
export class LossyPath implements AsyncDisposable {
  readonly #directory = mkdtempSync(join(tmpdir(), "inferd-lossy-"));
  readonly path = join(this.#directory, "socket");
  readonly #server;
  readonly #clients = new Set<Socket>();
  /** Whether replies are lost now. */
  loses = false;
  #lost = Buffer.alloc(0);

  constructor(daemonPath: string) {
    this.#server = createServer((client) => {
      this.#clients.add(client);
      const daemon = connect(daemonPath);
      client.pipe(daemon).on("error", () => client.destroy());
      client.on("error", () => {}).on("close", () => daemon.destroy());
      daemon.on("data", (data) => {
        if (this.loses) this.#lost = Buffer.concat([this.#lost, data]);
        else client.write(data);
      });
    });
    this.#server.listen(this.path);
  }

  /** Close the connections once a lost reply has had `text`. Later ones lose nothing. */
  async cutAfter(text: string): Promise<void> {
    while (!this.#lost.includes(text)) await sleep(5);
    this.loses = false;
    for (const client of this.#clients) client.destroy();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const client of this.#clients) client.destroy();
    this.#server.close();
    rmSync(this.#directory, { recursive: true });
  }
}
