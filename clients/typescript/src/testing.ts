/** A real daemon for tests, in a temporary directory. */

import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdirSync, mkdtempSync, openSync, closeSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { ChildProcess } from "node:child_process";
import type { Readable } from "node:stream";

import { InferdError, NotFound, Timeout } from "./errors.js";

const READY_MS_MAX = 30_000;
const STOP_MS_MAX = 30_000;

export interface DaemonOptions {
  /** The text of a configuration file. Without it the daemon has the model `echo`. */
  config?: string | undefined;
  /** A directory of GGUF files. */
  modelsDir?: string | undefined;
  /** The program and its first arguments. Default: `inferd` on the PATH. */
  command?: [string, ...string[]] | undefined;
}

/** A daemon process; `socket` is the path for clients. */
export class RunningDaemon implements AsyncDisposable {
  readonly directory = mkdtempSync(join(tmpdir(), "inferd-"));
  readonly socket = join(this.directory, "run", "inferd.sock");
  #process: ChildProcess | undefined;

  constructor(readonly options: DaemonOptions) {
    writeFileSync(join(this.directory, "config.toml"), options.config ?? "");
    mkdirSync(join(this.directory, "models"));
  }

  get pid(): number {
    return this.#process?.pid ?? 0;
  }

  /** What the daemon has written to its standard error so far. */
  get log(): string {
    return readFileSync(join(this.directory, "log"), "utf8");
  }

  /** Start the daemon, again on the same files if it has ended, and wait until it is ready. */
  async start(): Promise<void> {
    const [program, ...first] = this.options.command ?? ["inferd"];
    const log = openSync(join(this.directory, "log"), "a");
    const child = spawn(program, [...first, ...this.#arguments()], {
      stdio: ["ignore", "ignore", log, "pipe"],
    });
    closeSync(log);
    this.#process = child;
    const ready = child.stdio[3] as Readable;
    ready.on("error", () => {});
    // A daemon that fails writes the reason, without a line break, and then ends.
    const failing = new Promise(() => {});
    const outcome = await Promise.race([
      once(ready, "data").then(([data]) => (String(data).includes("\n") ? "ready" : failing)),
      once(child, "exit").then(() => "ended"),
      once(child, "error").then(() => "missing"),
      new Promise((resolve) => setTimeout(resolve, READY_MS_MAX, "slow").unref()),
    ]).catch(() => "missing");
    ready.destroy();
    if (outcome === "ready") return;
    if (outcome === "missing") {
      throw new NotFound(`${program} cannot be started`, { hint: "install inferd, or pass `command`" });
    }
    await this.kill();
    throw new InferdError(`the daemon did not start:\n${this.log}`, { hint: "see its log" });
  }

  #arguments(): string[] {
    const { directory } = this;
    return [
      ...["serve", "--ready-fd", "3", "--config", join(directory, "config.toml"), "--socket", this.socket],
      ...[
        "--models-dir",
        this.options.modelsDir ?? join(directory, "models"),
        "--state-dir",
        join(directory, "state"),
      ],
      ...["--metrics", join(directory, "metrics.sock")],
    ];
  }

  /** Stop the daemon as systemd does, and return its exit status. */
  async stop(): Promise<number | null> {
    const late = setTimeout(() => void this.#process?.kill("SIGKILL"), STOP_MS_MAX);
    try {
      const status = await this.#end("SIGTERM");
      if (this.#process?.signalCode === "SIGKILL") {
        throw new Timeout(`the daemon did not stop:\n${this.log}`, { hint: "see its log" });
      }
      return status;
    } finally {
      clearTimeout(late);
    }
  }

  /** Kill the daemon with SIGKILL; its workers end with it. */
  async kill(): Promise<void> {
    await this.#end("SIGKILL");
  }

  async #end(signal: NodeJS.Signals): Promise<number | null> {
    const child = this.#process;
    if (!child || child.pid === undefined) return null;
    if (child.exitCode === null && child.signalCode === null) {
      child.kill(signal);
      await once(child, "exit");
    }
    return child.exitCode;
  }

  /** Stop the daemon and delete its directory. */
  async [Symbol.asyncDispose](): Promise<void> {
    try {
      if (this.#process?.signalCode !== "SIGKILL") await this.stop();
    } finally {
      rmSync(this.directory, { recursive: true, force: true });
    }
  }
}

/** Start a daemon; declare it with `await using`, which stops it and deletes its files. */
export async function runningDaemon(options: DaemonOptions = {}): Promise<RunningDaemon> {
  const daemon = new RunningDaemon(options);
  try {
    await daemon.start();
  } catch (error) {
    rmSync(daemon.directory, { recursive: true, force: true });
    throw error;
  }
  return daemon;
}
