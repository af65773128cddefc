// `make docs` writes this file from the table of errors in docs/protocol.md; do not edit it.
import { InferdError } from "../inferd-error.js";

/** a value, handle or call that can never work as given */
export class InvalidArgument extends InferdError {
  static override readonly wire = { name: "InvalidArgument", number: 1, wasi: 1, retryable: false };
}

/** an unreadable frame; always a goodbye */
export class ProtocolError extends InferdError {
  static override readonly wire = { name: "ProtocolError", number: 209, wasi: 1, retryable: false };
}

/** an encoding other than ggml, or JSON that does not parse */
export class InvalidEncoding extends InferdError {
  static override readonly wire = { name: "InvalidEncoding", number: 2, wasi: 2, retryable: false };
}

/** not enough memory, or the kernel killed the worker to free some; for a load `data.needed_bytes` and `data.free_bytes` */
export class MissingMemory extends InferdError {
  static override readonly wire = { name: "MissingMemory", number: 3, wasi: 3, retryable: false };
}

/** a limit is reached; `data` has the limit and, for turns, its setting (`bound`) and `queue_length` */
export class Busy extends InferdError {
  static override readonly wire = { name: "Busy", number: 4, wasi: 4, retryable: true };
}

/** the context has a running turn, or the session id is open elsewhere */
export class SessionBusy extends InferdError {
  static override readonly wire = { name: "SessionBusy", number: 202, wasi: 4, retryable: true };
}

/** the daemon finishes running turns and accepts no new work */
export class ShuttingDown extends InferdError {
  static override readonly wire = { name: "ShuttingDown", number: 208, wasi: 4, retryable: true };
}

/** a limit for the caller's user: `data.bound` names its setting or access rule; for tokens per minute `data.tokens` and `data.tokens_per_minute`, for usage by day and month also `data.ends_at`, for sessions `data.sessions` and `data.sessions_max`, for their memory `data.bytes`, `data.more` and `data.bytes_max`, for models from descriptors `data.models` and `data.models_max`; or three of the user's inputs have crashed this model's worker within an hour (`data.crashes_max`), and the model refuses the user for ten minutes */
export class QuotaExceeded extends InferdError {
  static override readonly wire = { name: "QuotaExceeded", number: 213, wasi: 4, retryable: true };
}

/** the engine failed */
export class RuntimeError extends InferdError {
  static override readonly wire = { name: "RuntimeError", number: 5, wasi: 5, retryable: false };
}

/** no KV cells are left for the turn, and no other turn holds any */
export class KvFull extends InferdError {
  static override readonly wire = { name: "KvFull", number: 212, wasi: 3, retryable: false };
}

/** the model's worker process has died, and so have its replacements; or, with `data.cause` `node`, the node `data.node` of a fleet was lost; or, with `data.cause` `input`, this input crashes the worker and is refused to its user for an hour: the same turn (tokens, parameters except the seed, adapters), any turn with its grammar if the worker died while it sampled, or the same text */
export class WorkerCrashed extends InferdError {
  static override readonly wire = { name: "WorkerCrashed", number: 205, wasi: 5, retryable: true };
}

/** the model's file could not be loaded, or with `data.cause` `crashed` crashes the worker, with the sizes where they are known; or, with `data.cause` `upgraded`, the daemon's files were replaced while it ran and it must be restarted */
export class LoadFailed extends InferdError {
  static override readonly wire = { name: "LoadFailed", number: 206, wasi: 1, retryable: false };
}

/** a call or option that this daemon does not have */
export class UnsupportedOperation extends InferdError {
  static override readonly wire = { name: "UnsupportedOperation", number: 6, wasi: 6, retryable: false };
}

/** another major version of the protocol; `data.protocol` is the daemon's */
export class VersionMismatch extends InferdError {
  static override readonly wire = { name: "VersionMismatch", number: 210, wasi: 6, retryable: false };
}

