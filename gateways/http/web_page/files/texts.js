// Texts of messages.

// Returns the text of a message's content, which is a string or a list of parts.
export function textOf(content) {
  if (typeof content === "string") return content;
  return (content ?? []).map((part) => part.text ?? "").join("");
}
