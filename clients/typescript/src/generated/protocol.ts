// `make docs` writes this file from the structs of the protocol's messages; do not edit it.
import { list, toHandle } from "../types.js";
import type { AnswerFields, Context, Fields } from "../types.js";
import type { Graph, Message, Priority } from "../types.js";
import type { ModelParameters } from "./parameters.js";

export const PROTOCOL_VERSION: [number, number] = [1, 1];

export const LIMITS = {
  FRAME_BYTES_MAX: 1048576,
  REPLY_BYTES_MAX: 8388608,
  NESTING_MAX: 64,
  MESSAGE_ITEMS_MAX: 16,
  ITEMS_MAX: 32000,
  KEYS_MAX: 256,
  REQUESTS_MAX: 256,
  STARTS_MAX: 4,
  LARGE_FRAMES_MAX: 4,
  LOOP_SHARE: 0.1,
  READING_SHARE: 0.05,
  CREDIT_DEFAULT: 64,
  CREDIT_MAX: 1024,
  TENSOR_BYTES_MAX: 8388608,
  GRAPH_DEATHS_MAX: 4,
  DESCRIPTORS_MAX: 16,
  CALLS_DESCRIPTORS_MAX: 64,
  OPERATION_S_MAX: 30,
  PART_BYTES: 524288,
  UPLOAD_BYTES_MAX: 33554432,
  COPIED_MEDIA_BYTES_MAX: 6291456,
  LOOP_BYTES_MAX: 65536,
  KV_S_MAX: 10,
  JOB_PART_BYTES_MAX: 524288,
  JOB_WAIT_S_MAX: 60,
  UPLOADS_MAX: 8,
  HOLDS_MAX: 64,
  EXPORTS_MAX: 4,
  IMPORTS_MAX: 2,
  NOTES_MAX: 8,
  DEPARTED_MAX: 10000,
  HOLD_S_MAX: 60,
  TRANSFER_CHARACTERS_MAX: 64,
  SERVED_TOKENS_MAX: 1099511627776,
  NAME_CHARACTERS_MAX: 128,
  LABEL_CHARACTERS_MAX: 64,
  HELLO_TIMEOUT_S: 10,
  LINGER_S: 1,
  LINGERING_MAX: 64,
  FRAME_S_MAX: 30,
  INCOMPLETE_BYTES_MAX: 67108864,
  OUTBOX_PAUSE_BYTES: 1048576,
  OUTBOX_BYTES_MAX: 67108864,
  OUTBOXES_BYTES_MAX: 134217728,
  GRAPHS_MAX: 1000,
  MESSAGES_MAX: 1000,
  MESSAGES_BYTES_MAX: 8388608,
  NOTE_BYTES_MAX: 262144,
  TITLE_CHARACTERS_MAX: 200,
  SEARCH_CHARACTERS_MAX: 200,
  OPENING_CHARACTERS_MAX: 300,
  WORDS_CHARACTERS_MAX: 80,
  UNDO_S_MAX: 3600,
  DELETION_NOTES_MAX: 100,
  DELETION_OWNERS_MAX: 1000,
  DROPPED_BYTES_MAX: 1048576,
  RAW_BYTES_MAX: 65536,
  TOOL_CALLS_MAX: 128,
  MEDIA_PARTS_MAX: 64,
  ALT_CHARACTERS_MAX: 1000,
  LOW_DETAIL_TOKENS: 256,
  MEDIA_TOKENS_MAX: 1048576,
  FUNCTION_NAME_CHARACTERS_MAX: 128,
  ANSWER_CALLS_MAX: 128,
  CALL_CHARACTERS_MAX: 262144,
  ARGUMENTS_LEVELS_MAX: 48,
  SPACE_CHARACTERS_MAX: 64,
  HELD_CHARACTERS_MAX: 4096,
  RECENT_CHATS_MAX: 256,
  RECENT_CHATS_BYTES_MAX: 33554432,
  QUEUE_EVENTS_MAX: 256,
  PROMPT_EVENTS_MAX: 256,
  PROBABILITIES_MAX: 20000,
  PROMPT_LOGPROBS_MAX: 32768,
  INPUTS_MAX: 128,
  TENSORS_MAX: 128,
  RANK_MAX: 64,
  FREED_MAX: 1024,
  BUFFER_PART_BYTES_MAX: 1048576,
  BUFFERS_FREED_MAX: 1024,
  EMBED_TEXTS_MAX: 256,
  RERANK_DOCUMENTS_MAX: 256,
  DETOKENIZE_TOKENS_MAX: 65536,
  TRACEPARENT_CHARACTERS_MAX: 128,
  TEXTS_AT_ONCE_MAX: 16,
  RESULT_BYTES_MAX: 6291456,
  BRANCHES_MAX: 16,
  ANSWERS_MAX: 16,
  INFILL_EXTRA_MAX: 256,
  SUPERSEDE_CHARACTERS_MAX: 256,
  FILE_TOKENS_MAX: 2048,
  MARKS_MAX: 1000,
  TIMEOUT_S_MAX: 2592000,
  NAME_BYTES_MAX: 4095,
  SESSION_ID_CHARACTERS_MAX: 128,
  EXPIRED_REMEMBERED_MAX: 10000,
  USAGE_GROUPS_MAX: 10000,
  USAGE_S_MAX: 316224000,
  USAGE_ROWS_USER_MAX: 256,
  USAGE_ROWS_HOUR_MAX: 8192,
  USAGE_USERS_HOUR_MAX: 4096,
  USAGE_HOURS_MAX: 48,
  USAGE_UNWRITTEN_MAX: 65536,
  USAGE_USERS_MAX: 8192,
  USAGE_DAYS_MAX: 62,
  USAGE_DAYS_ROWS_MAX: 1000000,
  OPEN_MAX: 32,
} as const;

export interface ClientHello {
  /** Major and minor version. */
  protocol: [number, number];
  /** Free text for the daemon's log, cut to 200 characters. */
  software?: string | undefined;
  /** The label of this program among those of its user. */
  label?: string | undefined;
  /** The user on behalf of whom a gateway acts. */
  on_behalf_of?: string | undefined;
  /** Whether the client gets the changes of its sessions. */
  copies?: boolean | undefined;
  /** The name of the key that a gateway's caller has, by which usage is counted. */
  key?: string | undefined;
  /** The limits of this key, which hold besides those of the user: a map of `tokens_per_day`, `tokens_per_month`, `seconds_per_day` and `seconds_per_month`, of UTC. */
  key_limits?: Fields | undefined;
}

export interface Tensor {
  /** The bytes. */
  data?: Uint8Array | undefined;
  /** Not checked: of a text only the bytes count. */
  dimensions?: number[] | undefined;
  /** Name or number of a tensor type; any number is accepted. Some types of graphs only have names. */
  type?: number | string | undefined;
  /** 0 or more: the bytes are in a descriptor, and `data` is empty. */
  fd?: number | undefined;
  /** Not 0: the handle of a tensor that stays in the daemon. `data` is empty; an input needs no other field. */
  kept?: number | undefined;
  /** Not 0: the handle of a buffer that has the bytes. `data` is empty. */
  buffer?: number | undefined;
  /** With `buffer`: the place of the first byte, a multiple of 64. */
  offset?: number | undefined;
  /** With `buffer`: the number of bytes. */
  length?: number | undefined;
}

export interface Infill {
  /** The text of the file before the place. */
  prefix: string;
  /** The text of the file behind the place. */
  suffix: string;
  /** Text at the place that is not in the file; the answer continues it. */
  typed?: string | undefined;
  /** Parts of other files, at most `INFILL_EXTRA_MAX`: maps with `text` and, if it is known, its file's `name`. */
  extra?: Fields[] | undefined;
  /** The suffix precedes the prefix in the prompt, so that only the text that was typed since the previous prompt is computed; for models that were trained with this order (SPM). */
  suffix_first?: boolean | undefined;
}

export interface ServerHello {
  /** Major and minor version. */
  protocol: [number, number];
  /** `inferd/` and its version. */
  software: string;
  /** Number of daemon starts on this state. */
  instance: number;
  /** The limits in force. */
  limits: Limits;
  /** llama.cpp's build; 0: unknown. */
  llama_build_number: number;
  /** The commit of llama.cpp that the engine is built from. */
  llama_commit: string;
}

export interface Limits {
  /** Bytes of the body of a frame to the daemon. */
  frame_bytes_max: number;
  /** Bytes of the body of a frame to the client. */
  reply_bytes_max: number;
  /** Levels of a frame's arrays and maps. */
  nesting_max: number;
  /** Running requests of one connection. */
  requests_max: number;
  /** Credit of a stream whose request sets none. */
  credit_default: number;
  /** Credit that a request or one credit frame may give. */
  credit_max: number;
  /** Bytes of a prompt or tensor in a descriptor. */
  tensor_bytes_max: number;
  /** Sessions open at once, of all users. */
  sessions_max: number;
  /** The idle time after which a context expires; 0: unknown. */
  idle_timeout_ms: number;
}

export interface ToolCallPart {
  /** The number of the call in the answer. */
  index: number;
  /** Nine letters and digits, in the first part of a call. */
  id: string;
  /** The function, in the first part of a call. */
  name: string;
  /** The next part of the JSON text of its arguments, an object. */
  arguments: string;
  /** The call of this number is not one after all; its source follows as text. */
  dropped: boolean;
}

export function readToolCallPart(fields: Fields): ToolCallPart {
  return { id: "", name: "", arguments: "", dropped: false, ...fields } as unknown as ToolCallPart;
}

export function readServerHello(fields: Fields): ServerHello {
  return { llama_build_number: 0, llama_commit: "", ...fields } as unknown as ServerHello;
}

