// The images of messages: those of this tab as they were attached, the others from the daemon.

import { element } from "./elements.js";
import { api } from "./server.js";

const IMAGES_MAX = 64; // kept at once; older ones are read again
const GONE = "This image cannot be shown.";

export const imagesOf = (content) => (typeof content === "string" ? [] : (content ?? []).filter((part) => part.type === "image"));

// Returns the content of a message with images before its text, as it is shown until the daemon has it.
export const contentOf = (text, images) => (images.length
  ? [...images.map((image) => ({ type: "image", ...image })), { type: "text", text }] : text);

export class Images {
  constructor() {
    this.session = null;
    this.blobs = new Map(); // promises of blobs by their hashes
    this.urls = new Map(); // addresses of blobs by their blobs
  }

  // Forgets the images of another chat. A new chat gets its id while its first images are shown.
  open(session) {
    if (session !== this.session && this.session !== null) {
      this.blobs.clear();
      this.trim(0);
    }
    this.session = session;
  }

  // Notes the images that were sent with a message, so that they are not read from the daemon.
  adopt(content, images) {
    imagesOf(content).forEach(({ sha256, bytes }, index) => {
      const blob = images[index]?.blob;
      if (blob?.size === bytes) this.blobs.set(sha256, Promise.resolve(blob));
    });
  }

  // Returns the bytes of an image in a message.
  blob(part) {
    if (part.blob) return Promise.resolve(part.blob);
    if (!this.blobs.has(part.sha256)) {
      const blob = api.media(this.session, part.sha256);
      blob.catch(() => this.blobs.delete(part.sha256)); // it is tried again
      this.blobs.set(part.sha256, blob);
    }
    return this.blobs.get(part.sha256);
  }

  // Returns the images of a message as they are sent again.
  async attached(content) {
    return Promise.all(imagesOf(content).map(async (part, index) => (
      { name: nameOf(part, index), blob: await this.blob(part) })));
  }

  // Returns the elements of a message's images.
  shown(content) {
    return imagesOf(content).map((part, index) => {
      const place = element("img", { alt: nameOf(part, index), title: nameOf(part, index) });
      this.blob(part).then((blob) => { place.src = this.url(blob); },
        () => { place.replaceWith(element("span", { className: "note", textContent: GONE })); });
      return place;
    });
  }

  url(blob) {
    if (!this.urls.has(blob)) this.urls.set(blob, URL.createObjectURL(blob));
    this.trim(IMAGES_MAX);
    return this.urls.get(blob);
  }

  trim(size) {
    for (const [blob, url] of this.urls) {
      if (this.urls.size <= size) return;
      URL.revokeObjectURL(url); // an image that is shown stays
      this.urls.delete(blob);
    }
  }
}

const nameOf = (part, index) => part.alt || part.name || `Image ${index + 1}`;

// Returns a blob as a data URI.
export function dataUri(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("The browser cannot read the image any more: attach it again."));
    reader.readAsDataURL(blob);
  });
}

// Returns a message's content in OpenAI's form.
export async function sentContent(text, images) {
  if (!images.length) return text;
  const parts = await Promise.all(images.map(async ({ name, blob }) => (
    { type: "image_url", image_url: { url: await dataUri(blob) }, alt: name.slice(0, 200) })));
  return text ? [...parts, { type: "text", text }] : parts;
}
