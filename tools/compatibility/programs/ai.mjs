// Checks of the AI SDK of Vercel: texts, streams, tools, objects and embeddings.
import { createOpenAI } from "@ai-sdk/openai"
import { createOpenAICompatible } from "@ai-sdk/openai-compatible"
import { Output, embedMany, generateText, stepCountIs, streamText, tool } from "ai"
import { z } from "zod"
import { IMAGE, IMAGE_MODEL, KEY, MODEL, QUESTION, URL, runChecks } from "./checks.mjs"

globalThis.AI_SDK_LOG_WARNINGS = false
const baseURL = `${URL}/v1`
const compatible = createOpenAICompatible({
  name: "gateway",
  baseURL,
  apiKey: KEY,
  supportsStructuredOutputs: true,
})
const openai = createOpenAI({ baseURL, apiKey: KEY })
const common = { temperature: 0, maxOutputTokens: 200, maxRetries: 0 }
const weather = tool({
  description: "Return the weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `sunny in ${city}`,
})

async function streamed(model) {
  const { textStream } = streamText({ ...common, model, prompt: QUESTION })
  let text = ""
  for await (const part of textStream) text += part
  return text
}

async function aboutImage(model) {
  const content = [
    { type: "text", text: "a picture" },
    { type: "image", image: Buffer.from(IMAGE, "base64") },
  ]
  const done = await generateText({ ...common, model, messages: [{ role: "user", content }] })
  return `${done.text} (${done.usage.inputTokens} tokens)`
}

await runChecks({
  "text, by chat completions": async () =>
    (await generateText({ ...common, model: compatible(MODEL), prompt: QUESTION })).text,
  "streamed text, by chat completions": () => streamed(compatible(MODEL)),
  "text, by responses": async () =>
    (await generateText({ ...common, model: openai(MODEL), prompt: QUESTION })).text,
  "streamed text, by responses": () => streamed(openai(MODEL)),
  "required call of a tool, and its result": async () => {
    const done = await generateText({
      ...common,
      model: compatible(MODEL),
      prompt: "How is the weather in Rome?",
      tools: { weather },
      toolChoice: "required",
      stopWhen: stepCountIs(1),
    })
    return done.toolResults[0].output
  },
  "structured output by a zod schema": async () => {
    const schema = z.object({ name: z.string(), country: z.string() })
    const done = await generateText({
      ...common,
      model: compatible(MODEL),
      prompt: "Paris is in France.",
      output: Output.object({ schema }),
    })
    return JSON.stringify(done.output)
  },
  "image, by chat completions": () => aboutImage(compatible(IMAGE_MODEL)),
  "image, by responses": () => aboutImage(openai(IMAGE_MODEL)),
  embeddings: async () => {
    const model = compatible.textEmbeddingModel(MODEL)
    const found = await embedMany({ model, values: ["one", "two"], maxRetries: 0 })
    return `${found.embeddings.length} vectors of ${found.embeddings[0].length} numbers`
  },
})
