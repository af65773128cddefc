import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { pathToFileURL } from "node:url";

import { audio, Client, image, InvalidArgument, LIMITS, TooLarge, UnsupportedOperation } from "../src/index.js";
import { messagesOf, withContents } from "../src/parts.js";
import { runningDaemon } from "../src/testing.js";
import { echoModel } from "./support.js";
import type { RunningDaemon } from "../src/testing.js";
import type { Message } from "../src/types.js";

/** An image of one pixel. */
const PNG = Buffer.from(
  "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de" +
    "0000000c49444154789c63f8cfc0000003010100c9fe92ef0000000049454e44ae426082",
  "hex",
);
const SHA256 = createHash("sha256").update(PNG).digest("hex");
const folder = mkdtempSync(join(tmpdir(), "inferd-parts-"));
const path = join(folder, "a picture.png");
let daemon: RunningDaemon;
let client: Client;

before(async () => {
  writeFileSync(path, PNG);
  daemon = await runningDaemon({ config: echoModel("eyes", { media: true }) + echoModel("blind") });
  client = await Client.connect({ path: daemon.socket });
});

after(async () => {
  await client.close();
  await daemon[Symbol.asyncDispose]();
  rmSync(folder, { recursive: true });
});

test("a list of texts and parts is one message", () => {
  const picture = image(PNG);
  assert.deepEqual(messagesOf(["What?", picture]), [
    { role: "user", content: [{ type: "text", text: "What?" }, picture] },
  ]);
  const messages: Message[] = [{ role: "user", content: "What?" }];
  assert.equal(messagesOf(messages), messages);
});

test("files are read when their message is sent", async () => {
  const params = {
    context: 1n,
    messages: [
      { role: "system", content: "Be brief." },
      { role: "user", content: [{ type: "text", text: "What?" }, image(path), image(pathToFileURL(path)), audio(PNG)] },
    ],
  };
  const read = await withContents(params);
  assert.deepEqual(read, {
    ...params,
    messages: [
      params.messages[0],
      { role: "user", content: [{ type: "text", text: "What?" }, image(PNG), image(PNG), audio(PNG)] },
    ],
  });
  assert.equal(typeof image(path).data, "string");
  const plain = { prompt: "What?" };
  assert.equal(await withContents(plain), plain);
});

test("a file that cannot be sent is refused with its number", async () => {
  const large = join(folder, "large.png");
  writeFileSync(large, Buffer.alloc(LIMITS.FRAME_BYTES_MAX + 1));
  for (const [file, kind] of [
    [join(folder, "none.png"), InvalidArgument],
    [folder, InvalidArgument],
    [large, TooLarge],
  ] as const) {
    const content = [image(PNG), image(file)];
    await assert.rejects(withContents({ messages: [{ role: "user", content }] }), (error: unknown) => {
      assert.ok(error instanceof kind);
      assert.equal(error.data.item, 1);
      return true;
    });
  }
});

test("a turn answers an image, and the history has it", async () => {
  await using session = await client.session("eyes");
  const { text, metadata } = await session.chat(["What is this?", image(path, { tokensMax: 70, alt: "a dot" })]);
  assert.ok(text.includes("What is this?"));
  assert.ok((metadata.media_tokens ?? 0) > 0);
  const { messages } = await session.history();
  assert.deepEqual((messages[0]?.["content"] as unknown[])[1], {
    type: "image",
    sha256: SHA256,
    bytes: PNG.length,
    media_type: "image/png",
    tokens_max: 70,
    alt: "a dot",
  });
  assert.deepEqual(Buffer.from(await session.media(SHA256)), PNG);
  const answers = await session.answers([image(PNG), "Again?"], 2);
  assert.deepEqual(
    answers.map(({ error }) => error),
    [undefined, undefined],
  );
});

test("a refused image has its number", async () => {
  for (const [model, content, kind] of [
    ["blind", PNG, UnsupportedOperation],
    ["eyes", Buffer.from("no image"), InvalidArgument],
  ] as const) {
    await assert.rejects(client.chat(model, ["What?", image(content)]), (error: unknown) => {
      assert.ok(error instanceof kind);
      assert.equal(error.data.item, 0);
      return true;
    });
  }
});