export interface Metadata {
  /** Tokens of the prompt, including the history; known as soon as the input is set. */
  input_tokens?: number | undefined;
  /** Tokens of the answer, sampled or forced, including the one that ended the turn. */
  output_tokens?: number | undefined;
  /** 0: unknown. It counts the commits of llama.cpp's repository, and the source package that the engine is built from has no repository. `llama_commit` identifies the build. */
  llama_build_number?: number | undefined;
  /** The commit of llama.cpp that the daemon's engine is built from, also before any input, and for `echo`. */
  llama_commit?: string | undefined;
  /** Tokens of the prompt that were not computed again. */
  cached_tokens?: number | undefined;
  /** Time from queueing to the first slot, or to the end of a turn that got none. */
  queue_ms?: number | undefined;
  /** Time from queueing to the first token; 0 before it, and in a turn without one. */
  ttft_ms?: number | undefined;
  /** Time from the first slot to the end of the prompt; in a turn that was cancelled or has failed, to its first token, or without one to its end. */
  prompt_ms?: number | undefined;
  /** Time from the end of the prompt to the end of the turn; 0 if the prompt did not end. */
  predicted_ms?: number | undefined;
  /** Nil before the end; `eos`, `token`, `stop`, `pattern`, `complete`, `indent`, `similarity`, `repetition`, `surprisal`, `grammar`, `time`, `length`, `context_full`, `embedded` (meanings); the name of the error that ended it, or that refused it if there is no other turn; `detached` in a reopened session whose last turn was interrupted. A reopened session has the metadata of its last turn's end, for `resume`. */
  stop_reason?: string | null | undefined;
  /** The token, text, pattern or limit that ended it, or the measured value; the pooling of an embedding; the message of the error that ended it; `operator` if an operator cancelled it. */
  stop_detail?: string | undefined;
  /** The error that ended the turn, or with which the last `compute`, `compute_single`, `prompt_compute`, `run_inference`, or `stream` or `chat` without input failed: `name`, `number`, `message`, `hint`, `retryable` and `data` as in an error. Absent without an error, and after `EndOfSequence` or `SessionBusy`; input, turns and `fini_single` remove it. */
  error?: Fields | undefined;
  /** Context shifts in this turn. */
  shifts?: number | undefined;
  /** Whether the KV state was approximate because of a shift in this turn or earlier. */
  shifted?: boolean | undefined;
  /** The form of tool calls that the answer may have. */
  tool_format?: string | undefined;
  /** Tokens of the history before this turn's messages that were no longer valid and were computed again. */
  recomputed_tokens?: number | undefined;
  /** The reason, for people; empty: nothing was recomputed. */
  recomputed_reason?: string | undefined;
  /** Tokens of the history and the prompt that this turn has dropped because the context was full, before its answer or in context shifts. */
  dropped_tokens?: number | undefined;
  /** Turns that were dropped before this turn's answer. */
  dropped_turns?: number | undefined;
  /** Number of times that the turn yielded its slot; present after the turn's end. */
  parks?: number | undefined;
  /** Tokens of the output that the grammar forced (jump-forward), or a bound on reasoning. */
  forced_tokens?: number | undefined;
  /** Tokens of reasoning in the output, with the mark at its end; present once the turn has finished. */
  reasoning_tokens?: number | undefined;
  /** Tokens that a drafter proposed and a step computed (drafts). */
  drafted_tokens?: number | undefined;
  /** Those of them that equal the sampled tokens. */
  accepted_tokens?: number | undefined;
  /** The seed of the turn's generator; random if none was given. */
  seed?: number | undefined;
  /** The turn's adapters and their scales, a map. */
  lora?: Fields | undefined;
  /** The model's name. */
  model?: string | undefined;
  /** The model's fingerprint. */
  fingerprint?: string | undefined;
  /** The session's id, or nil. */
  session_id?: string | null | undefined;
  /** Whether everything replied so far is written to disk; false if the daemon cannot write; nil without an id, or without `persist`. */
  durable?: boolean | null | undefined;
  /** Requested parameters of the model that are not in force, with the values in force. */
  not_applied?: Fields | undefined;
  /** Parameters out of their range in JSON, or that contradict others, with the values used instead; those that could not be kept, with the reason; `json-schema` with the paths of the constraints that `schema-lenient` left out; `logit-bias` with the tokens outside the vocabulary, which are left out; `tools`, if the model's chat template does not use them or the input is raw text; `chat-template`, if the model has none and messages are written without it; `media`, if the model cannot read images or sounds of the history. */
  adjusted?: Fields | undefined;
  /** Unknown keys. */
  ignored?: string[] | undefined;
  /** Tokens of the prompt that are images or sounds. This key and the next two are absent if there are none. */
  media_tokens?: number | undefined;
  /** The images and sounds of the prompt, or the parts into which they are cut, that were not encoded for this turn: the tokens or their embeddings were in memory. */
  media_cached?: number | undefined;
  /** Seconds in which the others were encoded. */
  encode_s?: number | undefined;
  /** With `n-probs`, except for a stream, whose events have it: for each token a map as llama-server's, `id`, `token`, `bytes`, `logprob`, `top_logprobs`, or with `post-sampling-probs` `prob`, `top_probs`. It covers the first tokens, up to 20 000 such entries, and no tokens sampled before an interruption; otherwise the key is absent. */
  completion_probabilities?: Fields[] | undefined;
  /** With `n-probs`, if a token ended the answer that is not part of it: such a map of this token; otherwise the key is absent. */
  end_token?: Fields | undefined;
  /** With `prompt-logprobs`, except for a stream, whose events have it: for each token of the prompt a map of `id`, `token`, `bytes`, `logprob`, `rank` (1 for the most probable token) and `top_logprobs`, with the model's logprobs. The `logprob` of the first token is nil, as nothing precedes it. Of the answers of `answers`, only the first one has it. Otherwise the key is absent. */
  prompt_logprobs?: Fields[] | undefined;
}

export interface ModelInfo {
  /** The name by which clients load it. */
  name: string;
  /** The name of the model of which `name` is another name, set in the configuration; empty: none. The facts below are those of the model, with whose process both compute. */
  of: string;
  /** `cold`, `loading`, `ready`, `unloading` or `failed`. */
  state: string;
  /** `llama`, `onnx`, `litert`, `openvino` or `echo`. */
  backend: string;
  /** Of a graph, the device that computes it: `cpu`, or the name in the configuration, such as `cuda` or `gpu.1`; empty for other models. */
  device: string;
  /** Its path; empty for `echo` and for models from descriptors. */
  file: string;
  /** The name or file that a `swap` has put behind the name; empty: none. */
  swapped_to: string;
  /** Size of its files. */
  size_bytes: number;
  /** Unix time of the last change of its files; nil: it has none. */
  modified_at: number | null;
  /** Graphs that hold it. */
  leases: number;
  /** Its waiting and running turns, or computations of a graph. */
  tasks: number;
  /** Its worker process; 0: none. */
  pid: number;
  /** Slots of the loaded model, or those with which it is to be loaded. */
  slots: number;
  /** Progress of its load, 0 … 1. */
  progress: number;
  /** Time that its last load took; 0: there was none. */
  load_s: number;
  /** Time without a lease. */
  idle_s: number;
  /** Seconds until it is unloaded if it stays unused; nil: it is in use, or does not expire by time. */
  expires_s: number | null;
  /** Time for which it stays loaded when unused; negative: until memory is short. */
  keep_alive_s: number;
  /** Whether it stays loaded even when memory is short. */
  pinned: boolean;
  /** Memory that its worker process, and the one that encodes images and sounds, occupy on the host now, mapped weights included (RSS); 0: no process. */
  resident_bytes: number;
  /** Nil, or the estimated memory of its processes, in bytes: `weights`, `context`, `compute`, `process`, `projector` (the process that encodes images and sounds, with the embeddings that are kept), `draft` (the draft model, or the model's NextN layers without their weights, with KV states and buffers) and `total`; `options` is the part of `context` and `compute` that the engine's options of the model add, negative if they save. */
  memory: Fields | null;
  /** Array of map: `name`, `file`, `scale` (for turns that select none), `size_bytes`; once the model is loaded, also `id`, a hash of the file, or `error`: turns that select the adapter fail with it. */
  adapters: Fields[];
  /** Nil, or the error of its last load. */
  error: Fields | null;
  /** Nil, or properties of the loaded model: `ctx_size`, `vocab_size`, `parameters`, `special_tokens`, …. */
  info: Fields | null;
  /** Nil, or the setting with which the loaded model computes on the CPU: `flash_attn`, `threads` and `threads_batch` (0: as configured), `ubatch` (tokens of a micro-batch; 0: the default), `source` (`configured`, `measured` on this machine, `like` a model of similar shape, by a `rule` for the CPU's family, or `default`) and `reason`; `next_load` is the one that its next load will have. */
  setting: Fields | null;
  /** The memory of the host, in bytes, that its next load needs with all slots and full contexts; nil: it is not known yet, or it has a process. Before llama.cpp has estimated it, it is known from the file's header, and only where no GPU may hold a part. */
  need_bytes: number | null;
  /** The kinds of message parts that it reads: `text`, and with a projector `image` or `audio`, or both. It is known from the projector's header before the model is loaded. */
  reads: string[];
  /** Nil, or the projector with which it reads images and sounds: `file` (empty: none was taken), `type` (llama.cpp's name), `kinds` (`image`, `audio`), `width` (numbers of an embedding), `image_size` (pixels of a side with which it was trained; 0: no images), `size_bytes`, `image_tokens_max` (tokens of a very large image) and `buffer_bytes` (memory in which it computes), both nil before its first load, `pid` (of its process; 0: none), `note` (files beside the model that were left out, and why) and `error` (nil, or why it does not work). */
  projector: Fields | null;
  /** Nil, or the model that drafts for it (draft models): `name` (as `draft-model` names it), `file`, `size_bytes` and `error` (nil, or why there is none). */
  draft_model: Fields | null;
  /** In a fleet, its node; otherwise absent. */
  node?: string | undefined;
  /** In a fleet, the model as each node describes it; otherwise absent. */
  nodes?: Fields[] | undefined;
}

export interface ShownModel extends ModelInfo {
  /** Its configured parameters. */
  options: ModelParameters;
  /** Nil, or a map of facts that the header of its file states; nil for `echo` and for models from descriptors. */
  file_info: FileInfo | null;
  /** Nil, or the reason why the header cannot be read, such as no answer from a file server within 5 s. */
  file_error: string | null;
  /** Nil if nothing is known, or the memory that its next load needs: `slots`, `ctx_size` (of each slot), and the keys of `memory` in bytes. Once the model has been loaded, llama.cpp has estimated them; before, `weights` is the files' size, `context` an upper bound (nil if it is not known), and the others are nil. */
  estimate: Fields | null;
  /** Nil, or what drafts brought the model in the last 7 days: `drafted` and `accepted` (tokens), and of the steps with drafts `tokens`, `seconds` and `plain_seconds` (the time that these tokens would have taken without drafts). Nil also for models from descriptors. */
  drafts: Fields | null;
  /** The other names of the model, which the configuration gives it with `of`. */
  names: string[];
  /** The bounds of turns by this name: `n-predict-max`, `reasoning-max` (by class) and `priority-max`, as far as the configuration sets them. */
  ceilings: Fields;
  /** Of a graph, array of map: the `name` of each input, its `type` and its `shape`, whose sizes are numbers, or texts if they are free; `shape` is nil if the file does not state it. Nil for other models, and if the file cannot be read before it is loaded. */
  inputs: Fields[] | null;
  /** As `inputs`. */
  outputs: Fields[] | null;
}

export interface FileInfo {
  /** Its name as its author gives it. */
  title: string | null;
  /** Such as `llama`. */
  architecture: string | null;
  /** Such as `Q4_K_M`. */
  quantization: string | null;
  /** Number of its weights. */
  parameters: number;
  /** The context with which it was trained, in tokens. */
  ctx_size_trained: number | null;
  /** Numbers in the embedding of a token. */
  embedding_size: number | null;
  /** Number of its layers. */
  layers: number | null;
  /** Number of those among them that predict further tokens (NextN), with which it can draft. */
  nextn_layers: number;
  /** Its license. */
  license: string | null;
  /** The address of the license's text. */
  license_link: string | null;
  /** Its own chat template, which the parameters `chat-template` and `chat-template-file` replace; nil above 262144 characters. */
  chat_template: string | null;
  /** Whether that template uses tools. */
  supports_tools: boolean;
  /** KV state of a token; layers that attend to a window take less. */
  kv_token_bytes_max: number | null;
}

export interface SessionInfo {
  /** The handle; nil for a dormant session. */
  context: Context | null;
  /** The user to whom it belongs. */
  uid: number;
  /** The name of a gateway's own user, as far as the daemon knows it, or empty. */
  user: string;
  /** The label of the program to which it belongs, or empty. */
  label: string;
  /** Its id, or nil. */
  session_id: string | null;
  /** The model's name. */
  model: string;
  /** `empty`, `ready`, `waiting`, `running`, `parked`, `done`, `failed`, `unloaded` or `dormant`; with `all` and `dormant` also `arriving`, `departed` (moving sessions) or `copy` (copies). */
  state: string;
  /** Priority of its turns. */
  priority: Priority;
  /** Tokens of its history. */
  tokens: number;
  /** Whether it is written to the journal; false if the daemon cannot write; nil without an id, or without `persist`. */
  persisted: boolean | null;
  /** Turns begun so far; a resumed turn keeps its number. */
  turns: number;
  /** Its title: the one that `update_session` has set, or else the first words of its first message; empty for other users' sessions. */
  title: string;
  /** Whether it is kept. */
  kept: boolean;
  /** Of a dormant session: seconds until it is deleted because of its age; nil if it is open or kept. */
  expires_s: number | null;
  /** Whether its last turn was interrupted and can be resumed; false during a turn. */
  interrupted: boolean;
  /** Time since its last use; 0 during a turn. */
  idle_s: number;
  /** Whether it counts in the maximum of sessions; false if it is dormant or has yielded its place. */
  has_place: boolean;
  /** The user for whom a gateway has opened it last, or empty. */
  on_behalf_of: string;
  /** Nil, or of a session that arrives or has departed: `id` and `peer` as the caller of the transfer gave them; of a copy the stream as `id`, and the `peer` that has the session. */
  transfer: Fields | null;
  /** In a fleet, its node; otherwise absent. */
  node?: string | undefined;
}

