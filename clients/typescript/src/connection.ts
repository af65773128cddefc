/** A connection to the daemon: its socket, the hellos, and the requests under way. */

import { createConnection } from "node:net";
import { setTimeout as sleep } from "node:timers/promises";
import type { Socket } from "node:net";

import * as errors from "./errors.js";
import { InferdError, errorFromWire, isFields, raisedAgain, unreadable } from "./errors.js";
import { PROTOCOL_VERSION, readServerHello } from "./generated/protocol.js";
import { checkSocketFolder } from "./paths.js";
import { Request } from "./request.js";
import { encodeFrame, FrameReader, Kind } from "./wire.js";
import type { ClientHello, ServerHello } from "./generated/protocol.js";
import type { Sender } from "./request.js";
import type { Fields } from "./types.js";
import type { Message } from "./wire.js";

/** Requests of a connection that are reserved for cancels. */
const CANCELS_MAX = 16;
/** Requests that wait until the daemon takes more of this connection. */
export const WAITING_MAX = 4096;
const UNSENT_BYTES_MAX = 1 << 20;
const PATH_BYTES_MAX = 107;
const CONNECT_PAUSE_MS = 20;

export class Connection implements Sender {
  server!: ServerHello;
  readonly ended: Promise<void>;
  #lost: InferdError | undefined;
  #number = 0;
  readonly #inFlight = new Map<number, Request>();
  readonly #waiting: { request: Request; frame: Buffer }[] = [];
  readonly #cancels = new Set<number>();
  readonly #toCancel: Request[] = [];
  readonly #reader = new FrameReader();
  #greeted!: () => void;
  #end!: () => void;

