// Entries of the browser's storage: objects of texts.

// Returns the texts of an entry. A damaged entry is replaced, because nothing could read it later.
export function read(name) {
  try {
    const value = JSON.parse(localStorage.getItem(name) ?? "{}");
    if (Object.getPrototypeOf(value) !== Object.prototype) throw new TypeError("not an object");
    return Object.fromEntries(Object.entries(value).filter(([, text]) => typeof text === "string"));
  } catch {
    write(name, {});
    return {};
  }
}

// A browser whose storage is full forgets the entry; chats do not depend on it.
export function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch (error) {
    console.warn(`${name} was not stored: ${error.message}`);
  }
}
