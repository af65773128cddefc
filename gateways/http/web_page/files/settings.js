// The choices of the user: model, priority and parameters. They and the chats' names stay in this
// browser; the chats themselves are the daemon's.

import { byId, element } from "./elements.js";

const NAMES = "inferd-names";
const CHOICES = "inferd-choices";
const PRIORITIES = ["low", "normal", "high", "urgent"];
const NUMBERS = { temperature: "temperature", "max-tokens": "max_tokens", "top-p": "top_p", seed: "seed" };
const TITLE_LENGTH = 60;
const NAMES_MAX = 500;

// Returns the texts of an entry. A damaged entry is replaced, because nothing could read it later.
function read(name) {
  try {
    const value = JSON.parse(localStorage.getItem(name) ?? "{}");
    if (Object.getPrototypeOf(value) !== Object.prototype) throw new TypeError("not an object");
    return Object.fromEntries(Object.entries(value).filter(([, text]) => typeof text === "string"));
  } catch {
    write(name, {});
    return {};
  }
}

// A browser whose storage is full forgets the choices; chats do not depend on them.
function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch (error) {
    console.warn(`${name} was not stored: ${error.message}`);
  }
}

export class Settings {
  constructor() {
    const choices = read(CHOICES);
    for (const id of ["system", ...Object.keys(NUMBERS)]) byId(id).value = choices[id] ?? "";
    this.wanted = { model: choices.model, priority: choices.priority ?? "normal" };
    this.offered = [];
    this.preferred = null;
    this.chatModel = null; // the open chat's, which may not be offered
    byId("composer").addEventListener("change", () => this.store());
    byId("model").addEventListener("change", () => { this.wanted.model = byId("model").value; this.store(); });
  }

  store() {
    this.wanted.priority = byId("priority").value;
    const choices = { ...this.wanted };
    for (const id of ["system", ...Object.keys(NUMBERS)]) choices[id] = byId(id).value;
    write(CHOICES, choices);
  }

  // Offers the priorities up to the caller's highest.
  setCaller(caller) {
    const allowed = PRIORITIES.slice(0, PRIORITIES.indexOf(caller.priority_max) + 1);
    byId("priority").replaceChildren(...allowed.map((name) => element("option", { textContent: name })));
    byId("priority").value = allowed.includes(this.wanted.priority) ? this.wanted.priority : "normal";
  }

  setModels({ data, preferred }) {
    this.offered = data.filter((model) => model.offered && model.generates !== false).map((model) => model.id);
    this.preferred = preferred;
    this.showModels();
  }

  // Offers the models. The model used last is selected, else the one that the gateway prefers.
  showModels() {
    const place = byId("model");
    const names = [...new Set([...this.offered, this.chatModel].filter(Boolean))];
    const current = [...place.options].map((option) => option.value);
    if (current.join("\n") === names.join("\n")) return;
    const candidates = [place.value, this.chatModel, this.wanted.model, this.preferred, names[0]];
    place.replaceChildren(...names.map((name) => element("option", { textContent: name })));
    place.value = candidates.find((name) => names.includes(name)) ?? "";
  }

  // Selects the model of the open chat; null: a new chat.
  setChatModel(name) {
    this.chatModel = name;
    this.showModels();
    if (name) byId("model").value = name;
  }

  noteUse() {
    this.wanted.model = byId("model").value;
    this.store();
  }

  forSession() {
    const system = byId("system").value.trim();
    return { model: byId("model").value, priority: byId("priority").value, ...(system && { system }) };
  }

  forTurn() {
    const fields = { model: byId("model").value, priority: byId("priority").value };
    for (const [id, field] of Object.entries(NUMBERS)) {
      if (byId(id).value !== "") fields[field] = Number(byId(id).value);
    }
    return fields;
  }

  nameChat(id, text) {
    const names = Object.entries(read(NAMES)).slice(-NAMES_MAX);
    write(NAMES, { ...Object.fromEntries(names), [id]: text.replace(/\s+/g, " ").slice(0, TITLE_LENGTH) });
  }

  nameOf(id) { return read(NAMES)[id] ?? "Chat"; }
}
