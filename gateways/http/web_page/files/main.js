// The page: asks for a key if one is needed, then connects its parts.

import { Activity } from "./activity.js";
import { Chat } from "./chat.js";
import { ChatList } from "./chat_list.js";
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

function connectComposer(chat) {
  const field = byId("prompt");
  const fit = () => { field.rows = Math.min(12, Math.max(2, field.value.split("\n").length)); };
  const submit = () => {
    const text = typedText(field);
    if (!text || chat.isAnswering || !byId("composer").reportValidity()) return;
    field.value = "";
    fit();
    chat.send(text);
  };
  byId("composer").onsubmit = (event) => { event.preventDefault(); submit(); };
  field.oninput = fit;
  field.onkeydown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
  };
  byId("stop").onclick = () => { chat.stop("stopped"); field.focus(); };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && chat.isAnswering && !event.defaultPrevented) chat.stop("stopped");
  });
}

async function start() {
  for (const notice of document.querySelectorAll(".not-private")) notice.hidden = isSecureContext;
  const caller = await findCaller();
  byId("failure").replaceChildren();
  if (key.get()) byId("change-key").hidden = false;
  byId("change-key").onclick = () => { key.set(""); location.reload(); };
  const settings = new Settings();
  settings.setCaller(caller);
  const list = new ChatList(settings);
  const chat = new Chat(settings, () => list.refresh());
  list.chat = chat;
  connectComposer(chat);
  byId("new-chat").onclick = () => { chat.begin(); byId("prompt").focus(); };
  byId("show-chats").onclick = () => toggle("show-chats", "with-chats");
  byId("show-details").onclick = () => toggle("show-details", "with-details");
  if (matchMedia("(min-width: 75rem)").matches) toggle("show-details", "with-details");
  const showModels = (models) => {
    settings.setModels(models);
    byId("no-model").hidden = models.preferred !== null;
  };
  await api.models().then(showModels, showFailure);
  new Activity(caller, () => chat.id, showModels).follow();
  list.refresh();
  if (location.hash.length > 1) chat.open(location.hash.slice(1));
  byId("prompt").focus();
}

start();
