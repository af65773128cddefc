// The images that the next message will have: chosen, pasted or dropped, and scaled if they are large.

import { button, byId, element, formatBytes, showFailure, showProgress } from "./elements.js";

const IMAGES_MAX = 8;
export const IMAGE_BYTES_MAX = 4_000_000; // of one image: eight of them fit into a request
export const SIDE_MAX = 2048; // pixels of a scaled image; models see fewer
const SIDE_SENT_MAX = 4096; // pixels of an image that is sent as it is
const PIXELS_MAX = 100_000_000; // of an image that is scaled: it takes four bytes of memory for each
const SENT = new Set(["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"]);
const QUALITY = 0.9;

// Returns the size of an image in which neither side is longer than `sideMax`.
export function scaledSize({ width, height }, sideMax) {
  const factor = Math.min(1, sideMax / Math.max(width, height));
  return { width: Math.max(1, Math.round(width * factor)), height: Math.max(1, Math.round(height * factor)) };
}

// Returns an image as it is sent, `{name, blob, note}`. The note says how it was changed, if it was.
export async function prepare(file, name) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file); // turned as its camera was held
  } catch {
    throw new Error(`${name} cannot be read as an image by this browser.`);
  }
  try {
    const { width, height } = bitmap;
    if (width * height > PIXELS_MAX) throw new Error(`${name} has too many pixels (${width} × ${height}).`);
    const isSmall = file.size <= IMAGE_BYTES_MAX && Math.max(width, height) <= SIDE_SENT_MAX;
    if (isSmall && SENT.has(file.type)) return { name, blob: file, note: "" };
    const size = isSmall ? { width, height } : scaledSize(bitmap, SIDE_MAX);
    const blob = await drawn(bitmap, size);
    if (blob.size > IMAGE_BYTES_MAX) throw new Error(`${name} is too large, even when it is scaled.`);
    const done = isSmall ? "was converted to JPEG" : `was scaled to ${size.width} × ${size.height} pixels`;
    return { name, blob, note: `${name} ${done} (${formatBytes(blob.size)}).` };
  } finally {
    bitmap.close();
  }
}

async function drawn(bitmap, { width, height }) {
  const canvas = element("canvas", { width, height });
  const context = canvas.getContext("2d");
  context.fillStyle = "#ffffff"; // behind transparent parts, which JPEG does not have
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0, width, height);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", QUALITY));
  if (blob === null) throw new Error("This browser cannot scale the image: make it smaller first.");
  return blob;
}

export class Attachments {
  // `reason()` returns why the model cannot read images; "" if it can.
  constructor(reason) {
    this.reason = reason;
    this.images = [];
    this.pasted = 0;
    this.pending = 0; // the files that are not read yet, one after the other
    this.reading = Promise.resolve();
    const field = byId("image-files");
    byId("attach").onclick = () => (this.reason() ? this.refuse() : field.click());
    field.onchange = () => { this.add([...field.files]); field.value = ""; byId("prompt").focus(); };
    byId("prompt").addEventListener("paste", (event) => this.paste(event));
    const main = document.querySelector("main");
    for (const kind of ["dragenter", "dragover"]) document.addEventListener(kind, (event) => this.drag(event, main));
    document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) main.classList.remove("dropping"); });
    document.addEventListener("drop", (event) => this.drop(event, main));
  }

  // Shows whether images can be attached. The button stays in the order of the keyboard, so that its
  // reason can be read.
  showState() {
    const reason = this.reason();
    byId("attach").setAttribute("aria-disabled", String(reason !== ""));
    byId("attach").title = reason || "Attach images";
    byId("attach").setAttribute("aria-description", reason);
  }

  refuse() { showFailure(new Error(this.reason())); }

  paste(event) {
    const files = imagesIn(event.clipboardData);
    if (!files.length || event.clipboardData.getData("text/plain")) return; // as text, from a text program
    event.preventDefault();
    this.add(files, () => `Pasted image ${this.pasted += 1}`);
  }

  // A file that is dropped beside the messages would replace the page.
  drag(event, main) {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    main.classList.toggle("dropping", !this.reason());
  }

  drop(event, main) {
    main.classList.remove("dropping");
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    const files = imagesIn(event.dataTransfer);
    if (files.length) this.add(files);
    else showFailure(new Error("Only images can be attached."));
  }

  add(files, nameOf = (file) => file.name || "Image") {
    if (this.reason()) return this.refuse();
    const named = files.map((file) => [file, nameOf(file)]);
    this.pending += named.length;
    this.reading = this.reading.then(() => this.read(named)).finally(() => { this.pending -= named.length; });
  }

  get isEmpty() { return this.images.length === 0 && this.pending === 0; }

  async read(named) {
    const notes = [];
    for (const [file, name] of named) {
      if (this.images.length >= IMAGES_MAX) {
        showFailure(new Error(`A message has at most ${IMAGES_MAX} images.`));
        break;
      }
      try {
        const image = await prepare(file, name);
        if (image.note) notes.push(image.note);
        this.images.push({ ...image, url: URL.createObjectURL(image.blob) });
        this.show();
      } catch (error) {
        showFailure(error);
      }
    }
    if (notes.length) showProgress(notes.join(" "));
  }

  // Returns the images of the next message, once all are read, and forgets them.
  async take() {
    await this.reading;
    const taken = this.images.map(({ name, blob }) => ({ name, blob }));
    this.clear();
    return taken;
  }

  // Takes images back that were not sent.
  restore(images) {
    this.clear();
    this.images = images.map(({ name, blob }) => ({ name, blob, url: URL.createObjectURL(blob) }));
    this.show();
  }

  clear() {
    for (const { url } of this.images) URL.revokeObjectURL(url);
    this.images = [];
    this.show();
  }

  remove(index) {
    URL.revokeObjectURL(this.images[index].url);
    this.images.splice(index, 1);
    this.show();
    const rest = byId("attachments").querySelectorAll("button");
    (rest[Math.min(index, rest.length - 1)] ?? byId("attach")).focus();
  }

  show() {
    byId("attachments").replaceChildren(...this.images.map(({ name, url }, index) => element("li", {},
      element("img", { src: url, alt: name, title: name }),
      button("×", () => this.remove(index), { className: "small", "aria-label": `Remove ${name}`, title: "Remove" }))));
  }
}

const imagesIn = (data) => [...data?.files ?? []].filter((file) => file.type.startsWith("image/"));