export function readSessionInfo(fields: Fields): SessionInfo {
  return { ...fields, context: fields.context == null ? null : toHandle<Context>(fields.context) } as unknown as SessionInfo;
}

export interface TaskInfo {
  /** Its number; nil while the turn waits for its model to be loaded. */
  task: number | null;
  /** The user to whom it belongs. */
  uid: number;
  /** The name of a gateway's own user, as far as the daemon knows it, or empty. */
  user: string;
  /** The label of the program to which it belongs, or empty. */
  label: string;
  /** The context's handle. */
  context: Context;
  /** The session's id, or nil. */
  session_id: string | null;
  /** The model's name. */
  model: string;
  /** `waiting`, `running` or `parked`; `encoding` while the embeddings of an image or a sound of its prompt are computed. */
  state: string;
  /** The turn's priority class. */
  priority: Priority;
  /** The class to which waiting has raised it. */
  effective_priority: Priority | null;
  /** 0 in a slot, 1 for the next turn to get one; turns of other users count. */
  position: number | null;
  /** Seconds until it is expected to get a slot; nil if that cannot be estimated: it was parked by hand, or waits for its reader or for KV space. */
  starts_in_s: number | null;
  /** Tokens of the prompt, including the history. */
  prompt_tokens: number;
  /** Tokens of prompt and answer that the engine has computed. */
  computed_tokens: number | null;
  /** Tokens sent so far. */
  output_tokens: number;
  /** Time since it was queued. */
  age_s: number;
  /** In a fleet, its node; otherwise absent. */
  node?: string | undefined;
}

export function readTaskInfo(fields: Fields): TaskInfo {
  return { ...fields, context: toHandle<Context>(fields.context) } as unknown as TaskInfo;
}

export interface Stats {
  /** Time since the start. */
  uptime_s: number;
  /** The daemon's process. */
  pid: number;
  /** Its start count. */
  instance: number;
  /** Whether it refuses new work. */
  draining: boolean;
  /** Whether systemd listens: connections wait there while the daemon restarts. */
  socket_activated: boolean;
  /** Open connections. */
  connections: number;
  /** Open sessions with a place. */
  sessions: number;
  /** Open sessions that have yielded their place. */
  sessions_yielded: number;
  /** The maximum of open sessions. */
  sessions_max: number;
  /** Requests that wait for the place of an open session. */
  sessions_waiting: number;
  /** Dormant sessions. */
  sessions_dormant: number;
  /** Sessions expired since the start. */
  sessions_expired: number;
  /** State of the journal of sessions with an id, a map of `state` (`written`; `failing`: it cannot be written; `refused`: it is a newer version's), `cause` (of the last failure, or nil), `sessions` (their number) and `moved_to` (the path to which a damaged journal, or one of an older version, was moved at the start, or nil). */
  journal: Fields;
  /** The optional components and their health: `config`, `state`, `journal`, `kv-store`, `models`, `models-dir`, `model-files`, `preload`, `memory`, `cores`, `notify`, `metrics`, `traces`, `log`, `uvloop`; for each a map of `component`, `up`, and, if it fails, `cause`, `effect`, `remedy` and `failing_s` (the seconds since then). */
  components: Fields[];
  /** Where Prometheus can scrape the metrics: HOST:PORT or a path; nil: they are not served. */
  metrics_address: string | null;
  /** A map of `file` (the setting `log-file`, or nil), `journal` (nil unless the log goes to systemd's journal; else a map of its `unit`, or nil, and whether it is a `user`'s), `levels` by logger, and `texts` (whether prompts and answers are logged). */
  log: Fields;
  /** Settings whose new values in the configuration file take effect after a restart. */
  pending_restart: string[];
  /** Waiting turns. */
  waiting: number;
  /** Running turns. */
  running: number;
  /** Parked turns. */
  parked: number;
  /** Turns refused with `Busy` since the start. */
  refused: number;
  /** Times since the start that a turn continued in another worker, because its own had died or was swapped. */
  recovered: number;
  /** A histogram of `retry_after_s` divided by the actual time until a retry would have been admitted: a map of the buckets' upper bounds (0.25, 0.5, 0.8, 1.25, 2.0, 4.0, inf) to counts. */
  retry_after_ratio: Fields;
  /** CPU cores that the models share. */
  cores: number;
  /** A map of `low` (whether memory is low now), `free_bytes` (the machine's free memory, less the headroom and, without `memory_bytes`, less the memory reserved for models; negative: missing), `pressure_known` (whether the kernel has pressure stall information), `load_free_bytes` (memory that a load may take now), `load_evictable_bytes` (memory beside it of models without tasks, which a load may have unloaded), and since the start: `low_events` (times that memory became low), `kv_bytes_freed`, `models_unloaded` and `model_bytes_freed`. */
  memory: Fields;
  /** A map of the names of loaded models to their engines' counters. */
  models: Fields;
  /** The metrics in metrics.md, except the histograms and `process_…`: a map of the names, without `inferd_` and `_total`, to an array of maps of the labels and `value`; the models' values come from the daemon's memory, without a query to the engines. */
  metrics: Fields;
  /** In a fleet, those of each node; otherwise absent. */
  nodes?: Fields | undefined;
  /** In a fleet, the nodes that do not answer; otherwise absent. */
  unreachable?: string[] | undefined;
}

export interface ErrorFields {
  /** Its name; never changes once released. */
  name: string;
  /** The name as a number: 0–8 and 100–103 are WasmEdge's, inferd's own begin at 200. */
  number: number;
  /** A description with the values, for people. */
  message: string;
  /** A remedy, for people. */
  hint: string;
  /** Whether the same request may succeed later. */
  retryable: boolean;
  /** Values for programs, as described below. */
  data: Fields;
}

export interface LoadParams {
  /** first: the model's name, or `preload:` and its name; absent or empty with `fd`. Second: parameters as JSON. */
  builders?: Uint8Array[] | undefined;
  /** A graph encoding: that of the model (ggml, onnx, openvino, tensorflow or tensorflowlite), or autodetect; others are `InvalidEncoding`. */
  encoding?: number | string | undefined;
  /** An execution target: cpu puts no layers on the GPU, gpu all that the configuration allows; tpu and npu are `UnsupportedOperation`. */
  target?: number | string | undefined;
  /** 0 or more: the model's file in a descriptor; such a model has no projector, and reads only text. */
  fd?: number | undefined;
  /** With `fd` and the encoding openvino: the bytes of the model's weights (`NAME.bin`) in another descriptor, as a tensor; nil: it has none. */
  weights?: Tensor | null | undefined;
  /** Send events while it loads. */
  progress?: boolean | undefined;
}

export interface LoadResult {
  /** The handle. */
  graph: Graph;
  /** The model's name. */
  model: string;
  /** Identifies the computation: file, slots, llama.cpp's build. */
  fingerprint: string;
  /** Context size of this graph, in tokens. */
  ctx_size: number;
  /** Turns that the model's engine computes at the same time. */
  slots: number;
  /** The special tokens that the vocabulary has: by name (`bos`, `eos`, `eot`, `sep`, `nl`, `pad`, `mask`, and to fill in the middle `fim-pre`, `fim-suf`, `fim-mid`, `fim-pad`, `fim-rep`, `fim-sep`) a map with `id` and `text`. */
  special_tokens: Fields;
  /** Requested parameters that are not in force, with the values in force. */
  not_applied: Fields;
  /** Unknown keys. */
  ignored: string[];
  /** Parameters out of their range, with the values used instead. */
  adjusted: Fields;
  /** Whether the model computes tensors; see `compute`. */
  tensors: boolean;
}

export function readLoadResult(fields: Fields): LoadResult {
  return { model: "", fingerprint: "", ctx_size: 0, slots: 0, special_tokens: {}, not_applied: {}, ignored: [], adjusted: {}, tensors: false, ...fields, graph: toHandle<Graph>(fields.graph) } as unknown as LoadResult;
}

export interface LoadEvent {
  /** Progress of the load, or the copied fraction of the file, 0 … 1. */
  progress: number;
}

export function readLoadEvent(fields: Fields): LoadEvent {
  return { ...fields } as unknown as LoadEvent;
}

export interface LoadByNameParams {
  /** The model's name, as `models` lists it, or another form of it. */
  name: string;
  /** Send events while it loads. */
  progress?: boolean | undefined;
}

export type LoadByNameResult = LoadResult;

export type LoadByNameEvent = LoadEvent;

export interface LoadByNameWithConfigParams {
  /** The model's name. */
  name: string;
  /** Parameters as JSON; they hold for this graph only. */
  config?: string | undefined;
  /** Send events while it loads. */
  progress?: boolean | undefined;
}

export type LoadByNameWithConfigResult = LoadResult;

export type LoadByNameWithConfigEvent = LoadEvent;

export interface InitExecutionContextParams {
  /** The graph's handle. */
  graph: Graph;
  /** The class of the context's turns, and of the wait; empty: `normal`. */
  priority?: Priority | "" | undefined;
  /** The longest wait for a place; 0: fail at once. */
  queue_timeout_s?: number | undefined;
  /** The name of the state with which the context begins, or of a shared one; empty: no history. */
  from_state?: string | undefined;
}

export interface InitExecutionContextResult {
  /** The handle. */
  context: Context;
  /** The session existed before and has its history. */
  attached: boolean;
}

export function readInitExecutionContextResult(fields: Fields): InitExecutionContextResult {
  return { attached: false, ...fields, context: toHandle<Context>(fields.context) } as unknown as InitExecutionContextResult;
}

export interface SetInputParams {
  /** The handle. */
  context: Context;
  /** 1: parameters; any other: the prompt. */
  index: number;
  /** The bytes. */
  tensor: Tensor;
}

export interface ComputeParams {
  /** The handle. */
  context: Context;
  /** Named tensors; nil: use the inputs from `set_input`. */
  inputs?: [string, Tensor][] | null | undefined;
  /** With `inputs` of a graph: the names of outputs that stay in the daemon. */
  keep?: string[] | undefined;
  /** With `inputs` of a graph: the names of outputs that are written to buffers, each with the buffer's handle, the offset of its place, and the bytes that are free there. */
  outputs?: [string, number, number, number][] | undefined;
  /** The handles of kept tensors that are freed before anything else; unknown ones are ignored. */
  free?: number[] | undefined;
  /** Of the turns that the call begins; empty: the context's, for `resume` the previous one, for `embed` and `rerank` normal. */
  priority?: Priority | "" | undefined;
  /** Each turn that the call begins must begin within this; 0: no bound. */
  queue_timeout_s?: number | undefined;
  /** Each turn that the call begins must end within this, for `embed` and `rerank` all of them; 0: no bound. */
  timeout_s?: number | undefined;
  /** The caller's span; see traces. */
  traceparent?: string | undefined;
}

