/* inferd: a client for the local inference daemon, in one header and one source file (C11, Linux).
 *
 *     inferd_client *client;
 *     inferd_error error;
 *     if (inferd_connect(NULL, &client, &error))
 *         fprintf(stderr, "%s: %s (%s)\n", error.name, error.message, error.hint);
 *
 * Results. Each function that can fail returns 0 (INFERD_OK) or the number of an error, and fills
 * `error`, which may be NULL. Handles and results are written only on success.
 *
 * Ownership. The caller owns everything that it passes, and may free it when the call returns: texts,
 * buffers and descriptors are copied or duplicated. The client owns its socket and its memory until
 * `inferd_close`. The caller owns the text of an event until `inferd_event_clear`.
 *
 * Threads. All functions may be called by any thread at any time: a lock guards the client, and a call that
 * waits does not hold it. So threads share one client, and their turns are computed side by side.
 * `inferd_close` ends the calls of other threads with ConnectionLost. A thread may not be ended by
 * `pthread_cancel` during a call.
 *
 * Errors of the program. An `inferd_client *` is a number, which is never used again, and not the address of
 * memory: a call with NULL or with a client that was closed fails with InvalidArgument. After `fork`, the
 * clients of the parent do not exist in the child. A pointer through which a function must write may not be NULL.
 *
 * Bounds. A frame from the daemon has at most `reply_bytes_max` bytes; unread replies and events take at
 * most 64 MiB, frames that wait to be sent 4 MiB, and 256 requests run at once. The connection ends with an
 * error where the daemon breaks a bound; a call that would break one is refused.
 *
 * Events. A program with an event loop polls `inferd_fd` for `inferd_poll_events`, calls
 * `inferd_process`, which never blocks, and takes events by `inferd_next_event` with the timeout 0.
 */
#ifndef INFERD_H
#define INFERD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Numbers of errors, as in docs/protocol.md. */
enum {
    INFERD_OK = 0,
    INFERD_INVALID_ARGUMENT = 1,
    INFERD_INVALID_ENCODING = 2,
    INFERD_MISSING_MEMORY = 3,
    INFERD_BUSY = 4,
    INFERD_RUNTIME_ERROR = 5,
    INFERD_UNSUPPORTED_OPERATION = 6,
    INFERD_TOO_LARGE = 7,
    INFERD_NOT_FOUND = 8,
    INFERD_END_OF_SEQUENCE = 100,
    INFERD_CONTEXT_FULL = 101,
    INFERD_PROMPT_TOO_LONG = 102,
    INFERD_MODEL_NOT_FOUND = 103,
    INFERD_TIMEOUT = 200,
    INFERD_CANCELLED = 201,
    INFERD_SESSION_BUSY = 202,
    INFERD_SESSION_EXPIRED = 203,
    INFERD_READER_TIMEOUT = 204,
    INFERD_WORKER_CRASHED = 205,
    INFERD_LOAD_FAILED = 206,
    INFERD_PERMISSION_DENIED = 207,
    INFERD_SHUTTING_DOWN = 208,
    INFERD_PROTOCOL_ERROR = 209,
    INFERD_VERSION_MISMATCH = 210,
    INFERD_CONNECTION_LOST = 211,
    INFERD_KV_FULL = 212,
    INFERD_QUOTA_EXCEEDED = 213,
    INFERD_UNKNOWN = 299
};

/* An error. Texts are cut to their arrays and always end with a zero byte. */
typedef struct inferd_error {
    int number;           /* one of the numbers above; 0: no error */
    int wasi;             /* the number of WasmEdge's wasi-nn: 1 to 8, 100 to 103 */
    int retryable;        /* whether the same call may succeed later */
    double retry_after_s; /* seconds after which to retry, if the daemon gave them; else 0 */
    uint64_t needed;      /* TooLarge: bytes of the buffer that is needed; else 0 */
    char name[32];        /* the error's name, such as "Busy"; a name not known here has the number 299 */
    char message[512];
    char hint[512];
} inferd_error;

typedef struct inferd_client inferd_client;
typedef uint64_t inferd_handle; /* a graph or a context */

/* Settings of a connection. A zeroed struct has the defaults. */
typedef struct inferd_options {
    const char *socket;     /* NULL: that of the environment, as docs/protocol.md (Transport) describes */
    const char *software;   /* a name for the daemon's log; NULL: "inferd-c" */
    const char *label;      /* this program among those of its user, for fairness; NULL: none */
    const char *on_behalf_of; /* the user for whom a gateway acts; NULL: the program's own */
    int connect_timeout_ms; /* 0: 10 s */
    int call_timeout_ms;    /* bound of each waiting call; past it the request is cancelled. 0: none */
} inferd_options;

