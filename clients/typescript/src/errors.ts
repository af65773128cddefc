/** Errors from the fields that the daemon sends, and the errors by which a turn loses its daemon. */

import * as generated from "./generated/errors.js";
import { InferdError } from "./inferd-error.js";
import type { Fields } from "./types.js";

export * from "./generated/errors.js";
export { InferdError } from "./inferd-error.js";
export type { ErrorOptions } from "./inferd-error.js";

const { ConnectionLost, ERRORS, ProtocolError, ShuttingDown, Unknown } = generated;

/** Return the error that `fields` name; an unknown name becomes `Unknown`. */
export function errorFromWire(fields: Fields): InferdError {
  const name = String(fields.name);
  const kind = Object.hasOwn(ERRORS, name) ? ERRORS[name as keyof typeof ERRORS] : Unknown;
  const { data, retryable } = fields;
  return new kind(String(fields.message ?? ""), {
    hint: String(fields.hint ?? ""),
    data: isFields(data) ? data : {},
    retryable: typeof retryable === "boolean" ? retryable : undefined,
  });
}

/** Return `error` as a new exception, with the stack of the call that it fails. */
export function raisedAgain(error: InferdError, changes: Fields = {}): InferdError {
  return errorFromWire({ ...error, message: error.message, ...changes });
}

/** Return whether a turn that ended with `error` has lost its connection or daemon. */
export function isLoss(error: unknown): error is InferdError {
  return error instanceof ConnectionLost || error instanceof ShuttingDown;
}

/** Return the error for data from the daemon that cannot be read because of `cause`. */
export function unreadable(cause: unknown): InferdError {
  const reason = cause instanceof Error ? cause.message : String(cause);
  return new ProtocolError(`data from the daemon cannot be read: ${reason}`);
}

export function isFields(value: unknown): value is Fields {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