export interface ComputeResult {
  /** With `inputs`: those of the tensor model; or, with a prompt, one tensor named `output`. It has the prompt's type and shape if it has the prompt's length, else type u8. */
  outputs: [string, Tensor][];
  /** With `inputs`: the metadata; empty for a graph, which has no turns. */
  metadata: Metadata;
}

export function readComputeResult(fields: Fields): ComputeResult {
  return { outputs: [], metadata: {}, ...fields } as unknown as ComputeResult;
}

export interface FreeTensorsParams {
  /** The handles; unknown ones are ignored. */
  tensors: number[];
}

export interface RegisterBufferParams {
  /** 0 or more: the buffer is a memfd in a descriptor, sealed with `F_SEAL_SHRINK`, `F_SEAL_GROW` and `F_SEAL_SEAL`. */
  fd?: number | undefined;
  /** Without `fd`: the bytes of a new buffer, which are zeros. */
  size?: number | undefined;
}

export interface RegisterBufferResult {
  /** The handle. */
  buffer: number;
  /** Its bytes. */
  size: number;
}

export function readRegisterBufferResult(fields: Fields): RegisterBufferResult {
  return { ...fields } as unknown as RegisterBufferResult;
}

export interface WriteBufferParams {
  /** The handle. */
  buffer: number;
  /** The place of the first byte. */
  offset: number;
  /** The bytes. */
  data: Uint8Array;
}

export interface ReadBufferParams {
  /** The handle. */
  buffer: number;
  /** The place of the first byte. */
  offset: number;
  /** The number of bytes, at most `BUFFER_PART_BYTES_MAX`. */
  size: number;
}

export interface ReadBufferResult {
  /** The bytes. */
  data: Uint8Array;
}

export function readReadBufferResult(fields: Fields): ReadBufferResult {
  return { ...fields } as unknown as ReadBufferResult;
}

export interface FreeBuffersParams {
  /** The handles; unknown ones are ignored. */
  buffers: number[];
}

export interface OpenChannelParams {
  /** The graph's handle. */
  graph: Graph;
  /** 0 or more: a connected Unix stream socket in a descriptor. */
  fd: number;
}

export interface ComputeSingleParams {
  /** The handle. */
  context: Context;
  /** Of the turns that the call begins; empty: the context's, for `resume` the previous one, for `embed` and `rerank` normal. */
  priority?: Priority | "" | undefined;
  /** Each turn that the call begins must begin within this; 0: no bound. */
  queue_timeout_s?: number | undefined;
  /** Each turn that the call begins must end within this, for `embed` and `rerank` all of them; 0: no bound. */
  timeout_s?: number | undefined;
  /** The caller's span; see traces. */
  traceparent?: string | undefined;
}

export interface ComputeSingleResult {
  /** The bytes that `get_output_single` would return, which saves that call. Empty while a character or a possible stop text is incomplete. */
  piece: Uint8Array;
}

export function readComputeSingleResult(fields: Fields): ComputeSingleResult {
  return { piece: new Uint8Array(), ...fields } as unknown as ComputeSingleResult;
}

export interface GetOutputParams {
  /** The handle. */
  context: Context;
  /** 0 or 1, else `NotFound`. */
  index?: number | undefined;
  /** Size of the caller's buffer in bytes; a longer output is `TooLarge` with `data.needed`, and nothing is lost. −1: unlimited. */
  size_max?: number | undefined;
}

export interface GetOutputResult {
  /** The bytes. */
  data: Uint8Array;
}

export function readGetOutputResult(fields: Fields): GetOutputResult {
  return { ...fields } as unknown as GetOutputResult;
}

export type GetOutputSingleParams = GetOutputParams;

export type GetOutputSingleResult = GetOutputResult;

export interface FiniSingleParams {
  /** The handle. */
  context: Context;
}

export interface FinalizeExecutionContextParams {
  /** The handle. */
  context: Context;
  /** Make a session with an id dormant until it is opened again. */
  keep?: boolean | undefined;
}

export interface UnloadParams {
  /** The graph's handle. */
  graph: Graph;
  /** Keep the model loaded for as long as the daemon keeps an idle model. */
  keep?: boolean | undefined;
}

export type PromptInitParams = InitExecutionContextParams;

export type PromptInitResult = InitExecutionContextResult;

export interface PromptComputeParams {
  /** The handle. */
  context: Context;
  /** The text. */
  prompt: string;
  /** For this turn. */
  priority?: Priority | "" | undefined;
  /** The turn must end within this; 0: no bound. */
  timeout_s?: number | undefined;
  /** The caller's span; see traces. */
  traceparent?: string | undefined;
}

export interface PromptComputeResult {
  /** The answer. */
  text: string;
}

export function readPromptComputeResult(fields: Fields): PromptComputeResult {
  return { ...fields } as unknown as PromptComputeResult;
}

export interface InitBackendParams {
  /** JSON. */
  config?: string | undefined;
}

export interface InitBackendResult {
  /** The ignored keys. */
  ignored: string[];
}

export function readInitBackendResult(fields: Fields): InitBackendResult {
  return { ignored: [], ...fields } as unknown as InitBackendResult;
}

export interface InitExecutionContextWithSessionIdParams {
  /** A graph of the model that the session began with. */
  graph: Graph;
  /** 1 to 128 characters. */
  session_id: string;
  /** The session and its KV state may be written to disk; false is permanent for a session. */
  persist?: boolean | undefined;
  /** The class of the session's turns, and of the wait; empty: the session's, or `normal`. */
  priority?: Priority | "" | undefined;
  /** The longest wait for a place; 0: fail at once. */
  queue_timeout_s?: number | undefined;
  /** The name of the state with which a new session begins, or of a shared one; an existing session keeps its history. */
  from_state?: string | undefined;
}

export type InitExecutionContextWithSessionIdResult = InitExecutionContextResult;

export type CloseExecutionContextParams = FinalizeExecutionContextParams;

export interface RunInferenceParams {
  /** The handle. */
  context: Context;
  /** The text, as for `set_input`; zero bytes at its end are removed. */
  tensor: Tensor;
  /** Ignored. */
  index?: number | undefined;
  /** Parameters for this turn as JSON. */
  config?: string | undefined;
  /** As in `get_output`. */
  size_max?: number | undefined;
  /** For this turn. */
  priority?: Priority | "" | undefined;
  /** The turn must end within this; 0: no bound. */
  timeout_s?: number | undefined;
  /** The caller's span; see traces. */
  traceparent?: string | undefined;
}

export interface RunInferenceResult {
  /** The answer; of a stream the rest of it, which was withheld until the end. */
  text: Uint8Array;
  /** The reasoning before the answer, with `reasoning-format`; of a stream the rest of it. */
  reasoning: Uint8Array;
  /** The answer's tool calls; of a stream the last parts of them. */
  tool_calls: ToolCallPart[];
  /** The metadata. */
  metadata: Metadata;
}

export function readRunInferenceResult(fields: Fields): RunInferenceResult {
  return { text: new Uint8Array(), reasoning: new Uint8Array(), metadata: {}, ...fields, tool_calls: list(fields.tool_calls).map((item) => readToolCallPart(item as Fields)) } as unknown as RunInferenceResult;
}

export interface StreamParams {
  /** The handle. */
  context: Context;
  /** The user's next message. */
  prompt?: string | null | undefined;
  /** Token ids of the model, added to the history unchanged; with them, `prompt` and `raw` are ignored. */
  prompt_tokens?: number[] | null | undefined;
  /** 1 to 1000 messages; with them, `prompt`, `prompt_tokens` and `raw` are ignored. */
  messages?: Message[] | null | undefined;
  /** text to fill in, which replaces the history; with it, all other input is ignored. */
  infill?: Infill | null | undefined;
  /** Add `prompt` unchanged. */
  raw?: boolean | undefined;
  /** parameters for this turn; unknown keys are `InvalidArgument`. */
  options?: ModelParameters | undefined;
  /** A key: this request cancels the caller's earlier one with the same key that has not ended, before its next step; empty: none. */
  supersede?: string | undefined;
  /** Of the turns that the call begins; empty: the context's, for `resume` the previous one, for `embed` and `rerank` normal. */
  priority?: Priority | "" | undefined;
  /** Each turn that the call begins must begin within this; 0: no bound. */
  queue_timeout_s?: number | undefined;
  /** Each turn that the call begins must end within this, for `embed` and `rerank` all of them; 0: no bound. */
  timeout_s?: number | undefined;
  /** The caller's span; see traces. */
  traceparent?: string | undefined;
  /** events that may be sent at first, 1 … 1024; of `resume` a first event with the daemon's output so far is not counted. */
  credit?: number | undefined;
  /** Send the turn's position in the queue. */
  queue_events?: boolean | undefined;
  /** Send the progress of the prompt; ignored by `chat`. */
  prompt_progress?: boolean | undefined;
  /** Send an event when the turn gets its slot. */
  start_event?: boolean | undefined;
}

export type StreamResult = RunInferenceResult;

export interface StreamEvent {
  /** Ids of the new tokens. */
  tokens: number[];
  /** The text that they release: whole UTF-8 characters, and nothing that a stop text may still cut. */
  text: Uint8Array;
  /** The reasoning that they release instead of text, with the parameter `reasoning-format`. */
  reasoning: Uint8Array;
  /** The parts of tool calls that they release. */
  tool_calls: ToolCallPart[];
  /** In a turn that may have tool calls or marks other than `<think>`: the text with reasoning and calls as the model wrote them, where it differs from `text`. */
  raw_text: Uint8Array;
  /** Number of the answer's tokens before these. */
  offset: number;
  /** With `n-probs`: the tokens' logprobs, see metadata. */
  completion_probabilities: Fields[];
  /** With `prompt-logprobs`, in the events before the first token: the next of the prompt's logprobs, see metadata. */
  prompt_logprobs: Fields[];
  /** Number of the prompt's tokens before these; a turn that another worker repeats may begin at 0 again. */
  prompt_offset: number;
  /** With the param `prompt_progress`, in events of their own: `total`, `cache` (not computed), and `processed` tokens of the prompt, and `time_ms` since the first slot. */
  prompt_progress: Fields;
}

export function readStreamEvent(fields: Fields): StreamEvent {
  return { tokens: [], text: new Uint8Array(), reasoning: new Uint8Array(), raw_text: new Uint8Array(), offset: 0, completion_probabilities: [], prompt_logprobs: [], prompt_offset: 0, prompt_progress: {}, ...fields, tool_calls: list(fields.tool_calls).map((item) => readToolCallPart(item as Fields)) } as unknown as StreamEvent;
}

export interface QueueEvent {
  /** 1: the next turn to get a slot; 0: it has one. */
  position: number;
  /** Turns of all users that wait for the model; with position 0 it is 0. */
  waiting: number;
  /** Seconds until the turn is expected to get a slot; nil: it cannot be estimated. */
  starts_in_s: number | null;
}

export function readQueueEvent(fields: Fields): QueueEvent {
  return { ...fields } as unknown as QueueEvent;
}

export type ChatParams = StreamParams;

export type ChatResult = RunInferenceResult;

export interface AnswersParams {
  /** The handle. */
  context: Context;
  /** Number of answers, 1 … 16. */
  n?: number | undefined;
  /** As in `stream`; without `prompt` and `messages`, the turns compute the input that `set_input` left. */
  prompt?: string | null | undefined;
  /** As in `stream`. */
  prompt_tokens?: number[] | null | undefined;
  /** As in `stream`. */
  messages?: Message[] | null | undefined;
  /** As in `stream`. */
  infill?: Infill | null | undefined;
  /** Add `prompt` unchanged. */
  raw?: boolean | undefined;
  /** parameters for these turns. */
  options?: ModelParameters | undefined;
  /** As in `stream`. */
  supersede?: string | undefined;
  /** Of the turns that the call begins; empty: the context's, for `resume` the previous one, for `embed` and `rerank` normal. */
  priority?: Priority | "" | undefined;
  /** Each turn that the call begins must begin within this; 0: no bound. */
  queue_timeout_s?: number | undefined;
  /** Each turn that the call begins must end within this, for `embed` and `rerank` all of them; 0: no bound. */
  timeout_s?: number | undefined;
  /** The caller's span; see traces. */
  traceparent?: string | undefined;
}

