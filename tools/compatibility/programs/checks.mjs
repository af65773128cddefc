// The checks of one program: each prints a line of JSON with its output or its error.
export const URL = process.env.GATEWAY_URL
export const MODEL = process.env.GATEWAY_MODEL
export const IMAGE_MODEL = process.env.GATEWAY_IMAGE_MODEL
// A PNG file of one pixel, in base64.
export const IMAGE =
  "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
export const KEY = "none"
export const QUESTION = "What is the capital of France? Answer in one sentence."
const TEXT_MAX = 300

export async function runChecks(checks) {
  for (const [name, check] of Object.entries(checks)) {
    const line = { check: name }
    try {
      line.output = String(await check()).slice(0, TEXT_MAX)
      if (!line.output.trim()) throw new Error("there is no output")
    } catch (error) {
      line.error = `${error.name}: ${error.message}`.slice(0, TEXT_MAX)
    }
    console.log(JSON.stringify(line))
  }
}