/* Connect to the daemon and exchange hellos. Errors: ConnectionLost, Timeout, VersionMismatch, Busy… The daemon
 * may refuse the client after this call has returned, such as for its label: the next call then has the error. */
int inferd_connect(const inferd_options *options, inferd_client **client, inferd_error *error);

/* Close the connection and free the client. The daemon ends its requests, contexts and graphs. Calls of other
 * threads that are under way fail, and have ended when this one returns. */
int inferd_close(inferd_client *client);

/* ---- Calls that wait ---- */

/* Turn parameters; NULL or a zeroed struct: the context's priority, no bounds. */
typedef struct inferd_turn {
    const char *priority;   /* "low", "normal", "high", "urgent"; NULL: the context's */
    double queue_timeout_s; /* the turn must begin within this; 0: no bound */
    double timeout_s;       /* the turn must end within this; 0: no bound */
} inferd_turn;

typedef struct inferd_model {
    char name[257];
    char state[16]; /* "cold", "loading", "ready", "unloading", "failed" */
} inferd_model;

/* Write the first `size` of the daemon's models to `models`, and the number of all to `count`. */
int inferd_models(inferd_client *client, inferd_model *models, size_t size, size_t *count,
                  inferd_error *error);

typedef struct inferd_ranked {
    size_t index;     /* the place of the document, from 0 */
    double score;     /* 0 to 1: `raw_score` if the model returns probabilities, else its sigmoid */
    double raw_score; /* the model's output */
} inferd_ranked;

#define INFERD_DOCUMENTS_MAX 256 /* documents of a call */

/* Score `count` documents for a query by the reranking model of a graph. Write the best `size` of them to `ranked`, by
 * descending score, and their number to `found`. A document that is too long is refused or, with `truncate`, read
 * without its end. */
int inferd_rerank(inferd_client *client, inferd_handle graph, const char *query, const char *const *documents,
                  size_t count, int truncate, const inferd_turn *turn, inferd_ranked *ranked, size_t size,
                  size_t *found, inferd_error *error);

/* A part of another file. */
typedef struct inferd_extra {
    const char *name; /* the file's name, or NULL */
    const char *text;
} inferd_extra;

#define INFERD_EXTRA_MAX 256 /* parts of other files in a call */

/* A place in a file, whose texts are UTF-8. Prefix and suffix need no zero byte, so that they can be the two parts of
 * an editor's buffer. */
typedef struct inferd_place {
    const void *prefix; /* the text before the place */
    size_t prefix_length;
    const void *suffix; /* the text behind it */
    size_t suffix_length;
    const char *typed; /* text at the place that is not in the file, which the answer continues; or NULL */
    const inferd_extra *extra;
    size_t extra_count;
    int suffix_first; /* the suffix precedes the prefix in the prompt, for models that were trained so */
} inferd_place;

/* Compute the text between prefix and suffix in a new history of the context, by a model that has the tokens for it
 * (else UnsupportedOperation). `supersede` is NULL, or a key such as the buffer's name: the previous call with this
 * key, of the same user and label, ends before its next step with Cancelled. If `size` is too small: TooLarge as in
 * `inferd_get_output`, which then returns the text. `inferd_start` streams it with INFERD_STREAM. */
int inferd_infill(inferd_client *client, inferd_handle context, const inferd_place *place, const char *supersede,
                  const inferd_turn *turn, void *buffer, size_t size, size_t *length, inferd_error *error);

/* Give the graphs that this connection loads later wasi_nn_backend's defaults, which docs/protocol.md lists, with the
 * memory policy of its configuration, JSON or NULL: full contexts are shifted unless it says otherwise. */
int inferd_init_backend(inferd_client *client, const char *config, inferd_error *error);

/* Load a model by its name, with parameters as JSON or NULL, and take a lease on it. */
int inferd_load(inferd_client *client, const char *name, const char *config, inferd_handle *graph,
                inferd_error *error);

/* Load a GGUF file for this user alone; the daemon gets a descriptor of it, opened for reading. Of a split model it
 * gets the path of any part; the parts must be in its models directory. */
int inferd_load_file(inferd_client *client, const char *path, const char *config, inferd_handle *graph,
                     inferd_error *error);

/* The bytes of a file. */
typedef struct inferd_builder {
    const void *data;
    size_t length;
} inferd_builder;

#define INFERD_BUILDERS_MAX 2