export interface AnswersResult {
  /** In their order: `text`, `reasoning` and `tool_calls` as in `chat`, `metadata` (its metadata), and `error`, nil or the error with which it failed; `text` is then its output until the error. */
  answers: AnswerFields[];
}

export function readAnswersResult(fields: Fields): AnswersResult {
  return { ...fields } as unknown as AnswersResult;
}

export interface AnswersEvent {
  /** The contexts of the answers, sent once the first answer has begun: `cancel` ends a running one. */
  contexts: Context[];
}

export function readAnswersEvent(fields: Fields): AnswersEvent {
  return { ...fields, contexts: list(fields.contexts).map((item) => toHandle<Context>(item)) } as unknown as AnswersEvent;
}

export interface ResumeParams {
  /** The handle. */
  context: Context;
  /** The answer's tokens that the client has, from the first one on. */
  tokens?: number[] | undefined;
  /** The answer's text that the client has, from the same events. */
  text?: Uint8Array | undefined;
  /** The answer's reasoning that the client has, likewise. */
  reasoning?: Uint8Array | undefined;
  /** Of a turn that may have tool calls or marks other than `<think>`, instead of both: the `raw_text` of its events, or their `text` where they have none. */
  raw_text?: Uint8Array | undefined;
  /** Of the turns that the call begins; empty: the context's, for `resume` the previous one, for `embed` and `rerank` normal. */
  priority?: Priority | "" | undefined;
  /** Each turn that the call begins must begin within this; 0: no bound. */
  queue_timeout_s?: number | undefined;
  /** Each turn that the call begins must end within this, for `embed` and `rerank` all of them; 0: no bound. */
  timeout_s?: number | undefined;
  /** The caller's span; see traces. */
  traceparent?: string | undefined;
  /** events that may be sent at first, 1 … 1024; of `resume` a first event with the daemon's output so far is not counted. */
  credit?: number | undefined;
  /** Send the turn's position in the queue. */
  queue_events?: boolean | undefined;
  /** Send the progress of the prompt; ignored by `chat`. */
  prompt_progress?: boolean | undefined;
  /** Send an event when the turn gets its slot. */
  start_event?: boolean | undefined;
}

export type ResumeResult = RunInferenceResult;

export type ResumeEvent = StreamEvent;

export interface EmbedParams {
  /** The handle. */
  graph: Graph;
  /** 1 to 256. */
  texts: string[];
  /** `none`, `mean`, `cls`, `last`, `rank`; empty: the model's own, else `mean`. */
  pooling?: string | undefined;
  /** -1 none, 0 the largest number is 32760, 1 taxicab, 2 euclidean, 3 to 32 that norm; vectors of `none` and `rank` are not normalized. */
  normalize?: number | undefined;
  /** Leave out the end of a text that is too long, instead of refusing it. */
  truncate?: boolean | undefined;
  /** Of the turns that the call begins; empty: the context's, for `resume` the previous one, for `embed` and `rerank` normal. */
  priority?: Priority | "" | undefined;
  /** Each turn that the call begins must begin within this; 0: no bound. */
  queue_timeout_s?: number | undefined;
  /** Each turn that the call begins must end within this, for `embed` and `rerank` all of them; 0: no bound. */
  timeout_s?: number | undefined;
  /** The caller's span; see traces. */
  traceparent?: string | undefined;
}

export interface EmbedResult {
  /** One for each text, in their order: a vector of `size` float32, little-endian; with `none` one vector for each token. */
  embeddings: Uint8Array[];
  /** Length of a vector. */
  size: number;
  /** The pooling that was used. */
  pooling: string;
  /** Number of tokens of each text. */
  tokens: number[];
  /** The indexes of the texts whose end was left out. */
  truncated: number[];
  /** The model's name. */
  model: string;
  /** The model's fingerprint. */
  fingerprint: string;
}

export function readEmbedResult(fields: Fields): EmbedResult {
  return { tokens: [], truncated: [], model: "", fingerprint: "", ...fields } as unknown as EmbedResult;
}

export interface RerankParams {
  /** The handle. */
  graph: Graph;
  /** The query. */
  query: string;
  /** 1 to 256. */
  documents: string[];
  /** Return only this many documents, those with the highest scores; 0: all. */
  top_n?: number | undefined;
  /** Leave out the end of a document that is too long, instead of refusing it. */
  truncate?: boolean | undefined;
  /** Of the turns that the call begins; empty: the context's, for `resume` the previous one, for `embed` and `rerank` normal. */
  priority?: Priority | "" | undefined;
  /** Each turn that the call begins must begin within this; 0: no bound. */
  queue_timeout_s?: number | undefined;
  /** Each turn that the call begins must end within this, for `embed` and `rerank` all of them; 0: no bound. */
  timeout_s?: number | undefined;
  /** The caller's span; see traces. */
  traceparent?: string | undefined;
}

export interface RerankResult {
  /** The places of the documents in the request, from 0, by descending score. */
  indexes: number[];
  /** One for each of `indexes`, from 0 to 1: the raw score if the model returns probabilities, else its sigmoid. */
  scores: number[];
  /** One for each of `indexes`: the model's output. */
  raw_scores: number[];
  /** The indexes of the documents whose end was left out. */
  truncated: number[];
  /** The number of tokens of all documents, each with the query. */
  tokens: number;
  /** Of these, the tokens of the query that were not computed again for each document. */
  cached_tokens: number;
  /** The model's name. */
  model: string;
  /** The model's fingerprint. */
  fingerprint: string;
}

export function readRerankResult(fields: Fields): RerankResult {
  return { truncated: [], tokens: 0, cached_tokens: 0, model: "", fingerprint: "", ...fields } as unknown as RerankResult;
}

export interface CancelParams {
  /** A request's id on this connection. */
  request?: number | null | undefined;
  /** A context of this user, or for an operator of any user; give either `request` or `context`. */
  context?: Context | null | undefined;
}

export interface CancelResult {
  /** Whether a turn or request was cancelled. */
  cancelled: boolean;
}

export function readCancelResult(fields: Fields): CancelResult {
  return { ...fields } as unknown as CancelResult;
}

export type ParkParams = FiniSingleParams;

export interface ParkResult {
  /** Whether the turn yields; false also if there is no turn, or no memory for its state. */
  parked: boolean;
}

export function readParkResult(fields: Fields): ParkResult {
  return { ...fields } as unknown as ParkResult;
}

export type EndReasoningParams = FiniSingleParams;

export interface EndReasoningResult {
  /** Whether the present thought ends: its end is added to the answer at the next whole character, behind the `reasoning-budget-message`. */
  ended: boolean;
  /** The reason why it does not end. `no_turn`: no turn is under way. `not_reasoning`: its answer does not reason, or no longer. `refused_by_grammar`: its grammar does not allow the end here. `no_worker`: it waits for a place, or its worker is being replaced; try again. */
  reason: string;
}

export function readEndReasoningResult(fields: Fields): EndReasoningResult {
  return { reason: "", ...fields } as unknown as EndReasoningResult;
}

export interface ResetParams {
  /** The handle. */
  context: Context;
  /** The first message of the new history, by the chat template. */
  system?: string | null | undefined;
}

export interface RewindParams {
  /** The handle. */
  context: Context;
  /** Go back this many turns, 1 or more; the last 1000 are remembered. */
  turns?: number | null | undefined;
  /** Keep this many tokens, 0 or more. */
  tokens?: number | null | undefined;
}

export interface RewindResult {
  /** Tokens left in the history. */
  tokens: number;
  /** Turns that can still be removed. */
  turns: number;
  /** Tokens of the history that currently need not be computed again. */
  cached_tokens: number;
  /** `cached`, or `recomputed`: the next turn computes more than the last token of the history again. */
  kv: string;
}

export function readRewindResult(fields: Fields): RewindResult {
  return { tokens: 0, turns: 0, cached_tokens: 0, kv: "cached", ...fields } as unknown as RewindResult;
}

export interface ForkSessionParams {
  /** The handle. */
  context: Context;
  /** Number of branches, 1 … 16. */
  n?: number | undefined;
  /** An id for each branch, all different and not in use; empty: the branches have no id. */
  session_ids?: string[] | undefined;
  /** The class of the wait for places; empty: the context's. */
  priority?: Priority | "" | undefined;
  /** The longest wait for places; 0: fail at once. */
  queue_timeout_s?: number | undefined;
}

export interface ForkSessionResult {
  /** The branches' handles. */
  contexts: Context[];
  /** Tokens of the history. */
  tokens: number;
  /** Tokens of the history that a branch currently need not compute again. */
  cached_tokens: number;
  /** As in `rewind`. */
  kv: string;
}

export function readForkSessionResult(fields: Fields): ForkSessionResult {
  return { tokens: 0, cached_tokens: 0, kv: "cached", ...fields, contexts: list(fields.contexts).map((item) => toHandle<Context>(item)) } as unknown as ForkSessionResult;
}

export interface HistoryParams {
  /** A context of this connection. */
  context?: Context | null | undefined;
  /** A session by its id. */
  session_id?: string | null | undefined;
}

export interface HistoryResult {
  /** The messages, with the answer of a turn under way so far; empty if the history is raw text. A message that the model no longer reads, because the context was full, has `dropped: true`. */
  messages: Message[];
  /** For each turn that `rewind` can remove, the number of messages before it, the latest turn last. */
  turns: number[];
  /** The session, as `sessions` describes it. */
  session: Fields;
  /** The note that `set_options` has stored. */
  note: Uint8Array;
  /** The session's own parameters, as `set_options` and `update_session` have set them. */
  options: ModelParameters;
}

export function readHistoryResult(fields: Fields): HistoryResult {
  return { note: new Uint8Array(), options: {}, ...fields } as unknown as HistoryResult;
}

export interface SessionMediaParams {
  /** A context of this connection. */
  context?: Context | null | undefined;
  /** A session by its id. */
  session_id?: string | null | undefined;
  /** The hash of an image or a sound in the session's messages, as `history` has it. */
  sha256: string;
  /** The first byte to return. */
  offset?: number | undefined;
}

export interface SessionMediaResult {
  /** At most `PART_BYTES` from `offset` on; empty at the end. */
  data: Uint8Array;
  /** Bytes of the whole content. */
  size: number;
  /** Its type, such as `image/png`. */
  media_type: string;
}

export function readSessionMediaResult(fields: Fields): SessionMediaResult {
  return { media_type: "", ...fields } as unknown as SessionMediaResult;
}

export interface DeleteSessionParams {
  /** A context of this connection. */
  context?: Context | null | undefined;
  /** A session of this user and label. */
  session_id?: string | null | undefined;
  /** With a `session_id`: seconds in which `restore_session` restores it, up to 3600. */
  undo_s?: number | undefined;
}

export interface DeleteSessionResult {
  /** Whether there was such a session. */
  deleted: boolean;
}

export function readDeleteSessionResult(fields: Fields): DeleteSessionResult {
  return { ...fields } as unknown as DeleteSessionResult;
}

