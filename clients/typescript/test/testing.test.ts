import assert from "node:assert/strict";
import { existsSync } from "node:fs";
import { test } from "node:test";

import { Client } from "../src/index.js";
import { runningDaemon } from "../src/testing.js";

test(
  "a daemon of a test starts again on its files, and leaves nothing behind",
  { timeout: 60_000 },
  async () => {
    const daemon = await runningDaemon();
    await using client = await Client.connect({ path: daemon.socket, reconnect: true });
    const { pid } = daemon;
    assert.equal(client.server.instance, 1);
    assert.equal(await daemon.stop(), 0);
    assert.equal(await daemon.stop(), 0);
    await daemon.start();
    await client.call("queue");
    assert.deepEqual([client.server.instance, daemon.pid === pid], [2, false]);
    assert.match(daemon.log, /daemon/);
    await daemon.kill();
    await daemon[Symbol.asyncDispose]();
    assert.equal(existsSync(daemon.directory), false);
  },
);

test("a daemon that does not start is an error with its log", { timeout: 60_000 }, async () => {
  await assert.rejects(runningDaemon({ config: "colour = 1" }), /did not start:[^]*colour/);
  await assert.rejects(runningDaemon({ command: ["/none/inferd"] }), { name: "NotFound" });
});