/* Load a model from the bytes of its files, for this user alone: one builder or, of a graph of OpenVINO, two, the XML
 * and the weights. `encoding` is that of wasi-nn ("onnx", "openvino", "tensorflowlite", "ggml"), or NULL: the first
 * bytes show it. The bytes travel in memfds. */
int inferd_load_builders(inferd_client *client, const inferd_builder *builders, size_t count, const char *encoding,
                         const char *config, inferd_handle *graph, inferd_error *error);

/* End the lease. */
int inferd_unload(inferd_client *client, inferd_handle graph, inferd_error *error);

/* Open a context. With a session id, which may be NULL, its history outlives connection and daemon. */
int inferd_open(inferd_client *client, inferd_handle graph, const char *session_id,
                inferd_handle *context, inferd_error *error);

/* Set the prompt (index 0) or parameters as JSON (index 1). Large data travels in a memfd. */
int inferd_set_input(inferd_client *client, inferd_handle context, uint32_t index, const void *data,
                     size_t length, inferd_error *error);

#define INFERD_DIMENSIONS_MAX 32

/* Set the input of a graph that computes tensors. `type` is the name of its elements' type ("fp32", "u8", "i64", …;
 * docs/tensors.md lists them), NULL for u8. A scalar has no dimensions. */
int inferd_set_tensor(inferd_client *client, inferd_handle context, uint32_t index, const void *data, size_t length,
                      const uint32_t *dimensions, size_t dimension_count, const char *type, inferd_error *error);

/* Compute a whole turn, or the outputs of a graph's inputs; `inferd_get_output` returns them by their index. */
int inferd_compute(inferd_client *client, inferd_handle context, const inferd_turn *turn,
                   inferd_error *error);

/* Compute the next token and write its text, which may be empty. At the end: EndOfSequence.
 * With a buffer that is too small, TooLarge; `inferd_get_output_single` returns the text again. */
int inferd_compute_single(inferd_client *client, inferd_handle context, const inferd_turn *turn,
                          void *buffer, size_t size, size_t *length, inferd_error *error);

/* End a turn of `inferd_compute_single` and discard its output. */
int inferd_fini_single(inferd_client *client, inferd_handle context, inferd_error *error);

/* Write the output (index 0) or the metadata as JSON (index 1), without a zero byte at the end.
 * If `size` is too small: TooLarge, `*length` is the size that is needed, and nothing is lost. */
int inferd_get_output(inferd_client *client, inferd_handle context, uint32_t index, void *buffer,
                      size_t size, size_t *length, inferd_error *error);
int inferd_get_output_single(inferd_client *client, inferd_handle context, uint32_t index,
                             void *buffer, size_t size, size_t *length, inferd_error *error);

/* Answer a message through the chat template, as wasi_nn_backend does; config is JSON or NULL.
 * If `size` is too small: TooLarge as in `inferd_get_output`, which then returns the answer. */
int inferd_run_inference(inferd_client *client, inferd_handle context, const void *data,
                         size_t length, const char *config, const inferd_turn *turn, void *buffer,
                         size_t size, size_t *written, inferd_error *error);

/* Cancel a context's turn, which another thread or client of this user may wait for. */
int inferd_cancel(inferd_client *client, inferd_handle context, int *cancelled, inferd_error *error);

/* End the present thought of a context's turn, so that its answer begins now; `ended` is 0 if there is none. */
int inferd_end_reasoning(inferd_client *client, inferd_handle context, int *ended, inferd_error *error);

/* Close a context. A session with an id is deleted, or with `keep` becomes dormant. */
int inferd_close_context(inferd_client *client, inferd_handle context, int keep, inferd_error *error);

/* ---- Calls that do not wait, and streams ---- */

typedef enum inferd_kind {
    INFERD_LOAD,              /* name, config */
    INFERD_LOAD_FILE,         /* fd, config */
    INFERD_UNLOAD,            /* handle */
    INFERD_OPEN,              /* handle */
    INFERD_OPEN_SESSION,      /* handle, name: the session id */
    INFERD_SET_INPUT,         /* handle, index, data; of a graph's tensor type and dimensions, too */
    INFERD_COMPUTE,           /* handle, turn */
    INFERD_COMPUTE_SINGLE,    /* handle, turn */
    INFERD_GET_OUTPUT,        /* handle, index, size_max */
    INFERD_GET_OUTPUT_SINGLE, /* handle, index, size_max */
    INFERD_FINI_SINGLE,       /* handle */
    INFERD_RUN_INFERENCE,     /* handle, data, config, size_max, turn */
    INFERD_STREAM,            /* handle, turn, supersede; place, or data (NULL: the prompt of SET_INPUT) and media */
    INFERD_CANCEL,            /* handle */
    INFERD_CLOSE,             /* handle, keep */
    INFERD_INIT_BACKEND,      /* config */
    INFERD_MODELS,            /* only for inferd_models */
    INFERD_END_REASONING,     /* handle */
    INFERD_RERANK,            /* only for inferd_rerank */
    INFERD_INFILL,            /* handle, place, supersede, turn */
    INFERD_LOAD_BUILDERS      /* builders, name: the encoding or NULL, config */
} inferd_kind;

