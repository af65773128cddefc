/* The part that both wasi-nn libraries share: a connection to the daemon, and its graphs and contexts by
 * 32-bit numbers, which begin with `first_number` and are never used again.
 *
 * A host has a backend by its number, in the form of a pointer that is never followed: a pointer that is NULL or
 * wrong, or a backend that has ended or belongs to the parent process, is an InvalidArgument.
 *
 * All functions may be called by several threads. They return 0 or the number of an inferd error, fill `error`,
 * which may not be NULL, and print errors that the host would see only as a number. The connection is made by
 * the first load. If it was lost, the next load connects again; older numbers are then not valid.
 *
 * Environment, read by `backend_begin`:
 *   INFERD_SOCKET             the daemon's socket
 *   INFERD_WASI_NN_MODELS     NAME=MODEL,…: the models or files that may be loaded, by the names of the host;
 *                             the name * is any. Without it, names are models of the daemon, or files
 *   INFERD_WASI_NN_LABEL      the label of the host among the programs of its user
 *   INFERD_WASI_NN_PRIORITY   the priority of turns: low, normal, high, urgent
 *   INFERD_WASI_NN_TIMEOUT_S  the seconds after which a turn fails
 *   INFERD_WASI_NN_QUIET      1: print no errors
 */
#ifndef INFERD_WASI_NN_BACKEND_H
#define INFERD_WASI_NN_BACKEND_H

#include "../inferd.h"

#include <stdbool.h>

/* Bounds of one backend. */
typedef struct backend_limits {
    size_t contexts_max;
    int64_t idle_ms; /* a new context closes those that were idle for longer; 0: none */
    bool evicts;     /* at contexts_max, a new context closes the one that was idle for longest */
    bool one_model;  /* a load closes all contexts and unloads the other graphs; contexts are opened on its graph */
} backend_limits;

/* The text behind `"key":` in JSON, on any level; NULL: there is none. Keys have no escapes. */
const char *backend_find_value(const char *json, const char *key);

/* Begin a backend. Each of its connections begins with the configuration of wasi_nn_backend; NULL: it has none, and
 * the daemon's own defaults hold. */
int backend_begin(void **ctx, uint32_t first_number, const backend_limits *limits, const char *config,
                  inferd_error *error);

/* End a backend. Calls of other threads that are under way fail, and have ended when this one returns. */
int backend_end(void *ctx, inferd_error *error);

/* Load a model. A name with a slash, or with .gguf at its end, is a file. Texts need no zero byte. */
int backend_load(void *ctx, const char *name, size_t name_length, const char *config, size_t config_length,
                 uint32_t *graph, inferd_error *error);

/* Open a context. With a session id, which may be NULL: or return the open one with this id. */
int backend_open(void *ctx, uint32_t graph, const char *session_id, uint32_t *context, inferd_error *error);
int backend_close(void *ctx, uint32_t context, inferd_error *error);

int backend_set_input(void *ctx, uint32_t context, uint32_t index, const void *data, size_t length,
                      inferd_error *error);
/* Compute a turn. If `stream-stdout` was last set to true, its text is printed as it arrives. */
int backend_compute(void *ctx, uint32_t context, inferd_error *error);
int backend_get_output(void *ctx, uint32_t context, uint32_t index, void *buffer, size_t size, size_t *length,
                       inferd_error *error);
int backend_run_inference(void *ctx, uint32_t context, const void *text, size_t text_length, const char *config,
                          size_t config_length, void *buffer, size_t size, size_t *length, inferd_error *error);

#endif
