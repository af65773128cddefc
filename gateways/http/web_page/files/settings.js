// The choices of the user: model, priority and parameters. They and the chats' names stay in this
// browser; the chats themselves are the daemon's.

import { byId, element } from "./elements.js";

const NAMES = "inferd-names";
const CHOICES = "inferd-choices";
const PRIORITIES = ["low", "normal", "high", "urgent"];
const NUMBERS = { temperature: "temperature", "max-tokens": "max_tokens", "top-p": "top_p", seed: "seed" };
const TITLE_LENGTH = 60;
const NAMES_MAX = 500;

const read = (name) => JSON.parse(localStorage.getItem(name) ?? "{}");
const write = (name, value) => localStorage.setItem(name, JSON.stringify(value));

export class Settings {
  constructor() {
    const choices = read(CHOICES);
    for (const id of ["system", ...Object.keys(NUMBERS)]) byId(id).value = choices[id] ?? "";
    this.wanted = { model: choices.model, priority: choices.priority ?? "normal" };
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

  setModels(models) {
    const names = models.filter((model) => model.generates !== false).map((model) => model.id);
    const place = byId("model");
    const current = [...place.options].map((option) => option.value);
    if (current.join("\n") === names.join("\n")) return;
    place.replaceChildren(...names.map((name) => element("option", { textContent: name })));
    const loaded = models.find((model) => model.state === "loaded" && names.includes(model.id));
    place.value = names.includes(this.wanted.model) ? this.wanted.model : loaded?.id ?? names[0] ?? "";
  }

  setModel(name) {
    this.wanted.model = name;
    byId("model").value = name;
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
