/** Types of the client, which `tsc` checks; it is not run. */

import { audio, Client, image } from "../src/index.js";
import type { Context, Graph, Metadata, ModelInfo, ShownModel } from "../src/index.js";

export async function checkTypes(client: Client): Promise<void> {
  const { graph } = await client.call("load_by_name", { name: "echo" });
  const { context }: { context: Context } = await client.call("init_execution_context", {
    graph,
    priority: undefined,
  });
  const models: ModelInfo[] = (await client.call("models")).models;
  const shown: ShownModel[] = (await client.call("show", { name: "echo" })).models;
  const { metadata }: { metadata: Metadata } = await client.call("chat", {
    context,
    prompt: "x",
    options: { temp: 0, stop: ["a"] },
  });
  await client.call(
    "set_input",
    { context, index: 0, tensor: { data: new Uint8Array() } },
    { timeoutMs: 10 },
  );
  await client.call("load", {}, { onEvent: ({ progress }) => progress.toFixed() });
  const seed: number | undefined = metadata.seed;

  await client.chat("echo", ["What is this?", image("a.png", { detail: "low" }), audio(new Uint8Array())]);
  await client.chat("echo", [{ role: "user", content: [{ type: "image", data: new URL("file:///a.png") }] }]);
  // @ts-expect-error: another level of detail
  image("a.png", { detail: "most" });
  // @ts-expect-error: a number is no content
  audio(5);
  // @ts-expect-error: a graph is not a context
  await client.call("get_output", { context: graph });
  // @ts-expect-error: a number is not a handle
  await client.call("unload", { graph: 5 });
  // @ts-expect-error: a required field is missing
  await client.call("load_by_name");
  // @ts-expect-error: an unknown call
  await client.call("sing");
  // @ts-expect-error: an unknown field
  await client.call("queue", { everybody: true });
  // @ts-expect-error: an unknown parameter
  await client.chat("echo", "x", { options: { colour: 1 } });
  // @ts-expect-error: a parameter of another type
  await client.chat("echo", "x", { options: { "n-predict": "5" } });
  // @ts-expect-error: not one of the values
  await client.chat("echo", "x", { options: { "reasoning-format": "aloud" } });
  // @ts-expect-error: an unknown class
  await client.session("echo", { priority: "highest" });
  // @ts-expect-error: a call without events
  await client.call("queue", {}, { onEvent: (event) => event.position });
  // @ts-expect-error: handles are made by the daemon only
  const handle: Graph = 5n;
  void [models, shown, seed, handle];
}
