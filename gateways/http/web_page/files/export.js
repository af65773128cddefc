// Chats as files: Markdown for people, JSON for programs.

import { element } from "./elements.js";
import { dataUri, imagesOf } from "./images.js";
import { api } from "./server.js";
import { textOf } from "./texts.js";

const AUTHORS = { user: "You", assistant: "Answer", system: "System prompt", tool: "Tool" };
const NAME_LENGTH = 60;

// Returns a chat as Markdown. Texts stay as they are, because answers are Markdown themselves.
export function asMarkdown(session) {
  const parts = session.messages.map(({ role, content, reasoning_content: reasoning }) => {
    const thoughts = reasoning ? `${reasoning.replace(/^/gm, "> ")}\n\n` : "";
    const images = imagesOf(content).map(({ alt }) => `(Image${alt ? `: ${alt}` : ""})\n\n`).join("");
    return `## ${AUTHORS[role] ?? role}\n\n${thoughts}${images}${textOf(content)}\n`;
  });
  return `# ${session.title || "Chat"}\n\nModel: ${session.model}\n\n${parts.join("\n")}`;
}

// Returns a chat as JSON: its messages have OpenAI's form, so that programs can send them again.
export async function asJson(session) {
  const { id, title, model, priority, options } = session;
  const messages = await Promise.all(session.messages.map((message) => withImages(id, message)));
  return `${JSON.stringify({ id, title, model, priority, options: options ?? {}, messages }, null, 2)}\n`;
}

async function withImages(session, message) {
  if (!imagesOf(message.content).length) return message;
  const content = await Promise.all(message.content.map(async (part) => (part.type !== "image" ? part
    : { type: "image_url", image_url: { url: await dataUri(await api.media(session, part.sha256)) } })));
  return { ...message, content };
}

// Returns the name of a chat's file. Characters that file systems refuse become hyphens.
export function fileName(title, suffix) {
  const name = (title || "chat").normalize("NFC").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "");
  return `${[...name].slice(0, NAME_LENGTH).join("") || "chat"}.${suffix}`;
}

export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = element("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url)); // the download has begun by then
}
