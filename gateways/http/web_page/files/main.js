// The page: asks for a key if one is needed, then connects its parts.

import { Activity } from "./activity.js";
import { Attachments } from "./attachments.js";
import { Chat } from "./chat.js";
import { ChatBar } from "./chat_bar.js";
import { ChatList } from "./chat_list.js";
import { Deletions, showLosses } from "./deletions.js";
import { byId, showFailure, typedText } from "./elements.js";
import { api, key } from "./server.js";
import { Settings } from "./settings.js";

const RETRY_MS = 3000;

async function findCaller() {
  for (;;) {
    try {
      return await api.caller();
    } catch (error) {
      if (error.status === 401) {
        await askForKey(key.get() ? error.message : "");
      } else {
        showFailure(error);
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
      }
    }
  }
}

function askForKey(failure) {
  byId("key-failure").textContent = failure;
  byId("key").value = "";
  byId("key-dialog").showModal();
  return new Promise((resolve) => {
    byId("key-dialog").oncancel = (event) => event.preventDefault();
    byId("key-form").onsubmit = () => { key.set(byId("key").value.trim()); resolve(); };
  });
}

function toggle(buttonId, className) {
  const isOpen = byId("columns").classList.toggle(className);
  byId(buttonId).setAttribute("aria-expanded", String(isOpen));
}

function connectComposer(chat, attachments) {
  const field = byId("prompt");
  const fit = () => { field.rows = Math.min(12, Math.max(2, field.value.split("\n").length)); };
  let isTaking = false; // whether images are still read
  const submit = () => {
    const text = typedText(field);
    const hasImages = !attachments.isEmpty;
    if ((!text && !hasImages) || isTaking || chat.isAnswering || !byId("composer").reportValidity()) return;
    if (hasImages && attachments.reason()) return attachments.refuse();
    field.value = "";
    fit();
    if (!hasImages) return chat.send(text);
    isTaking = true;
    attachments.take().then((images) => {
      isTaking = false;
      if (text || images.length) chat.send(text, images);
    });
  };
  byId("composer").onsubmit = (event) => { event.preventDefault(); submit(); };
  field.oninput = fit;
  field.onkeydown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
  };
  byId("answer-now").onclick = () => { chat.endReasoning(); field.focus(); };
  byId("stop").onclick = () => { chat.stop(); field.focus(); };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && chat.isAnswering && !event.defaultPrevented) chat.stop();
  });
}

// Connects the chats with their list, bar and settings.
function connectChats() {
  let chat = null;
  const settings = new Settings((note) => { chat.begin(note); byId("prompt").focus(); });
  const deletions = new Deletions((id) => {
    if (chat.id === id) chat.begin();
    else list.refresh();
  });
  const list = new ChatList((id, title) => deletions.remove(id, title));
  const bar = new ChatBar(() => list.refresh());
  const attachments = new Attachments(() => settings.whyNoImages());
  const showSession = (session) => { bar.show(session); attachments.showState(); };
  chat = new Chat(settings, () => list.refresh(), showSession);
  list.chat = chat;
  chat.attachments = attachments;
  byId("model").addEventListener("change", () => attachments.showState());
  byId("new-chat").onclick = () => { chat.begin(); byId("prompt").focus(); };
  return { settings, list, chat, attachments };
}

async function start() {
  for (const notice of document.querySelectorAll(".not-private")) notice.hidden = isSecureContext;
  const caller = await findCaller();
  byId("failure").replaceChildren();
  if (key.get()) byId("change-key").hidden = false;
  byId("change-key").onclick = () => { key.set(""); location.reload(); };
  const { settings, list, chat, attachments } = connectChats();
  settings.setCaller(caller);
  connectComposer(chat, attachments);
  byId("show-chats").onclick = () => toggle("show-chats", "with-chats");
  byId("show-details").onclick = () => toggle("show-details", "with-details");
  if (matchMedia("(min-width: 75rem)").matches) toggle("show-details", "with-details");
  const showModels = (models) => {
    settings.setModels(models);
    attachments.showState();
    byId("no-model").hidden = models.preferred !== null;
  };
  await api.models().then(showModels, showFailure);
  const onReturn = () => { list.refresh(); if (chat.id !== null && !chat.isAnswering) chat.refresh(); };
  let active = ""; // the chats with turns: the list shows which ones are answered
  const onTurns = (turns) => {
    chat.noteTurns(turns);
    const now = turns.map((turn) => turn.session_id).sort().join("\n");
    if (now !== active) list.refresh();
    active = now;
  };
  new Activity(caller, () => chat.id, { onModels: showModels, onTurns, onReturn }).follow();
  list.refresh();
  showLosses().catch(showFailure);
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return;
    list.refresh();
    showLosses().catch(() => {}); // the state of the connection is shown elsewhere
  });
  // The answer goes on when the page is loaded or shown again.
  window.addEventListener("pagehide", () => chat.pause());
  window.addEventListener("pageshow", (event) => { if (event.persisted && chat.id !== null) chat.open(chat.id); });
  if (location.hash.length > 1) chat.open(location.hash.slice(1));
  byId("prompt").focus();
}

start();