export interface UpdateSessionParams {
  /** The session. */
  session_id: string;
  /** Its title, up to 200 characters; empty: the first words of its first message; nil: unchanged. */
  title?: string | null | undefined;
  /** Whether it is kept: it is then not deleted while it is dormant; nil: unchanged. */
  kept?: boolean | null | undefined;
  /** Of its turns from now on; empty: unchanged. */
  priority?: Priority | "" | undefined;
  /** parameters, as in `set_options`. */
  options?: ModelParameters | undefined;
  /** Parameters that lose the session's own value. */
  unset?: string[] | undefined;
}

export interface UpdateSessionResult {
  /** The session, as `sessions` describes it. */
  session: Fields;
}

export function readUpdateSessionResult(fields: Fields): UpdateSessionResult {
  return { ...fields } as unknown as UpdateSessionResult;
}

export interface RestoreSessionParams {
  /** The session. */
  session_id: string;
}

export type RestoreSessionResult = UpdateSessionResult;

export interface ListDeletionsParams {
  /** Delete the notes that are returned. */
  clear?: boolean | undefined;
}

export interface ListDeletionsResult {
  /** One note each. */
  deletions: Fields[];
}

export function readListDeletionsResult(fields: Fields): ListDeletionsResult {
  return { ...fields } as unknown as ListDeletionsResult;
}

export interface SaveStateParams {
  /** The handle. */
  context: Context;
  /** 1 to 128 characters; of this user and label. */
  name: string;
  /** The state replaces one that has the name. */
  replace?: boolean | undefined;
}

export interface SaveStateResult {
  /** Tokens of the history. */
  tokens: number;
  /** Tokens whose KV state is on disk; 0: they are computed again when they are needed. */
  stored_tokens: number;
}

export function readSaveStateResult(fields: Fields): SaveStateResult {
  return { tokens: 0, stored_tokens: 0, ...fields } as unknown as SaveStateResult;
}

export interface ListStatesResult {
  /** One state each: the caller's by their names, then those that access rules share with the caller. */
  states: Fields[];
}

export function readListStatesResult(fields: Fields): ListStatesResult {
  return { ...fields } as unknown as ListStatesResult;
}

export interface DeleteStateParams {
  /** A state of this user and label. */
  name: string;
}

export interface DeleteStateResult {
  /** Whether there was such a state. */
  deleted: boolean;
}

export function readDeleteStateResult(fields: Fields): DeleteStateResult {
  return { ...fields } as unknown as DeleteStateResult;
}

export interface ExportSessionParams {
  /** The session. */
  session_id: string;
  /** The transfer's id, of 1 to 64 characters; it must be a new one for each transfer. */
  transfer: string;
  /** The session's user, who may be another one for an operator; nil: the caller's. */
  uid?: number | null | undefined;
  /** The session's label. */
  label?: string | undefined;
  /** The caller's name of the other daemon, for `sessions`. */
  peer?: string | undefined;
  /** The first byte of the part; 0 begins the transfer. */
  offset?: number | undefined;
}

export interface ExportSessionResult {
  /** The part. */
  data: Uint8Array;
  /** The size of all parts. */
  size: number;
  /** The session's user as a gateway has named it; empty: the caller's user. */
  on_behalf_of: string;
}

export function readExportSessionResult(fields: Fields): ExportSessionResult {
  return { on_behalf_of: "", ...fields } as unknown as ExportSessionResult;
}

export interface ImportSessionParams {
  /** The session. */
  session_id: string;
  /** The transfer's id. */
  transfer: string;
  /** The part. */
  data: Uint8Array;
  /** The size of all parts. */
  size: number;
  /** The session's user; empty: the caller's. */
  on_behalf_of?: string | undefined;
  /** The session's label. */
  label?: string | undefined;
  /** The caller's name of the other daemon, for `sessions`. */
  peer?: string | undefined;
  /** The first byte of the part; 0 begins again. */
  offset?: number | undefined;
}

export interface ImportSessionResult {
  /** The number of bytes after which the session has arrived. */
  size: number;
}

export function readImportSessionResult(fields: Fields): ImportSessionResult {
  return { ...fields } as unknown as ImportSessionResult;
}

export interface EndTransferParams {
  /** The transfer's id. */
  transfer: string;
  /** Of a held session, on the connection that exports it: `keep` or `release`; of one whose parts are still being imported over this connection: `drop`; of an arriving one, or of a copy: `keep` or `drop`; of the record of a departed one: `drop`. */
  outcome: string;
}

export interface ReadCopyParams {
  /** The session. */
  session_id: string;
  /** The session's user; empty: the caller's. */
  on_behalf_of?: string | undefined;
  /** The session's label. */
  label?: string | undefined;
}

export interface ReadCopyResult {
  /** The stream; if the session is open and its changes are sent, they continue this stream. */
  stream: string;
  /** The number of this change in it. */
  number: number;
  /** The whole session as a change. */
  data: Uint8Array;
  /** The session's model. */
  model: string;
}

export function readReadCopyResult(fields: Fields): ReadCopyResult {
  return { ...fields } as unknown as ReadCopyResult;
}

export interface StoreCopyParams {
  /** The session. */
  session_id: string;
  /** The stream of the change, of 1 to 64 characters. */
  stream: string;
  /** Its number. */
  number: number;
  /** The change, or a part of it. */
  data: Uint8Array;
  /** The size of all parts. */
  size: number;
  /** The session's user; empty: the caller's. */
  on_behalf_of?: string | undefined;
  /** The session's label. */
  label?: string | undefined;
  /** The caller's name of the daemon that has the session, for `sessions`. */
  peer?: string | undefined;
  /** The first byte of the part; 0 begins again. */
  offset?: number | undefined;
}

export interface SetOptionsParams {
  /** The handle. */
  context: Context;
  /** parameters; unknown keys are `InvalidArgument`. */
  options?: ModelParameters | undefined;
  /** Of the context's turns from now on; empty: unchanged. */
  priority?: Priority | "" | undefined;
  /** Bytes of the client's own, up to 256 KiB, which stay with the session as long as it exists; `history` returns them. Branches and named states have none. Empty: none; nil: unchanged. */
  note?: Uint8Array | null | undefined;
}

export type ParametersParams = FiniSingleParams;

export interface ParametersResult {
  /** One parameter each. */
  parameters: Fields[];
}

export function readParametersResult(fields: Fields): ParametersResult {
  return { ...fields } as unknown as ParametersResult;
}

export interface ModelsParams {
  /** Also return the files of the models directory that are not offered as models. */
  all_files?: boolean | undefined;
}

export interface ModelsResult {
  /** One model each. */
  models: ModelInfo[];
  /** With `all_files`: the `file`, a path below the models directory, and the `reason`; of a fleet also the `node`. */
  not_offered: Fields[];
}

export function readModelsResult(fields: Fields): ModelsResult {
  return { not_offered: [], ...fields } as unknown as ModelsResult;
}

export interface ShowParams {
  /** The model's name. */
  name: string;
  /** Also unload a model in use: its turns end with `Cancelled`, and `data.by` is `operator`; no effect on `show`. */
  force?: boolean | undefined;
}

export type UnloadModelParams = ShowParams;

export interface PinParams {
  /** The model's name. */
  name: string;
}

export interface SwapParams {
  /** The name that gets another model. */
  name: string;
  /** Another model's name, the name of a file in the models directory, or `name` itself. */
  to: string;
  /** `migrate`: load it beside the old one, if memory holds both; `drain`: in its place. */
  mode?: string | undefined;
  /** Swap even if the new model only makes embeddings and sessions of the name generate text. */
  force?: boolean | undefined;
}

export interface SwapResult {
  /** Fingerprint of the model that now has the name. */
  fingerprint: string;
  /** Fingerprint of the model that had the name; empty: it was not loaded. */
  previous_fingerprint: string;
  /** The mode that was used: `migrate` or `drain`. */
  mode: string;
  /** Only from a fleet: the nodes that have swapped. */
  nodes: string[];
  /** Only from a fleet: nodes that cannot be reached, which keep the old model if they have it. */
  unreachable: string[];
}

export function readSwapResult(fields: Fields): SwapResult {
  return { previous_fingerprint: "", mode: "migrate", nodes: [], unreachable: [], ...fields } as unknown as SwapResult;
}

export type UnpinParams = PinParams;

export interface AddAdapterParams {
  /** The model's name. */
  name: string;
  /** The adapter's name. */
  adapter: string;
  /** Its file, in the models directory; links cannot lead out of it. */
  file: string;
  /** Used by turns that select no adapters; 0: they do not use it. */
  scale?: number | undefined;
}

export interface AddAdapterResult {
  /** Whether it is in memory, and therefore checked. */
  loaded: boolean;
  /** A hash of the file. */
  id: string;
  /** Its memory. */
  size_bytes: number;
}

export function readAddAdapterResult(fields: Fields): AddAdapterResult {
  return { loaded: false, id: "", size_bytes: 0, ...fields } as unknown as AddAdapterResult;
}

export interface RemoveAdapterParams {
  /** The model's name. */
  name: string;
  /** The adapter's name; an unknown one is `NotFound`. */
  adapter: string;
  /** Turns that use it fail with `Cancelled`. */
  force?: boolean | undefined;
}

export interface ExportModelParams {
  /** The model's name; a swap does not change the file. */
  name: string;
  /** The transfer's id, of 1 to 64 characters; it must be a new one for each transfer. */
  transfer: string;
  /** The first byte of the part; 0 begins the transfer. */
  offset?: number | undefined;
  /** Read the model's projector instead, which reads images or sounds. */
  projector?: boolean | undefined;
}

export interface ExportModelResult {
  /** The part. */
  data: Uint8Array;
  /** The size of the file; 0: the model has no projector. */
  size: number;
  /** With the last part: the SHA-256 of all parts, in hexadecimal digits. */
  sha256: string;
}

export function readExportModelResult(fields: Fields): ExportModelResult {
  return { sha256: "", ...fields } as unknown as ExportModelResult;
}

export interface ImportModelParams {
  /** The name that the model gets. */
  name: string;
  /** The transfer's id. */
  transfer: string;
  /** The part. */
  data: Uint8Array;
  /** The size of the file. */
  size: number;
  /** The first byte of the part; 0 begins the transfer. */
  offset?: number | undefined;
  /** The SHA-256 that the file must have; required with the last part. */
  sha256?: string | undefined;
  /** The file is the model's projector, and becomes `NAME-mmproj.gguf`: together with the model, whose parts follow, or at once if the model is there. */
  projector?: boolean | undefined;
}

export interface ImportModelResult {
  /** Whether this was the last part: the model can be loaded. */
  arrived: boolean;
}

export function readImportModelResult(fields: Fields): ImportModelResult {
  return { arrived: false, ...fields } as unknown as ImportModelResult;
}

export interface EndModelTransferParams {
  /** The transfer's id. */
  transfer: string;
}

export interface AddModelParams {
  /** The name that the model gets. */
  name: string;
  /** The index of the file's descriptor; -1: none. */
  fd?: number | undefined;
  /** The SHA-256 that the file must have, or empty. */
  sha256?: string | undefined;
  /** At most 8 texts by name, to keep beside the file: licences, notices, terms. */
  notes?: Fields | undefined;
  /** Without a descriptor: also return the hash of the file that is there. */
  with_hash?: boolean | undefined;
  /** Send progress events. */
  progress?: boolean | undefined;
}

export interface AddModelResult {
  /** The path of the file. */
  file: string;
  /** Its size; 0 if it does not exist. */
  size_bytes: number;
  /** Its SHA-256, if it was copied, compared or requested. */
  sha256: string;
  /** Whether it was copied; false if it was there, with the same contents. */
  added: boolean;
}

export function readAddModelResult(fields: Fields): AddModelResult {
  return { size_bytes: 0, sha256: "", added: false, ...fields } as unknown as AddModelResult;
}

