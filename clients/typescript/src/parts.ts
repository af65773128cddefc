/** Images and sounds in messages. Files are read when their message is sent. */

import { readFile, stat } from "node:fs/promises";
import { basename } from "node:path";
import { fileURLToPath } from "node:url";

import { InferdError, InvalidArgument, TooLarge } from "./errors.js";
import { LIMITS } from "./generated/protocol.js";
import type { Infill } from "./generated/protocol.js";
import type { AudioPart, Fields, ImagePart, Message, Part } from "./types.js";

/**
 * What a turn answers: a text, the texts, images and sounds of one message, messages, or a place in a file, whose
 * text is filled in.
 */
export type Prompt = string | (string | Part)[] | Message[] | Infill;

/** Return whether a prompt is a place in a file. */
export function isInfill(prompt: Prompt | undefined): prompt is Infill {
  return typeof prompt === "object" && !Array.isArray(prompt);
}

export interface ImageOptions {
  /** `low` is a low bound on the tokens of the image. */
  detail?: "auto" | "low" | "high" | undefined;
  /** The most tokens that the image may take in the context; it is scaled down. */
  tokensMax?: number | undefined;
  /** Describes it for pages, and for models that read no images. */
  alt?: string | undefined;
}

/** Return the part of a message with an image: the path of its file, or the file's bytes. */
export function image(source: string | URL | Uint8Array, options: ImageOptions = {}): ImagePart {
  const { detail, tokensMax, alt } = options;
  return { type: "image", data: source, detail, tokens_max: tokensMax, alt };
}

/** Return the part of a message with a sound: the path of its file, or the file's bytes. */
export function audio(source: string | URL | Uint8Array, options: { alt?: string | undefined } = {}): AudioPart {
  return { type: "audio", data: source, alt: options.alt };
}

/** Return the messages of a prompt that is not a text. */
export function messagesOf(prompt: Exclude<Prompt, string | Infill>): Message[] {
  if (!prompt.some((item) => typeof item === "string" || !("role" in item))) return prompt as Message[];
  const content = (prompt as (string | Part)[]).map((item): Part =>
    typeof item === "string" ? { type: "text", text: item } : item,
  );
  return [{ role: "user", content }];
}

/** Return the params of a call with the bytes of the files that its messages name. */
export async function withContents(params: Fields): Promise<Fields> {
  const messages = params["messages"];
  if (!Array.isArray(messages) || !messages.some(hasFile)) return params;
  let item = -1;
  const read: Message[] = [];
  for (const message of messages as Message[]) {
    if (!Array.isArray(message.content)) {
      read.push(message);
      continue;
    }
    const content: Part[] = [];
    for (const part of message.content) {
      if (part.type !== "text") item += 1;
      content.push(isFile(part) ? { ...part, data: await readContent(part.data, item) } : part);
    }
    read.push({ ...message, content });
  }
  return { ...params, messages: read };
}

function hasFile(message: unknown): boolean {
  const content = (message as Message | null)?.content;
  return Array.isArray(content) && content.some(isFile);
}

function isFile(part: Part): part is (ImagePart | AudioPart) & { data: string | URL } {
  return part.type !== "text" && (typeof part.data === "string" || part.data instanceof URL);
}

async function readContent(source: string | URL, item: number): Promise<Uint8Array> {
  const path = source instanceof URL ? fileURLToPath(source) : source;
  try {
    // Not a directory, which fails below, nor a pipe, whose size is unknown.
    const { size } = await stat(path);
    if (size > LIMITS.FRAME_BYTES_MAX) {
      throw new TooLarge(`${basename(path)} has ${size} bytes; a message takes ${LIMITS.FRAME_BYTES_MAX}`, {
        hint: "send a smaller file, such as a JPEG",
        data: { item, bytes: size, frame_bytes_max: LIMITS.FRAME_BYTES_MAX },
      });
    }
    return await readFile(path);
  } catch (error) {
    if (error instanceof InferdError) throw error;
    throw new InvalidArgument(`${path} cannot be read: ${(error as NodeJS.ErrnoException).code}`, {
      hint: "check the path and its permissions",
      data: { item },
    });
  }
}
