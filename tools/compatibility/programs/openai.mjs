// Checks of OpenAI's client for JavaScript: chats, streams, tools, schemas, responses, embeddings.
import OpenAI from "openai"
import { zodResponseFormat } from "openai/helpers/zod"
import { z } from "zod"
import { KEY, MODEL, QUESTION, URL, runChecks } from "./checks.mjs"

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY, maxRetries: 0 })
const common = { model: MODEL, temperature: 0, max_completion_tokens: 200 }
const messages = [{ role: "user", content: QUESTION }]
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
}

await runChecks({
  chat: async () => {
    const done = await client.chat.completions.create({ ...common, messages })
    return done.choices[0].message.content
  },
  "streamed chat, with its usage": async () => {
    const stream = await client.chat.completions.create({
      ...common,
      messages,
      stream: true,
      stream_options: { include_usage: true },
    })
    let text = ""
    let tokens = 0
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? ""
      tokens = chunk.usage?.completion_tokens ?? tokens
    }
    return `${text} (${tokens} tokens)`
  },
  "tools, run by the client (`runTools`)": async () => {
    const weather = ({ city }) => `sunny in ${city}`
    const tool = { function: weather, parse: JSON.parse, name: "weather", parameters }
    const run = client.chat.completions.runTools({
      ...common,
      messages: [{ role: "user", content: "How is the weather in Rome?" }],
      tools: [{ type: "function", function: { ...tool, description: "Return the weather." } }],
      tool_choice: { type: "function", function: { name: "weather" } },
    })
    return run.finalFunctionToolCallResult()
  },
  "structured output by a zod schema": async () => {
    const City = z.object({ name: z.string(), country: z.string() })
    const done = await client.chat.completions.parse({
      ...common,
      messages: [{ role: "user", content: "Paris is in France." }],
      response_format: zodResponseFormat(City, "city"),
    })
    return JSON.stringify(done.choices[0].message.parsed)
  },
  "response, and one that continues it": async () => {
    const own = { model: MODEL, temperature: 0, max_output_tokens: 60 }
    const first = await client.responses.create({ ...own, input: QUESTION })
    const input = "And of Italy?"
    const second = await client.responses.create({ ...own, input, previous_response_id: first.id })
    return `${first.output_text} → ${second.output_text}`
  },
  "streamed response": async () => {
    const stream = client.responses.stream({ model: MODEL, temperature: 0, input: QUESTION })
    return (await stream.finalResponse()).output_text
  },
  embeddings: async () => {
    const found = await client.embeddings.create({ model: MODEL, input: ["one", "two"] })
    return `${found.data.length} vectors of ${found.data[0].embedding.length} numbers`
  },
})
