// The live part of the page: connection, queue, models, and the chart of tokens.

import { button, byId, clearFailure, element, formatBytes, redraw, showFailure } from "./elements.js";
import { drawQueue, placeOf } from "./queue_picture.js";
import { api } from "./server.js";

const PAUSE_MS = [1000, 2000, 5000, 10000];
const SAMPLES = 60;
const TENSORS_MAX = 100; // inputs or outputs of a graph that are shown
const SVG = "http://www.w3.org/2000/svg";

export class Activity {
  // `chatId()` returns the open chat, `onModels(list)` gets each new list of models, `onTurns(list)`
  // each new list of the user's turns. `onReturn()` is called when the daemon is back.
  constructor(caller, chatId, { onModels, onTurns, onReturn }) {
    Object.assign(this, { caller, chatId, onModels, onTurns, onReturn });
    this.turns = [];
    this.statistics = [];
    this.isAway = false;
    this.canManage = caller.rights.includes("manage");
    this.samples = [];
    this.loading = new Map(); // progress of loads that this page has begun, by model
    this.tensors = new Map(); // the inputs and outputs that are shown, by their graph
    this.choices = new Map(); // the chosen model of each swap, by the model to replace
  }

  // Follows the events for ever. After a failure it connects again, at last every 10 s.
  async follow() {
    for (let failures = 0; ; failures += 1) {
      try {
        for await (const { event, data } of api.events()) {
          failures = 0;
          if (data) this.show(event, data);
        }
      } catch (error) {
        this.setConnection(error.message, true);
        this.isAway = true;
        if (error.status === 401) return;
      }
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS[Math.min(failures, PAUSE_MS.length - 1)]));
    }
  }

  show(event, data) {
    if (event === "daemon") {
      this.setConnection(data.available ? "Connected" : "The daemon is away", !data.available);
      if (this.isAway && data.available) this.onReturn();
      this.isAway = !data.available;
    } else if (event === "models") {
      this.showModels(data.data);
      this.onModels(data);
    } else if (event === "queue") {
      const hasEnded = !this.hasUsage || data.data.length < this.turns.length;
      this.turns = data.data;
      this.showQueue();
      if (hasEnded) this.showUsage().catch(() => {}); // the state of the connection is shown elsewhere
      this.onTurns(data.data);
    } else if (event === "statistics") {
      this.statistics = data.data;
      this.showQueue();
      this.showStatistics(data.data);
    }
  }

  setConnection(text, isBad) {
    const place = byId("connection");
    if (place.textContent !== text) place.textContent = text;
    place.classList.toggle("bad", isBad);
  }

  placeOf(turn) { return placeOf(turn, this.statistics.find((each) => each.model === turn.model)); }

  showQueue() {
    byId("queue").replaceChildren(...this.turns.map((turn) => this.madeTurn(turn)));
    if (!this.turns.length) byId("queue").append(element("li", { className: "note", textContent: "Nothing is waiting." }));
    // The open chat's place is shown beside the answer too, until it is computed.
    const own = this.turns.find((turn) => this.isOwn(turn) && turn.state !== "running");
    byId("place").replaceChildren(...(own ? [drawQueue(this.placeOf(own))] : []));
  }

  isOwn(turn) { return turn.session_id !== null && turn.session_id === this.chatId(); }

  madeTurn(turn) {
    const place = turn.state === "running" ? "now" : turn.position ? `place ${turn.position}` : "waiting";
    const starts = turn.starts_in_s && turn.state !== "running" ? `, starts in ${turn.starts_in_s.toFixed(1)} s` : "";
    // Once it answers, the tokens computed are also those of the answer.
    const prompt = turn.prompt_tokens ?? "?";
    const computed = turn.output_tokens ? prompt : turn.computed_tokens ?? 0;
    return element("li", { className: this.isOwn(turn) ? "own" : "" },
      element("div", { textContent: `${this.isOwn(turn) ? "This chat" : turn.model}: ${place}${starts}` }),
      drawQueue(this.placeOf(turn)),
      element("div", { className: "note", textContent: `${turn.priority}; prompt ${computed} of ${prompt} tokens, `
        + `answer ${turn.output_tokens ?? 0}` }));
  }

  showModels(models) {
    this.models = models;
    const shown = models.filter((model) => model.offered || model.state !== "unloaded");
    redraw(byId("models"), shown.map((model) => this.madeModel(model)));
  }

  madeModel(model) {
    const progress = this.loading.get(model.id) ?? (model.state === "loading" ? model.progress : null);
    const facts = [formatBytes(model.resident_bytes ?? model.size_bytes),
      model.ctx_size && `${model.slots} × ${model.ctx_size} tokens`, model.tasks && counted(model.tasks, workOf(model)),
      model.swapped_to && `answers with ${model.swapped_to}`, model.error && `${model.error.message} (${model.error.hint})`];
    const item = element("li", {},
      element("div", { className: "name" }, element("span", { textContent: model.id }),
        element("span", { className: `state ${model.state}`, textContent: model.state })),
      element("div", { className: "note", textContent: facts.filter(Boolean).join(" · ") }));
    if (progress !== null) {
      item.append(element("progress", { max: 1, value: progress, "aria-label": `Loading ${model.id}` }));
    }
    if (model.graph) item.append(this.madeTensors(model));
    if (this.canManage) item.append(this.madeTools(model, progress !== null));
    return item;
  }

  // Makes the inputs and outputs of a graph, which are read once the user opens them and, since its
  // file may not state them, when its state has changed.
  madeTensors(model) {
    const shown = this.tensors.get(model.id);
    if (shown && shown.state !== model.state) this.readTensors(model);
    const summary = element("summary", { textContent: "Inputs and outputs" });
    summary.dataset.name = `Tensors ${model.id}`;
    summary.setAttribute("aria-label", `Inputs and outputs of ${model.id}`);
    summary.onclick = (event) => {
      event.preventDefault(); // this list is drawn again, and decides
      if (this.tensors.delete(model.id)) this.showModels(this.models);
      else this.readTensors(model);
    };
    return element("details", { className: "tensors", open: shown !== undefined }, summary,
      ...(shown?.inputs === null ? [note("Known after its first load.")] : []),
      ...(shown?.inputs ? [tensorList("Inputs", shown.inputs), tensorList("Outputs", shown.outputs)] : []));
  }

  async readTensors(model) {
    const entry = { ...this.tensors.get(model.id), state: model.state };
    this.tensors.set(model.id, entry);
    const isShown = () => this.tensors.get(model.id) === entry;
    try {
      const { inputs, outputs } = await api.model(model.id);
      if (!isShown()) return;
      Object.assign(entry, { inputs, outputs });
    } catch (error) {
      if (!isShown()) return;
      this.tensors.delete(model.id);
      showFailure(error);
    }
    this.showModels(this.models);
  }

  madeTools(model, isLoading) {
    const tools = element("div", { className: "tools" });
    const tool = (label, action) => {
      const made = button(label, () => this.change(action), { className: "small", disabled: isLoading });
      made.dataset.name = `${label} ${model.id}`;
      made.setAttribute("aria-label", `${label} ${model.id}`);
      tools.append(made);
    };
    if (model.state === "loaded") tool("Unload", () => api.unload(model.id));
    else tool("Load", () => this.load(model.id));
    if (model.swapped_to) {
      tool("Undo swap", () => api.swap(model.id, model.id));
    } else if (model.state === "loaded" && this.models.length > 1) {
      const others = this.models.filter((other) => other.id !== model.id && other.offered && other.generates !== false);
      const choice = element("select", { "aria-label": `Model to answer instead of ${model.id}` },
        ...others.map((other) => element("option", { textContent: other.id })));
      choice.dataset.name = `choice ${model.id}`;
      const chosen = this.choices.get(model.id);
      if (others.some((other) => other.id === chosen)) choice.value = chosen;
      choice.onchange = () => this.choices.set(model.id, choice.value);
      tools.append(choice);
      tool("Swap", () => api.swap(model.id, choice.value));
    }
    return tools;
  }

  async change(action) {
    clearFailure();
    try {
      await action();
    } catch (error) {
      showFailure(error, () => this.change(action));
    }
  }

  async load(name) {
    this.loading.set(name, 0);
    this.showModels(this.models);
    try {
      for await (const { event, data } of api.load(name)) {
        if (event === "progress") this.loading.set(name, data.progress);
        if (event === "error") throw new Error(data.error.message);
        this.showModels(this.models);
      }
    } finally {
      this.loading.delete(name);
      this.showModels(this.models);
    }
  }

  // Shows the usage of the caller's key, and its limits.
  async showUsage() {
    this.hasUsage = true;
    const { data, limits } = await api.usage({ by: "model", since: "24h" });
    const line = (name, state, text) => element("li", {},
      element("div", { className: "name" }, element("span", { textContent: name }), element("span", { className: "state", textContent: state })),
      element("div", { className: "note", textContent: text }));
    byId("usage").replaceChildren(
      ...data.filter((row) => row.requests).map((row) => line(row.model, counted(row.requests, workOf(this.modelOf(row))),
        `${this.modelOf(row)?.graph ? "" : tokensOf(row)}${row.compute_s.toFixed(1)} s`)),
      ...limits.map((limit) => line(limit.bound, "limit",
        `${Math.round(limit.used)} of ${limit.limit}, until ${new Date(1000 * limit.ends_at).toLocaleString()}`)));
    if (!byId("usage").hasChildNodes()) byId("usage").append(element("li", { className: "note", textContent: "None yet." }));
  }

  // Returns the model of a row of usage, unless the daemon has it no more.
  modelOf(row) { return this.models?.find((model) => model.id === row.model); }

  showStatistics(models) {
    const sum = (field) => models.reduce((total, model) => total + (model[field] ?? 0), 0);
    const cached = sum("cached_tokens");
    const all = cached + sum("computed_tokens");
    this.samples = [...this.samples, { generated: sum("generated_per_second"), reused: all ? cached / all : 0 }].slice(-SAMPLES);
    const rates = {
      "Tokens per second": sum("generated_per_second").toFixed(0),
      "Prompt tokens per second": sum("computed_per_second").toFixed(0),
      "Prompts reused": all ? `${Math.round((100 * cached) / all)} %` : "–",
      "Running, waiting": `${sum("running")}, ${sum("waiting") + sum("parked")}`,
    };
    byId("rates").replaceChildren(...Object.entries(rates).map(([name, value]) => element("div", {},
      element("dt", { textContent: name }), element("dd", { textContent: value }))));
    this.drawChart();
  }

  drawChart() {
    const most = Math.max(10, ...this.samples.map((sample) => sample.generated));
    const x = (index) => 240 - (this.samples.length - 1 - index) * (240 / (SAMPLES - 1));
    const line = this.samples.map((sample, index) => `${x(index).toFixed(1)},${(60 - (56 * sample.generated) / most).toFixed(1)}`);
    const area = this.samples.map((sample, index) => `${x(index).toFixed(1)},${(64 - 60 * sample.reused).toFixed(1)}`);
    const reused = shape("polygon", "reused", `${x(0).toFixed(1)},64 ${area.join(" ")} 240,64`);
    byId("chart").replaceChildren(reused, shape("polyline", "generated", line.join(" ")));
  }
}

const note = (text) => element("p", { className: "note", textContent: text });
const counted = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
const workOf = (model) => (model?.graph ? "computation" : "turn");
const tokensOf = (row) => `${row.prompt_tokens} prompt tokens, ${row.cached_tokens} of them cached; ${row.generated_tokens} generated; `;

// Returns dimensions for people, with `?` for a free one without a name, as `inferd show` prints them.
const shapeText = (dimensions) => (dimensions
  ? `[${dimensions.map((size) => (size === "" ? "?" : size)).join(", ")}]` : "of any shape");

function tensorList(title, tensors) {
  const rows = tensors.slice(0, TENSORS_MAX).map(({ name, type, shape: dimensions }) => element("li", {},
    element("span", { textContent: name }), ` ${type} ${shapeText(dimensions)}`));
  const more = tensors.length - rows.length;
  if (more) rows.push(element("li", { textContent: `and ${more} more` }));
  return element("div", { className: "note" }, `${title}: ${tensors.length ? "" : "none"}`,
    element("ul", { "aria-label": title }, ...rows));
}

function shape(name, className, points) {
  const made = document.createElementNS(SVG, name);
  made.setAttribute("class", className);
  made.setAttribute("points", points);
  return made;
}