export type AddModelEvent = LoadEvent;

export interface CopyModelParams {
  /** The model's name. */
  name: string;
  /** The node that gets the file. */
  to: string;
  /** The SHA-256 that the file must have; empty: that of the node that has it. */
  sha256?: string | undefined;
}

export interface CopyModelResult {
  /** The node that had the file. */
  source: string;
  /** Its size. */
  size_bytes: number;
  /** Its SHA-256; empty if it was not copied. */
  sha256: string;
  /** Whether nothing was copied, because the node had a file of this name and size. */
  up_to_date: boolean;
  /** The size of its projector, if that was copied. */
  projector_bytes: number;
}

export function readCopyModelResult(fields: Fields): CopyModelResult {
  return { sha256: "", up_to_date: false, projector_bytes: 0, ...fields } as unknown as CopyModelResult;
}

export interface SessionsParams {
  /** Include dormant sessions: after the others, the longest dormant first. */
  dormant?: boolean | undefined;
  /** The sessions of all users: requires the right *see-all*, else `PermissionDenied`. */
  all?: boolean | undefined;
  /** Only the sessions with this id. */
  session_id?: string | null | undefined;
  /** Only the sessions whose title or first message has this text, in any case; up to 200 characters. Of a first message, the first 300 characters count. Other users' sessions are not searched. */
  search?: string | undefined;
}

export interface SessionsResult {
  /** One session each. */
  sessions: SessionInfo[];
  /** The number of all users' dormant sessions that are not kept, and of open ones without a place. */
  dormant_sessions: number;
  /** The number past which the longest dormant sessions are deleted. */
  dormant_sessions_max: number;
  /** The age past which they are deleted. */
  dormant_s_max: number;
}

export function readSessionsResult(fields: Fields): SessionsResult {
  return { dormant_sessions: 0, dormant_sessions_max: 0, dormant_s_max: 0.0, ...fields, sessions: list(fields.sessions).map((item) => readSessionInfo(item as Fields)) } as unknown as SessionsResult;
}

export interface QueueParams {
  /** The turns of all users: requires the right *see-all*, else `PermissionDenied`. */
  all?: boolean | undefined;
}

export interface QueueResult {
  /** One turn each. */
  tasks: TaskInfo[];
}

export function readQueueResult(fields: Fields): QueueResult {
  return { ...fields, tasks: list(fields.tasks).map((item) => readTaskInfo(item as Fields)) } as unknown as QueueResult;
}

export interface UsageParams {
  /** The columns to group by: `user`, `model`, `label`, `key`, and `hour` or `day`; without any, the result is one sum. */
  by?: string[] | undefined;
  /** The usage of the last seconds, from the beginning of an hour on. */
  since_s?: number | undefined;
  /** The usage of all users: requires the right *see-all*, else `PermissionDenied`. */
  all?: boolean | undefined;
}

export interface UsageResult {
  /** One group each; groups without any usage are left out. */
  usage: Fields[];
  /** The time from which usage counts, in seconds since 1970. */
  since: number;
  /** Without `all`: the limits of the caller's user and key, each a map of `bound` (its setting), `used`, `limit` and `ends_at` (seconds since 1970). */
  limits: Fields[];
}

export function readUsageResult(fields: Fields): UsageResult {
  return { since: 0.0, limits: [], ...fields } as unknown as UsageResult;
}

export interface StatsResult {
  /** The daemon's statistics. */
  stats: Stats;
}

export function readStatsResult(fields: Fields): StatsResult {
  return { ...fields } as unknown as StatsResult;
}

export interface MetricsResult {
  /** All metrics in Prometheus's text format. */
  text: string;
}

export function readMetricsResult(fields: Fields): MetricsResult {
  return { ...fields } as unknown as MetricsResult;
}

export interface ExchangeServedParams {
  /** The tokens that other daemons have computed since the last call: for each model a map of users to tokens, of at most `SERVED_TOKENS_MAX` each. */
  elsewhere?: Fields | undefined;
}

export interface ExchangeServedResult {
  /** The tokens that this daemon has computed so far, in the same form: those of users who have turns, or for whom tokens were computed since the last call. */
  served: Fields;
}

export function readExchangeServedResult(fields: Fields): ExchangeServedResult {
  return { ...fields } as unknown as ExchangeServedResult;
}

export interface TokenizeParams {
  /** The graph's handle. */
  graph: Graph;
  /** The text. */
  text: string;
  /** Convert names of special tokens to these tokens. */
  special?: boolean | undefined;
  /** Add the tokens that the model expects at the start of a prompt. */
  bos?: boolean | undefined;
}

export interface TokenizeResult {
  /** The ids. */
  tokens: number[];
}

export function readTokenizeResult(fields: Fields): TokenizeResult {
  return { ...fields } as unknown as TokenizeResult;
}

export interface DetokenizeParams {
  /** The graph's handle. */
  graph: Graph;
  /** The ids, at most `DETOKENIZE_TOKENS_MAX`: the text of a list is that of its parts, joined. */
  tokens: number[];
  /** Also return the number of each token's bytes. */
  sizes?: boolean | undefined;
}

export interface DetokenizeResult {
  /** The bytes; those of a single token may be incomplete characters. */
  text: Uint8Array;
  /** With `sizes`: the number of bytes of each token, in their order. */
  sizes: number[];
}

export function readDetokenizeResult(fields: Fields): DetokenizeResult {
  return { sizes: [], ...fields } as unknown as DetokenizeResult;
}

export interface ApplyTemplateParams {
  /** The graph's handle. */
  graph: Graph;
  /** As in `stream`. */
  messages: Message[];
  /** As the parameter; empty: the graph's. */
  tools?: Fields[] | undefined;
  /** The template's own arguments, as `chat-template-kwargs`; empty: the graph's. */
  arguments?: Fields | undefined;
  /** End the prompt where an answer begins. */
  add_generation_prompt?: boolean | undefined;
  /** End the prompt with the last message, which begins the answer. */
  continue_final_message?: boolean | undefined;
}

export interface ApplyTemplateResult {
  /** The prompt rendered by the model's chat template. */
  text: Uint8Array;
  /** The prompt's number of tokens. */
  tokens: number;
}

export function readApplyTemplateResult(fields: Fields): ApplyTemplateResult {
  return { tokens: 0, ...fields } as unknown as ApplyTemplateResult;
}

export interface UploadFileParams {
  /** The file's id, which the first part's result has; empty: a new file. */
  file?: string | undefined;
  /** Bytes of the parts before this one. */
  offset?: number | undefined;
  /** The part, of at most 524288 bytes. */
  data?: Uint8Array | undefined;
  /** The file's name, for lists; that of the first part counts. */
  name?: string | undefined;
  /** Whether this is the last part. Before it, the file ends with the connection. */
  end?: boolean | undefined;
}

export interface UploadFileResult {
  /** The file. */
  file: Fields;
}

export function readUploadFileResult(fields: Fields): UploadFileResult {
  return { ...fields } as unknown as UploadFileResult;
}

export interface FilesParams {
  /** Only this file, else `NotFound`. */
  file?: string | undefined;
}

export interface FilesResult {
  /** One file each. */
  files: Fields[];
}

export function readFilesResult(fields: Fields): FilesResult {
  return { ...fields } as unknown as FilesResult;
}

export interface ReadFileParams {
  /** The file's id. */
  file: string;
  /** The first byte to read. */
  offset?: number | undefined;
  /** How long to wait for data, if a job still writes the file; at most 60. */
  wait_s?: number | undefined;
}

export interface ReadFileResult {
  /** The part; empty: there is none after the offset. */
  data: Uint8Array;
  /** The file's present size. */
  size: number;
  /** Whether a job still writes it. */
  growing: boolean;
}

export function readReadFileResult(fields: Fields): ReadFileResult {
  return { ...fields } as unknown as ReadFileResult;
}

export interface DeleteFileParams {
  /** The file's id. */
  file: string;
}

export interface DeleteFileResult {
  /** Whether there was one. */
  deleted: boolean;
}

export function readDeleteFileResult(fields: Fields): DeleteFileResult {
  return { ...fields } as unknown as DeleteFileResult;
}

export interface SubmitJobParams {
  /** The file with the requests, wholly uploaded. */
  file: string;
  /** The id of the new job: letters, digits, `_` and `-`; empty: one is made. */
  job?: string | undefined;
  /** The path of all requests, such as `/v1/chat/completions`; empty: each line has its own `url`. */
  endpoint?: string | undefined;
  /** The class of requests that name none, and the highest that they may name; empty: `low`. */
  priority?: Priority | "" | undefined;
  /** Seconds after which requests that have not ended are given up; 0: never. */
  expires_s?: number | undefined;
  /** Up to 16 texts of the caller, which lists show. */
  metadata?: Metadata | undefined;
  /** The models that the requests may use; nil: all that the user may use. */
  models?: string[] | null | undefined;
  /** Whether the results are the events of one streamed response, each in a line, as they arise. The file then has one request, of `/v1/responses`. */
  events?: boolean | undefined;
}

export interface SubmitJobResult {
  /** The job. */
  job: Fields;
}

export function readSubmitJobResult(fields: Fields): SubmitJobResult {
  return { ...fields } as unknown as SubmitJobResult;
}

export interface JobsParams {
  /** Only this job, else `NotFound`. */
  job?: string | undefined;
  /** The jobs of all users: requires the right *see-all*, else `PermissionDenied`. */
  all?: boolean | undefined;
  /** With `job`: wait until its `revision` is another one. */
  revision?: number | undefined;
  /** With `job`: how long to wait; at most 60. */
  wait_s?: number | undefined;
}

export interface JobsResult {
  /** One job each. */
  jobs: Fields[];
}

export function readJobsResult(fields: Fields): JobsResult {
  return { ...fields } as unknown as JobsResult;
}

export interface CancelJobParams {
  /** The job's id. */
  job: string;
}

export type CancelJobResult = SubmitJobResult;

export type DeleteJobParams = CancelJobParams;

export type DeleteJobResult = DeleteFileResult;

export interface LogLevelParams {
  /** The lowest level that is logged, by logger; other loggers keep theirs. */
  levels?: Fields | undefined;
}

export interface LogLevelResult {
  /** The levels of all loggers now in force. */
  levels: Fields;
}

export function readLogLevelResult(fields: Fields): LogLevelResult {
  return { ...fields } as unknown as LogLevelResult;
}

export interface DrainParams {
  /** Reply at once, and exit when the turns have ended; else reply when they have ended. */
  stop?: boolean | undefined;
  /** Only in a fleet: give this node no new contexts, and move its sessions to other nodes; a daemon refuses it with `InvalidArgument`. */
  node?: string | undefined;
  /** Use the `node` again. */
  undo?: boolean | undefined;
  /** With `node`: how long to wait for turns under way there. */
  wait_s?: number | undefined;
}

export interface DrainResult {
  /** With `node`: sessions that have moved. */
  moved: number;
  /** With `node`: the first 1000 sessions that stay there, each with `session_id`, `user`, `label`, `model` and `error`. */
  staying: Fields[];
}

export function readDrainResult(fields: Fields): DrainResult {
  return { moved: 0, staying: [], ...fields } as unknown as DrainResult;
}

/** Events of the queue have the field `waiting`. */
export function readTurnEvent(fields: Fields): StreamEvent | QueueEvent {
  return "waiting" in fields ? readQueueEvent(fields) : readStreamEvent(fields);
}

export type Empty = Record<string, never>;

export interface ShowResult {
  models: ShownModel[];
}

