// The check of a JSON schema before it is sent. The daemon checks all of it; this check is for typing.

// Returns the failure of a schema's text in words for people; empty: it can be sent.
export function schemaFailure(text) {
  if (!text.trim()) return "";
  let schema;
  try {
    schema = JSON.parse(text);
  } catch (error) {
    return `The schema is not JSON: ${error.message}.`;
  }
  if (typeof schema !== "object" || schema === null || Array.isArray(schema)) {
    return "A schema is an object, such as {\"type\": \"object\", \"properties\": {\"name\": {\"type\": \"string\"}}}.";
  }
  return "";
}
