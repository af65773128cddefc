// Checks of Ollama's client for JavaScript: chats, streams, tools, schemas, embeddings, models.
import { Ollama } from "ollama"
import { MODEL, QUESTION, URL, runChecks } from "./checks.mjs"

const client = new Ollama({ host: URL })
const common = { model: MODEL, options: { temperature: 0, num_predict: 100 } }
const messages = [{ role: "user", content: QUESTION }]

await runChecks({
  chat: async () => (await client.chat({ ...common, messages })).message.content,
  "streamed chat": async () => {
    let text = ""
    for await (const part of await client.chat({ ...common, messages, stream: true })) {
      text += part.message.content
    }
    return text
  },
  completion: async () => (await client.generate({ ...common, prompt: QUESTION })).response,
  "structured output": async () => {
    const format = {
      type: "object",
      properties: { name: { type: "string" }, country: { type: "string" } },
      required: ["name", "country"],
    }
    const content = "Paris is in France."
    const done = await client.chat({ ...common, messages: [{ role: "user", content }], format })
    return JSON.stringify(JSON.parse(done.message.content))
  },
  embeddings: async () => {
    const found = await client.embed({ model: MODEL, input: ["one", "two"] })
    return `${found.embeddings.length} vectors of ${found.embeddings[0].length} numbers`
  },
  models: async () => {
    const model = (await client.list()).models.find((each) => each.name === MODEL)
    const shown = await client.show({ model: model.name })
    return `${model.name}: ${shown.details.parameter_size}, ${shown.capabilities}`
  },
})
