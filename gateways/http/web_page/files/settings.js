// The choices of the user: model, system prompt, parameters and priority. Those of an open chat are
// stored with it in the daemon; those for the next new chat stay in this browser.

import { byId, element, showFailure } from "./elements.js";
import { schemaFailure } from "./schema.js";
import { api } from "./server.js";
import { read, write } from "./entries.js";
import { textOf } from "./texts.js";

const CHOICES = "inferd-choices";
const PRIORITIES = ["low", "normal", "high", "urgent"];
// The parameter that each field sets.
const PARAMETERS = { temperature: "temp", "max-tokens": "n-predict", "top-p": "top-p", seed: "seed", schema: "json-schema" };
const FIELDS = ["system", ...Object.keys(PARAMETERS)];
const OTHER_MODEL = "This is a new chat, because a chat stays with its model. The other one is in the list.";
const OTHER_SYSTEM = "This is a new chat, because a system prompt belongs to the beginning. The other one is in the list.";

// Returns the value of a parameter from the text of its field; null: not set.
export function valueOf(id, text) {
  if (text.trim() === "") return null;
  return id === "schema" ? JSON.parse(text) : Number(text);
}

// Returns the text of a field from the value of its parameter.
export function fieldText(id, value) {
  if (value === null || value === undefined) return "";
  return id === "schema" ? JSON.stringify(value, null, 2) : String(value);
}

export class Settings {
  // `onOther(note)` begins a new chat when a choice cannot belong to the open one.
  constructor(onOther) {
    this.onOther = onOther;
    this.chat = null; // the open chat
    this.changed = new Set(); // the fields of the open chat that the daemon does not have yet
    this.offered = [];
    this.readers = new Set(); // the models that read images
    this.preferred = null;
    this.wanted = { model: read(CHOICES).model };
    this.showDefaults();
    byId("composer").addEventListener("change", (event) => this.note(event.target.id));
    byId("schema").addEventListener("input", () => this.checkSchema());
    byId("model").addEventListener("change", () => this.chooseModel());
    for (const id of FIELDS) byId(id).addEventListener("invalid", () => { byId("options").open = true; });
  }

  showDefaults() {
    const choices = read(CHOICES);
    for (const id of FIELDS) byId(id).value = choices[id] ?? "";
    this.showPriority(choices.priority ?? "normal");
    this.checkSchema();
  }

  note(id) {
    if (![...FIELDS, "priority"].includes(id) || !byId(id).checkValidity()) return;
    if (this.chat === null) return this.store();
    if (id === "system") return this.onOther(OTHER_SYSTEM);
    this.changed.add(id);
    this.save().catch(showFailure);
  }

  chooseModel() {
    this.wanted.model = byId("model").value;
    write(CHOICES, { ...read(CHOICES), model: this.wanted.model });
    if (this.chat !== null && this.chat.model !== byId("model").value) this.onOther(OTHER_MODEL);
  }

  store() {
    const choices = { priority: byId("priority").value };
    if (this.wanted.model) choices.model = this.wanted.model;
    for (const id of FIELDS) choices[id] = byId(id).value;
    write(CHOICES, choices);
  }

  // Sends the changed fields of the open chat to the daemon.
  async save() {
    const sent = [...this.changed];
    if (this.chat === null || !sent.length) return;
    this.changed.clear();
    const fields = Object.fromEntries(sent.map((id) => {
      const text = byId(id).value;
      return id === "priority" ? [id, text] : [PARAMETERS[id], valueOf(id, text)];
    }));
    try {
      await api.update(this.chat.id, fields);
    } catch (error) {
      for (const id of sent) this.changed.add(id);
      throw error;
    }
  }

  checkSchema() {
    const failure = schemaFailure(byId("schema").value);
    byId("schema").setCustomValidity(failure);
    byId("schema").setAttribute("aria-invalid", String(failure !== ""));
    byId("schema-failure").textContent = failure;
  }

  // Offers the priorities up to the caller's highest.
  setCaller(caller) {
    const allowed = PRIORITIES.slice(0, PRIORITIES.indexOf(caller.priority_max) + 1);
    byId("priority").replaceChildren(...allowed.map((name) => element("option", { textContent: name })));
    this.showPriority(read(CHOICES).priority ?? "normal");
  }

  showPriority(name) {
    byId("priority").value = name;
    if (!byId("priority").value) byId("priority").value = "normal"; // the caller may not use it
  }

  setModels({ data, preferred }) {
    this.offered = data.filter((model) => model.offered && model.generates !== false).map((model) => model.id);
    this.preferred = preferred;
    this.readers = new Set(data.filter((model) => model.reads?.includes("image")).map((model) => model.id));
    this.showModels();
  }

  // Returns why the chosen model cannot read images; "" if it can.
  whyNoImages() {
    const model = byId("model").value;
    if (!model) return "There is no model that reads images yet.";
    return this.readers.has(model) ? "" : `The model ${model} does not read images.`;
  }

  // Offers the models. The model used last is selected, else the one that the gateway prefers. The
  // open chat's may not be offered.
  showModels() {
    const place = byId("model");
    const own = this.chat?.model;
    const names = [...new Set([...this.offered, own].filter(Boolean))];
    const current = [...place.options].map((option) => option.value);
    if (current.join("\n") === names.join("\n")) return;
    const candidates = [place.value, own, this.wanted.model, this.preferred, names[0]];
    place.replaceChildren(...names.map((name) => element("option", { textContent: name })));
    place.value = candidates.find((name) => names.includes(name)) ?? "";
  }

  // Shows the settings of a chat; null: of a new one. With `keeps`, the fields stay as they are.
  showChat(session, keeps = false) {
    const isOther = this.chat?.id !== session?.id;
    this.chat = session;
    if (isOther) this.changed.clear();
    this.showModels();
    if (session === null) {
      if (!keeps) this.showDefaults();
      return;
    }
    byId("model").value = session.model;
    const [first] = session.messages;
    const values = { system: first?.role === "system" ? textOf(first.content) : "", priority: session.priority };
    for (const [id, name] of Object.entries(PARAMETERS)) values[id] = fieldText(id, session.options?.[name]);
    for (const id of FIELDS) this.showField(id, values[id]);
    if (!this.isEdited("priority")) this.showPriority(values.priority);
    this.checkSchema();
  }

  showField(id, text) { if (!this.isEdited(id)) byId(id).value = text; }

  // Returns whether a field has a text that the daemon does not have yet.
  isEdited(id) { return this.changed.has(id) || document.activeElement === byId(id) || !byId(id).checkValidity(); }

  // Notes a chat that was begun with the shown choices.
  adopt(session) {
    this.chat = session;
    this.wanted.model = byId("model").value;
    write(CHOICES, { ...read(CHOICES), model: this.wanted.model });
  }

  // Returns the fields of a new chat.
  forSession() {
    const fields = { model: byId("model").value, priority: byId("priority").value };
    const system = byId("system").value.trim();
    if (system) fields.system = system;
    for (const [id, name] of Object.entries(PARAMETERS)) {
      const value = valueOf(id, byId(id).value);
      if (value !== null) fields[name] = value;
    }
    return fields;
  }

  // Returns the fields of a turn. All else is the chat's.
  forTurn() { return { model: this.chat?.model ?? byId("model").value, priority: byId("priority").value }; }
}
