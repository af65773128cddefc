// Checks of Anthropic's client for JavaScript: messages, streams, tools, schemas, counts, models.
import Anthropic from "@anthropic-ai/sdk"
import { KEY, MODEL, QUESTION, URL, runChecks } from "./checks.mjs"

const client = new Anthropic({ baseURL: URL, apiKey: KEY, maxRetries: 0 })
const messages = [{ role: "user", content: QUESTION }]
const common = { model: MODEL, max_tokens: 100, temperature: 0 }
const schema = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
}

await runChecks({
  message: async () => (await client.messages.create({ ...common, messages })).content[0].text,
  "streamed message": async () => client.messages.stream({ ...common, messages }).finalText(),
  "required call of a tool, its result, and the answer": async () => {
    const tools = [{ name: "weather", description: "Return the weather.", input_schema: schema }]
    const question = { role: "user", content: "How is the weather in Rome?" }
    const asked = await client.messages.create({
      ...common,
      messages: [question],
      tools,
      tool_choice: { type: "any" },
    })
    const call = asked.content.find((block) => block.type === "tool_use")
    const content = `sunny in ${call.input.city}`
    const result = { type: "tool_result", tool_use_id: call.id, content }
    const answer = await client.messages.create({
      ...common,
      messages: [question, asked, { role: "user", content: [result] }].map(
        ({ role, content }) => ({ role, content }),
      ),
      tools,
    })
    return `${content} → ${answer.content[0].text}`
  },
  "structured output": async () => {
    const format = { type: "json_schema", schema: { ...schema, additionalProperties: false } }
    const content = "Paris is in France."
    const done = await client.messages.create({
      ...common,
      messages: [{ role: "user", content }],
      output_config: { format },
    })
    return JSON.stringify(JSON.parse(done.content[0].text))
  },
  "count of tokens": async () => {
    const counted = await client.messages.countTokens({ model: MODEL, messages })
    return `${counted.input_tokens} tokens`
  },
  models: async () => (await client.models.list()).data.map((model) => model.id),
})