/* An image (PNG, JPEG, WebP, GIF, BMP) or a sound (WAV, MP3, FLAC) beside the message of INFERD_STREAM. */
typedef struct inferd_media {
    const char *type;    /* "image" or "audio" */
    const void *data;    /* the bytes of its file; NULL: they are in `fd` */
    size_t length;
    int fd;              /* a descriptor of its file, opened for reading; the caller keeps it */
    uint32_t tokens_max; /* the most tokens that an image may take; 0: the model's own bound */
    const char *alt;     /* a text that describes it, or NULL */
} inferd_media;

#define INFERD_MEDIA_MAX 64 /* images and sounds of a call; at most 16 have a descriptor or more than 64 KiB */

/* A request; its kind reads the fields named beside it. A zeroed field has its default. */
typedef struct inferd_call {
    inferd_kind kind;
    inferd_handle handle;
    uint32_t index;
    const void *data;
    size_t length;
    const char *name;
    const char *config;
    int fd;
    size_t size_max; /* bytes of output that the caller takes; 0: no bound */
    int keep;
    int raw; /* INFERD_STREAM: use data unchanged, without the chat template; no media then */
    inferd_turn turn;
    const inferd_media *media; /* INFERD_STREAM: stand before the message's text */
    size_t media_count;
    const char *const *documents; /* INFERD_RERANK: for the query `name` */
    size_t document_count;
    size_t top_n;
    int truncate;
    const inferd_place *place; /* INFERD_INFILL; INFERD_STREAM: instead of `data`, without media */
    const char *supersede;     /* INFERD_INFILL, INFERD_STREAM: the key, as in inferd_infill */
    const inferd_builder *builders; /* INFERD_LOAD_BUILDERS; read before inferd_start returns */
    size_t builder_count;
    const char *type; /* INFERD_SET_INPUT: as in inferd_set_tensor; NULL: a text or parameters */
    const uint32_t *dimensions;
    size_t dimension_count;
} inferd_call;

typedef enum inferd_event_kind {
    INFERD_EVENT_NONE,  /* nothing yet */
    INFERD_EVENT_TEXT,  /* a part of a stream */
    INFERD_EVENT_END,   /* the request has ended; of a stream, text is the rest */
    INFERD_EVENT_FAILED /* the request has ended with `error` */
} inferd_event_kind;

typedef struct inferd_event {
    inferd_event_kind kind;
    uint64_t request;
    inferd_handle handle; /* END: the graph of LOAD, the context of OPEN; 1 if CANCEL or END_REASONING ended something */
    char *text;           /* the output, with a zero byte behind it, or NULL; freed by inferd_event_clear */
    size_t length;
    char stop_reason[32]; /* END of a stream or of RUN_INFERENCE */
    inferd_error error;   /* FAILED */
} inferd_event;

/* Send a request without waiting for its reply; `request` receives its id. */
int inferd_start(inferd_client *client, const inferd_call *call, uint64_t *request,
                 inferd_error *error);

/* Take the next event of a request, or of any (request 0). Waits at most `timeout_ms`; 0: does not wait,
 * -1: no bound. In vain, also if nothing is under way, the event has the kind NONE. After END or FAILED the
 * request no longer exists. If the connection has ended, each request has a FAILED. An error is returned only
 * for a wrong argument or without memory. */
int inferd_next_event(inferd_client *client, uint64_t request, int timeout_ms, inferd_event *event,
                      inferd_error *error);

/* Free an event's text. */
void inferd_event_clear(inferd_event *event);

/* Cancel a request that was started; its event FAILED, or END if that came first, follows. */
int inferd_cancel_request(inferd_client *client, uint64_t request, inferd_error *error);

/* The descriptor to poll, and the events to poll it for (POLLIN, POLLOUT); without a client -1 and 0. */
int inferd_fd(const inferd_client *client);
short inferd_poll_events(inferd_client *client);

/* Send and receive as much as is possible without waiting. Returns the error that has ended the connection. */
int inferd_process(inferd_client *client, inferd_error *error);

#ifdef __cplusplus
}
#endif
#endif
