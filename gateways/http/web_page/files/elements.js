// Elements of the page. Texts of models and users only ever become text nodes.

export const byId = (id) => document.getElementById(id);

export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [property, value] of Object.entries(properties)) {
    if (property.startsWith("aria-") || property === "role") made.setAttribute(property, value);
    else made[property] = value;
  }
  made.append(...children);
  return made;
}

export function button(label, onclick, properties = {}) {
  return element("button", { type: "button", textContent: label, onclick, ...properties });
}

// Returns the text that was typed into a field, with its indentation.
export const typedText = (field) => field.value.trimEnd().replace(/^\s*\n/, "");

export function showFailure(error, retry = null) {
  const place = byId("failure");
  const again = retry ? [button("Try again", () => { place.replaceChildren(); retry(); })] : [];
  place.replaceChildren(element("span", { textContent: error.message }), ...again);
}

// Draws a list again; the focus stays on the control with the same `data-name`.
export function redraw(list, children) {
  const name = list.contains(document.activeElement) ? document.activeElement.dataset.name : null;
  list.replaceChildren(...children);
  if (name) list.querySelector(`[data-name="${CSS.escape(name)}"]`)?.focus();
}

export const hasFailure = () => byId("failure").hasChildNodes();
export const clearFailure = () => byId("failure").replaceChildren();
export const showProgress = (text) => { byId("progress").textContent = text; };

// Copies a text. The clipboard's API exists only in secure contexts, and may refuse there.
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const focused = document.activeElement;
    const field = element("textarea", { className: "hidden", value: text, readOnly: true, "aria-hidden": "true" });
    document.body.append(field);
    field.select();
    const isCopied = document.execCommand("copy");
    field.remove();
    focused?.focus();
    if (!isCopied) return showFailure(new Error("The browser does not let this page copy: select the text instead."));
  }
  showProgress("Copied.");
}

export function formatBytes(bytes) {
  if (bytes === null || bytes === undefined) return "";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1) { bytes /= 1000; unit += 1; }
  return `${bytes >= 100 || unit === 0 ? Math.round(bytes) : bytes.toFixed(1)} ${units[unit]}`;
}