/** Every call of the protocol with its messages. */
export interface Calls {
  load: { params: LoadParams; result: LoadResult; event: LoadEvent };
  load_by_name: { params: LoadByNameParams; result: LoadResult; event: LoadEvent };
  load_by_name_with_config: { params: LoadByNameWithConfigParams; result: LoadResult; event: LoadEvent };
  init_execution_context: { params: InitExecutionContextParams; result: InitExecutionContextResult; event: never };
  set_input: { params: SetInputParams; result: Empty; event: never };
  compute: { params: ComputeParams; result: ComputeResult; event: never };
  free_tensors: { params: FreeTensorsParams; result: Empty; event: never };
  register_buffer: { params: RegisterBufferParams; result: RegisterBufferResult; event: never };
  write_buffer: { params: WriteBufferParams; result: Empty; event: never };
  read_buffer: { params: ReadBufferParams; result: ReadBufferResult; event: never };
  free_buffers: { params: FreeBuffersParams; result: Empty; event: never };
  open_channel: { params: OpenChannelParams; result: Empty; event: never };
  compute_single: { params: ComputeSingleParams; result: ComputeSingleResult; event: never };
  get_output: { params: GetOutputParams; result: GetOutputResult; event: never };
  get_output_single: { params: GetOutputParams; result: GetOutputResult; event: never };
  fini_single: { params: FiniSingleParams; result: Empty; event: never };
  finalize_execution_context: { params: FinalizeExecutionContextParams; result: Empty; event: never };
  unload: { params: UnloadParams; result: Empty; event: never };
  prompt_init: { params: InitExecutionContextParams; result: InitExecutionContextResult; event: never };
  prompt_compute: { params: PromptComputeParams; result: PromptComputeResult; event: never };
  init_backend: { params: InitBackendParams; result: InitBackendResult; event: never };
  deinit_backend: { params: Empty; result: Empty; event: never };
  init_execution_context_with_session_id: { params: InitExecutionContextWithSessionIdParams; result: InitExecutionContextResult; event: never };
  close_execution_context: { params: FinalizeExecutionContextParams; result: Empty; event: never };
  run_inference: { params: RunInferenceParams; result: RunInferenceResult; event: never };
  stream: { params: StreamParams; result: RunInferenceResult; event: StreamEvent | QueueEvent };
  chat: { params: StreamParams; result: RunInferenceResult; event: QueueEvent };
  answers: { params: AnswersParams; result: AnswersResult; event: AnswersEvent };
  resume: { params: ResumeParams; result: RunInferenceResult; event: StreamEvent | QueueEvent };
  embed: { params: EmbedParams; result: EmbedResult; event: never };
  rerank: { params: RerankParams; result: RerankResult; event: never };
  cancel: { params: CancelParams; result: CancelResult; event: never };
  park: { params: FiniSingleParams; result: ParkResult; event: never };
  end_reasoning: { params: FiniSingleParams; result: EndReasoningResult; event: never };
  reset: { params: ResetParams; result: Empty; event: never };
  rewind: { params: RewindParams; result: RewindResult; event: never };
  fork_session: { params: ForkSessionParams; result: ForkSessionResult; event: never };
  history: { params: HistoryParams; result: HistoryResult; event: never };
  session_media: { params: SessionMediaParams; result: SessionMediaResult; event: never };
  delete_session: { params: DeleteSessionParams; result: DeleteSessionResult; event: never };
  update_session: { params: UpdateSessionParams; result: UpdateSessionResult; event: never };
  restore_session: { params: RestoreSessionParams; result: UpdateSessionResult; event: never };
  list_deletions: { params: ListDeletionsParams; result: ListDeletionsResult; event: never };
  save_state: { params: SaveStateParams; result: SaveStateResult; event: never };
  list_states: { params: Empty; result: ListStatesResult; event: never };
  delete_state: { params: DeleteStateParams; result: DeleteStateResult; event: never };
  export_session: { params: ExportSessionParams; result: ExportSessionResult; event: never };
  import_session: { params: ImportSessionParams; result: ImportSessionResult; event: never };
  end_transfer: { params: EndTransferParams; result: Empty; event: never };
  read_copy: { params: ReadCopyParams; result: ReadCopyResult; event: never };
  store_copy: { params: StoreCopyParams; result: Empty; event: never };
  set_options: { params: SetOptionsParams; result: Empty; event: never };
  parameters: { params: FiniSingleParams; result: ParametersResult; event: never };
  models: { params: ModelsParams; result: ModelsResult; event: never };
  show: { params: ShowParams; result: ShowResult; event: never };
  unload_model: { params: ShowParams; result: Empty; event: never };
  pin: { params: PinParams; result: Empty; event: never };
  swap: { params: SwapParams; result: SwapResult; event: never };
  unpin: { params: PinParams; result: Empty; event: never };
  add_adapter: { params: AddAdapterParams; result: AddAdapterResult; event: never };
  remove_adapter: { params: RemoveAdapterParams; result: Empty; event: never };
  export_model: { params: ExportModelParams; result: ExportModelResult; event: never };
  import_model: { params: ImportModelParams; result: ImportModelResult; event: never };
  end_model_transfer: { params: EndModelTransferParams; result: Empty; event: never };
  add_model: { params: AddModelParams; result: AddModelResult; event: LoadEvent };
  copy_model: { params: CopyModelParams; result: CopyModelResult; event: never };
  sessions: { params: SessionsParams; result: SessionsResult; event: never };
  queue: { params: QueueParams; result: QueueResult; event: never };
  usage: { params: UsageParams; result: UsageResult; event: never };
  stats: { params: Empty; result: StatsResult; event: never };
  metrics: { params: Empty; result: MetricsResult; event: never };
  exchange_served: { params: ExchangeServedParams; result: ExchangeServedResult; event: never };
  tokenize: { params: TokenizeParams; result: TokenizeResult; event: never };
  detokenize: { params: DetokenizeParams; result: DetokenizeResult; event: never };
  apply_template: { params: ApplyTemplateParams; result: ApplyTemplateResult; event: never };
  upload_file: { params: UploadFileParams; result: UploadFileResult; event: never };
  files: { params: FilesParams; result: FilesResult; event: never };
  read_file: { params: ReadFileParams; result: ReadFileResult; event: never };
  delete_file: { params: DeleteFileParams; result: DeleteFileResult; event: never };
  submit_job: { params: SubmitJobParams; result: SubmitJobResult; event: never };
  jobs: { params: JobsParams; result: JobsResult; event: never };
  cancel_job: { params: CancelJobParams; result: SubmitJobResult; event: never };
  delete_job: { params: CancelJobParams; result: DeleteFileResult; event: never };
  log_level: { params: LogLevelParams; result: LogLevelResult; event: never };
  drain: { params: DrainParams; result: DrainResult; event: never };
}

export type CallName = keyof Calls;

type Readers = {
  [N in CallName]: {
    result: (fields: Fields) => Calls[N]["result"];
    event: ((fields: Fields) => Calls[N]["event"]) | null;
  };
};

/** The functions that read the results and events of each call. */
export const READERS: Readers = {
  load: { result: readLoadResult, event: readLoadEvent },
  load_by_name: { result: readLoadResult, event: readLoadEvent },
  load_by_name_with_config: { result: readLoadResult, event: readLoadEvent },
  init_execution_context: { result: readInitExecutionContextResult, event: null },
  set_input: { result: () => ({}), event: null },
  compute: { result: readComputeResult, event: null },
  free_tensors: { result: () => ({}), event: null },
  register_buffer: { result: readRegisterBufferResult, event: null },
  write_buffer: { result: () => ({}), event: null },
  read_buffer: { result: readReadBufferResult, event: null },
  free_buffers: { result: () => ({}), event: null },
  open_channel: { result: () => ({}), event: null },
  compute_single: { result: readComputeSingleResult, event: null },
  get_output: { result: readGetOutputResult, event: null },
  get_output_single: { result: readGetOutputResult, event: null },
  fini_single: { result: () => ({}), event: null },
  finalize_execution_context: { result: () => ({}), event: null },
  unload: { result: () => ({}), event: null },
  prompt_init: { result: readInitExecutionContextResult, event: null },
  prompt_compute: { result: readPromptComputeResult, event: null },
  init_backend: { result: readInitBackendResult, event: null },
  deinit_backend: { result: () => ({}), event: null },
  init_execution_context_with_session_id: { result: readInitExecutionContextResult, event: null },
  close_execution_context: { result: () => ({}), event: null },
  run_inference: { result: readRunInferenceResult, event: null },
  stream: { result: readRunInferenceResult, event: readTurnEvent },
  chat: { result: readRunInferenceResult, event: readQueueEvent },
  answers: { result: readAnswersResult, event: readAnswersEvent },
  resume: { result: readRunInferenceResult, event: readTurnEvent },
  embed: { result: readEmbedResult, event: null },
  rerank: { result: readRerankResult, event: null },
  cancel: { result: readCancelResult, event: null },
  park: { result: readParkResult, event: null },
  end_reasoning: { result: readEndReasoningResult, event: null },
  reset: { result: () => ({}), event: null },
  rewind: { result: readRewindResult, event: null },
  fork_session: { result: readForkSessionResult, event: null },
  history: { result: readHistoryResult, event: null },
  session_media: { result: readSessionMediaResult, event: null },
  delete_session: { result: readDeleteSessionResult, event: null },
  update_session: { result: readUpdateSessionResult, event: null },
  restore_session: { result: readUpdateSessionResult, event: null },
  list_deletions: { result: readListDeletionsResult, event: null },
  save_state: { result: readSaveStateResult, event: null },
  list_states: { result: readListStatesResult, event: null },
  delete_state: { result: readDeleteStateResult, event: null },
  export_session: { result: readExportSessionResult, event: null },
  import_session: { result: readImportSessionResult, event: null },
  end_transfer: { result: () => ({}), event: null },
  read_copy: { result: readReadCopyResult, event: null },
  store_copy: { result: () => ({}), event: null },
  set_options: { result: () => ({}), event: null },
  parameters: { result: readParametersResult, event: null },
  models: { result: readModelsResult, event: null },
  show: { result: readModelsResult as unknown as (fields: Fields) => ShowResult, event: null },
  unload_model: { result: () => ({}), event: null },
  pin: { result: () => ({}), event: null },
  swap: { result: readSwapResult, event: null },
  unpin: { result: () => ({}), event: null },
  add_adapter: { result: readAddAdapterResult, event: null },
  remove_adapter: { result: () => ({}), event: null },
  export_model: { result: readExportModelResult, event: null },
  import_model: { result: readImportModelResult, event: null },
  end_model_transfer: { result: () => ({}), event: null },
  add_model: { result: readAddModelResult, event: readLoadEvent },
  copy_model: { result: readCopyModelResult, event: null },
  sessions: { result: readSessionsResult, event: null },
  queue: { result: readQueueResult, event: null },
  usage: { result: readUsageResult, event: null },
  stats: { result: readStatsResult, event: null },
  metrics: { result: readMetricsResult, event: null },
  exchange_served: { result: readExchangeServedResult, event: null },
  tokenize: { result: readTokenizeResult, event: null },
  detokenize: { result: readDetokenizeResult, event: null },
  apply_template: { result: readApplyTemplateResult, event: null },
  upload_file: { result: readUploadFileResult, event: null },
  files: { result: readFilesResult, event: null },
  read_file: { result: readReadFileResult, event: null },
  delete_file: { result: readDeleteFileResult, event: null },
  submit_job: { result: readSubmitJobResult, event: null },
  jobs: { result: readJobsResult, event: null },
  cancel_job: { result: readSubmitJobResult, event: null },
  delete_job: { result: readDeleteFileResult, event: null },
  log_level: { result: readLogLevelResult, event: null },
  drain: { result: readDrainResult, event: null },
};