  private constructor(
    readonly path: string,
    readonly socket: Socket,
  ) {
    this.ended = new Promise((resolve) => (this.#end = resolve));
    socket.on("data", (chunk) => this.#receive(chunk));
    socket.on("drain", () => this.#sendWaiting());
    socket.on("error", ({ message }) => this.lose(lostError(`the connection to ${path} failed: ${message}`)));
    socket.on("close", () => this.lose(lostError(`the daemon at ${path} closed the connection`)));
  }

  /** Connect and exchange hellos. Throws `ConnectionLost`, `VersionMismatch` or the daemon's refusal. */
  static async open(path: string, hello: ClientHello, timeoutMs: number): Promise<Connection> {
    const until = performance.now() + timeoutMs;
    const connection = new Connection(path, await connectSocket(path, until));
    const greeted = new Promise<void>((resolve) => (connection.#greeted = resolve));
    const timer = setTimeout(
      () => connection.lose(silentDaemon(path, timeoutMs)),
      Math.max(0, until - performance.now()),
    );
    connection.socket.write(encodeFrame([Kind.HELLO, hello]));
    await Promise.race([greeted, connection.ended]);
    clearTimeout(timer);
    if (connection.#lost) throw raisedAgain(connection.#lost);
    return connection;
  }

  get lost(): boolean {
    return this.#lost !== undefined;
  }

  /** Throws `ConnectionLost` if the connection was lost. */
  throwIfLost(): void {
    if (!this.#lost) return;
    if (this.#lost instanceof errors.ConnectionLost) throw raisedAgain(this.#lost);
    throw new errors.ConnectionLost(
      `the daemon at ${this.path} has closed the connection: ${this.#lost.message}`,
      {
        hint: "make a new client, or one with `reconnect`",
        data: { cause: this.#lost.name },
      },
    );
  }

  /**
   * Send a request, now or when fewer are under way. `signal` cancels it in the daemon, and its reader gets
   * the signal's reason.
   */
  request(call: string, params: Fields, signal: AbortSignal): Request {
    signal.throwIfAborted();
    this.throwIfLost();
    const request = new Request(this, ++this.#number, call, params);
    const frame = encodeFrame([Kind.REQUEST, request.id, call, params], this.server.limits.frame_bytes_max);
    if (this.#waiting.length >= WAITING_MAX) {
      throw new errors.Busy(`${WAITING_MAX} requests already wait to be sent`, {
        hint: "wait for some of them",
      });
    }
    const abandon = (): void => request.abandon(signal.reason);
    signal.addEventListener("abort", abandon, { once: true });
    void request.settled.then(() => signal.removeEventListener("abort", abandon));
    this.#waiting.push({ request, frame });
    this.#sendWaiting();
    return request;
  }

  #sendWaiting(): void {
    const inFlightMax = Math.max(1, this.server.limits.requests_max - CANCELS_MAX);
    while (this.#inFlight.size < inFlightMax && this.socket.writableLength <= UNSENT_BYTES_MAX) {
      const next = this.#waiting.shift();
      if (!next) return;
      if (next.request.answered) continue;
      this.#inFlight.set(next.request.id, next.request);
      this.socket.write(next.frame);
    }
  }

  grantCredit(request: Request, events: number): void {
    if (!request.answered && !this.#lost) this.socket.write(encodeFrame([Kind.CREDIT, request.id, events]));
  }

  cancelRequest(request: Request): void {
    if (!this.#inFlight.has(request.id)) return request.answer({}); // it was not sent
    this.#toCancel.push(request);
    this.#sendCancels();
  }

  #sendCancels(): void {
    while (!this.#lost && this.#cancels.size < CANCELS_MAX) {
      const request = this.#toCancel.shift();
      if (!request) return;
      if (request.answered) continue;
      this.#cancels.add(++this.#number);
      this.socket.write(encodeFrame([Kind.REQUEST, this.#number, "cancel", { request: request.id }]));
    }
  }

  #receive(chunk: Buffer): void {
    try {
      for (const message of this.#reader.push(chunk)) {
        if (this.#lost) return;
        this.#handle(message);
      }
    } catch (error) {
      this.lose(error instanceof InferdError ? error : unreadable(error));
    }
  }

  #handle([kind, first, second]: Message): void {
    switch (kind) {
      case Kind.EVENT:
        return this.#inFlight.get(first as number)?.addEvent(fieldsOf(second));
      case Kind.REPLY:
        return this.#answer(first as number, fieldsOf(second));
      case Kind.ERROR: {
        const error = errorFromWire(fieldsOf(second));
        return this.#answer(first as number, error.data, error);
      }
      case Kind.GOODBYE:
        return this.lose(errorFromWire(fieldsOf(first)));
      case Kind.HELLO:
        this.server = readHello(this.path, fieldsOf(first));
        this.#greeted();
    }
  }

  #answer(id: number, fields: Fields, error?: InferdError): void {
    const request = this.#inFlight.get(id);
    this.#inFlight.delete(id);
    request?.answer(fields, error);
    if (this.#cancels.delete(id)) this.#sendCancels();
    this.#sendWaiting();
  }

  /** End the connection: all requests fail with `error`, later ones at once. */
  lose(error: InferdError): void {
    if (this.#lost) return;
    this.#lost = error;
    this.socket.destroy();
    const requests = [...this.#inFlight.values(), ...this.#waiting.map(({ request }) => request)];
    this.#inFlight.clear();
    this.#waiting.length = this.#toCancel.length = 0;
    for (const request of requests) {
      request.lost = true;
      request.answer({}, error);
    }
    this.#end();
  }
}

async function connectSocket(path: string, until: number): Promise<Socket> {
  // The kernel would get a path that is cut off.
  if (Buffer.byteLength(path) > PATH_BYTES_MAX) throw connectError(path, new Error("the path is too long"));
  for (;;) {
    try {
      checkSocketFolder(path);
      return await new Promise<Socket>((resolve, reject) => {
        const socket = createConnection(path, () => {
          socket.off("error", reject);
          resolve(socket);
        });
        socket.once("error", reject);
      });
    } catch (error) {
      if (error instanceof InferdError) throw error;
      const failure = error as NodeJS.ErrnoException;
      // The daemon's backlog is full; no event reports space in it.
      if (failure.code !== "EAGAIN" || performance.now() > until) throw connectError(path, failure);
      await sleep(CONNECT_PAUSE_MS);
    }
  }
}

function connectError(path: string, { code, message }: NodeJS.ErrnoException): InferdError {
  if (code === "EACCES" || code === "EPERM") {
    return new errors.PermissionDenied(`the socket ${path} is not open to this user`, {
      hint: "ask the daemon's operator for access, or start your own with `inferd start`",
    });
  }
  if (code === "ENOENT" || code === "ECONNREFUSED" || code === "ECONNRESET" || code === "EAGAIN") {
    return new errors.ConnectionLost(`no daemon answers at ${path}: ${code}`, {
      hint: "start it with `inferd start`, or set INFERD_SOCKET to its socket",
    });
  }
  return new errors.InvalidArgument(`cannot connect to ${path}: ${message}`, {
    hint: "set INFERD_SOCKET or pass `path`; a socket's path has at most 107 bytes",
  });
}

function lostError(message: string): InferdError {
  return new errors.ConnectionLost(message, {
    hint: "see `inferd status`; a client with `reconnect` connects again",
  });
}

function silentDaemon(path: string, timeoutMs: number): InferdError {
  return new errors.ConnectionLost(`the daemon at ${path} did not answer within ${timeoutMs} ms`, {
    hint: "see `inferd status` and the daemon's log, or raise connectTimeoutMs",
  });
}

function readHello(path: string, fields: Fields): ServerHello {
  const hello = readServerHello(fields);
  const [major, minor] = PROTOCOL_VERSION;
  if (!Array.isArray(hello.protocol) || hello.protocol[0] !== major) {
    throw new errors.VersionMismatch(
      `the daemon at ${path} (${hello.software}) speaks version ${hello.protocol} of the protocol, this client ${major}.${minor}`,
      { hint: "install the daemon and this client in versions that fit", data: { protocol: hello.protocol } },
    );
  }
  const { frame_bytes_max, requests_max } = (hello.limits ?? {}) as Partial<ServerHello["limits"]>;
  if (typeof frame_bytes_max === "number" && typeof requests_max === "number") return hello;
  throw new errors.ProtocolError("the daemon's hello has no limits");
}

function fieldsOf(value: unknown): Fields {
  if (isFields(value)) return value;
  throw new errors.ProtocolError("the daemon sent a message without a map");
}
