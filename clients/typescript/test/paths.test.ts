import assert from "node:assert/strict";
import { once } from "node:events";
import { chmodSync, chownSync, existsSync, mkdirSync, rmSync, symlinkSync } from "node:fs";
import { createServer } from "node:net";
import { after, afterEach, before, test } from "node:test";

import { Client, ConnectionLost, PermissionDenied, socketPath } from "../src/index.js";
import { runningDaemon } from "../src/testing.js";
import { echoModel } from "./support.js";
import type { RunningDaemon } from "../src/testing.js";

/** A user without a name, whose private folder no other process's tests have, and another one. */
const OWN = 200_000 + process.pid;
const SQUATTER = 99_999;
const FOLDER = `/tmp/inferd-${OWN}`;
const SOCKET = `${FOLDER}/inferd.sock`;
const SYSTEM_SOCKET = "/run/inferd/inferd.sock";
const isInstalled = existsSync("/run/inferd");
let daemon: RunningDaemon;

before(async () => {
  daemon = await runningDaemon({ config: `[daemon]\nsocket-mode = "0666"\n${echoModel("echo")}` });
  chmodSync(daemon.directory, 0o711);
});

after(async () => {
  await daemon[Symbol.asyncDispose]();
});

afterEach(() => {
  rmSync(FOLDER, { recursive: true, force: true });
});

/** Run as `OWN`; only root can do this. */
async function asOwn<T>(action: () => T | Promise<T>): Promise<T> {
  process.setegid!(OWN);
  process.seteuid!(OWN);
  try {
    return await action();
  } finally {
    process.seteuid!(0);
    process.setegid!(0);
  }
}

function makeFolder(owner: number, mode = 0o700): void {
  mkdirSync(FOLDER);
  chownSync(FOLDER, owner, owner);
  chmodSync(FOLDER, mode);
}

async function assertRefused(message: RegExp): Promise<void> {
  await assert.rejects(
    asOwn(async () => await Client.connect({ path: SOCKET })),
    (error) => error instanceof PermissionDenied && message.test(error.message),
  );
}

test("the socket is that of the environment", () => {
  assert.equal(socketPath({ INFERD_SOCKET: "/a", XDG_RUNTIME_DIR: "/b" }), "/a");
  const runtime = "/none/inferd/inferd.sock";
  assert.equal(socketPath({ XDG_RUNTIME_DIR: "/none" }), existsSync(SYSTEM_SOCKET) ? SYSTEM_SOCKET : runtime);
});

test("a user without a runtime folder has a socket in a private folder", { skip: isInstalled }, async () => {
  assert.equal(await asOwn(() => socketPath({})), SOCKET);
  makeFolder(OWN);
  symlinkSync(daemon.socket, SOCKET);
  assert.equal(await asOwn(() => socketPath({ XDG_RUNTIME_DIR: "/none" })), SOCKET);
  const answer = await asOwn(async () => {
    await using client = await Client.connect({ path: socketPath({}) });
    await using session = await client.session("echo");
    return (await session.chat("hello")).text;
  });
  assert.equal(answer, "hello");
});

test("a folder of another user gets no connection", async () => {
  makeFolder(SQUATTER, 0o755);
  const squatter = createServer().listen(SOCKET);
  await once(squatter, "listening");
  chmodSync(SOCKET, 0o666);
  let connected = false;
  squatter.on("connection", () => (connected = true));
  try {
    await assertRefused(/belongs to user 99999/);
    assert.equal(connected, false);
    const own = await asOwn(() => socketPath({ XDG_RUNTIME_DIR: "/none" }));
    assert.notEqual(own, SOCKET);
  } finally {
    squatter.close();
  }
});

test("a folder that others can change, and a link, are refused", async () => {
  makeFolder(OWN, 0o711);
  symlinkSync(daemon.socket, SOCKET);
  await assertRefused(/open to other users \(mode 0711\)/);
  rmSync(FOLDER, { recursive: true });
  symlinkSync(daemon.directory, FOLDER);
  await assertRefused(/is not a folder/);
});

test("without the folder no daemon answers", async () => {
  await assert.rejects(
    asOwn(async () => await Client.connect({ path: SOCKET })),
    (error) => error instanceof ConnectionLost && /ENOENT/.test(error.message),
  );
});