/** over a limit; `data.needed` for a buffer that is too small */
export class TooLarge extends InferdError {
  static override readonly wire = { name: "TooLarge", number: 7, wasi: 7, retryable: false };
}

/** a named thing does not exist */
export class NotFound extends InferdError {
  static override readonly wire = { name: "NotFound", number: 8, wasi: 8, retryable: false };
}

/** the turn has ended; `data.stop_reason` */
export class EndOfSequence extends InferdError {
  static override readonly wire = { name: "EndOfSequence", number: 100, wasi: 100, retryable: false };
}

/** the context has no space for another token; `data.ctx_size`, an int */
export class ContextFull extends InferdError {
  static override readonly wire = { name: "ContextFull", number: 101, wasi: 101, retryable: false };
}

/** the prompt does not fit; `data.prompt_tokens` and `data.ctx_size`, ints; `data.prompt_bytes` if it was too long to be tokenized: `prompt_tokens` then is the least that it can have */
export class PromptTooLong extends InferdError {
  static override readonly wire = { name: "PromptTooLong", number: 102, wasi: 102, retryable: false };
}

/** no model has this name; `data.models` lists names */
export class ModelNotFound extends InferdError {
  static override readonly wire = { name: "ModelNotFound", number: 103, wasi: 103, retryable: false };
}

/** a timeout has passed; `data.timeout` is `queue`, `total`, `sampling` (one token took too long) or `template` (the machine was too slow to render a chat); clients use `total` too, when they give up waiting, with `retryable` if they have not sent the request */
export class Timeout extends InferdError {
  static override readonly wire = { name: "Timeout", number: 200, wasi: 5, retryable: false };
}

/** the client has not read the stream for `reader_timeout_s` */
export class ReaderTimeout extends InferdError {
  static override readonly wire = { name: "ReaderTimeout", number: 204, wasi: 5, retryable: false };
}

/** the turn or request was cancelled; `data.by` is `operator` if an operator cancelled it or unloaded its model, rather than the caller's user, and `supersede` if a newer request with the same key did; `data.metadata` has the metadata of a turn that had begun */
export class Cancelled extends InferdError {
  static override readonly wire = { name: "Cancelled", number: 201, wasi: 5, retryable: false };
}

/** the context was idle for too long */
export class SessionExpired extends InferdError {
  static override readonly wire = { name: "SessionExpired", number: 203, wasi: 1, retryable: false };
}

/** the caller's user may not do this; `data.right` is the missing right, or `data.priority_max` the user's highest class */
export class PermissionDenied extends InferdError {
  static override readonly wire = { name: "PermissionDenied", number: 207, wasi: 6, retryable: false };
}

/** never sent: clients use it when the connection is lost */
export class ConnectionLost extends InferdError {
  static override readonly wire = { name: "ConnectionLost", number: 211, wasi: 5, retryable: false };
}

/** never sent: clients use it for an answer that is not of the type that the program requested; `data.text` has it, and `data.stop_reason` */
export class InvalidAnswer extends InferdError {
  static override readonly wire = { name: "InvalidAnswer", number: 214, wasi: 5, retryable: false };
}

/** never sent: clients use it for an error whose name they do not know */
export class Unknown extends InferdError {
  static override readonly wire = { name: "Unknown", number: 299, wasi: 5, retryable: false };
}

/** Every error by its name. */
export const ERRORS = { InvalidArgument, ProtocolError, InvalidEncoding, MissingMemory, Busy, SessionBusy, ShuttingDown, QuotaExceeded, RuntimeError, KvFull, WorkerCrashed, LoadFailed, UnsupportedOperation, VersionMismatch, TooLarge, NotFound, EndOfSequence, ContextFull, PromptTooLong, ModelNotFound, Timeout, ReaderTimeout, Cancelled, SessionExpired, PermissionDenied, ConnectionLost, InvalidAnswer, Unknown };
