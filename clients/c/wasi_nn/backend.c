/* The shared part of both wasi-nn libraries; see backend.h. */
#define _POSIX_C_SOURCE 200809L
#include "backend.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { GRAPHS_MAX = 1000, NAME_BYTES_MAX = 4096, CONFIG_BYTES_MAX = 1 << 20, SESSION_ID_BYTES_MAX = 4096 };
enum { NS_PER_S = 1000000000, NS_PER_MS = 1000000 };

/* Parameters that the library itself follows. */
typedef struct modes {
    bool prints; /* stream-stdout */
    bool embeds; /* embedding */
} modes;

/* A graph or a context of the host. */
typedef struct entry {
    struct entry *next;
    uint32_t number;
    inferd_handle handle;
    char *session_id;   /* of a context, or NULL */
    modes modes;        /* of a graph: those of its contexts at first */
    int64_t used_ns;    /* the end of its last call */
    unsigned calls;     /* under way on it */
} entry;

typedef struct table {
    entry *first;
    size_t count;
    uint32_t next_number;
} table;

typedef struct backend {
    struct backend *next; /* these three are guarded by `backends.lock` */
    uintptr_t number;
    unsigned uses;           /* calls under way */
    pthread_mutex_t opening; /* held while graphs or contexts are opened or closed; taken before `lock` */
    pthread_mutex_t lock;    /* guards all that follows, never held during a call to the daemon */
    bool ended;
    inferd_client *client;
    unsigned calls; /* under way with `client` */
    table graphs, contexts;
    const entry *current; /* of `limits.one_model`: the graph of new contexts, or NULL */
    backend_limits limits;
    char *config; /* of wasi_nn_backend, or NULL */
    char *models, *label, *priority;
    double timeout_s;
    bool quiet;
} backend;

/* The backends of the process. The host has a backend's number in place of a pointer; a number is never used
 * again, so a call with a backend that has ended is refused. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t unused; /* a backend has no call under way any more */
    backend *first;
    backend *inherited; /* in a child process: the parent's, kept reachable for leak checkers */
    uintptr_t last_number;
} backends = {.lock = PTHREAD_MUTEX_INITIALIZER, .unused = PTHREAD_COND_INITIALIZER};

static int fail(inferd_error *error, int number, int wasi, const char *name, const char *message, const char *hint) {
    *error = (inferd_error){.number = number, .wasi = wasi};
    snprintf(error->name, sizeof error->name, "%s", name);
    snprintf(error->message, sizeof error->message, "%s", message);
    snprintf(error->hint, sizeof error->hint, "%s", hint);
    return number;
}

static int fail_argument(inferd_error *error, const char *message) {
    return fail(error, INFERD_INVALID_ARGUMENT, 1, "InvalidArgument", message,
                "correct the argument; graphs and contexts are numbers from earlier calls");
}

static int fail_busy(inferd_error *error, const char *message) {
    return fail(error, INFERD_BUSY, 4, "Busy", message, "close contexts that are no longer used");
}

static int fail_memory(inferd_error *error) {
    return fail(error, INFERD_MISSING_MEMORY, 3, "MissingMemory", "the program's memory is exhausted", "free memory");
}

static bool is_quiet(void) {
    const char *quiet = getenv("INFERD_WASI_NN_QUIET");
    return quiet && !strcmp(quiet, "1");
}

/* Print an error, except those that hosts expect; return its number. A guest may have chosen a part of the
 * text, so control characters, which a terminal would obey, are replaced. */
static int report(bool quiet, const char *call, const inferd_error *error) {
    char line[2 * sizeof *error];
    bool expected = error->number == INFERD_TOO_LARGE || (error->number >= 100 && error->number <= 102);
    if (!error->number || expected || quiet)
        return error->number;
    bool lost = error->number == INFERD_CONNECTION_LOST || error->number == INFERD_SHUTTING_DOWN;
    const char *hint = lost && strcmp(call, "load_by_name") ? "load the model again, to connect again" : error->hint;
    snprintf(line, sizeof line, "inferd: %s: %s: %s (%s)", call, error->name, error->message, hint);
    for (char *c = line; *c; c++)
        if ((unsigned char)*c < ' ' || *c == 0x7f)
            *c = '?';
    fprintf(stderr, "%s\n", line);
    return error->number;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * NS_PER_S + now.tv_nsec;
}

/* ---- Backends ---- */

static void lock_backends(void) { pthread_mutex_lock(&backends.lock); }
static void unlock_backends(void) { pthread_mutex_unlock(&backends.lock); }

/* In a child process: leave the backends to the parent. Other threads may have been changing them, so they are
 * not freed. */
static void forget_backends(void) {
    backends.inherited = backends.first;
    backends.first = NULL;
    pthread_cond_init(&backends.unused, NULL);
    unlock_backends();
}

static void handle_forks(void) { pthread_atfork(lock_backends, unlock_backends, forget_backends); }

/* Add a backend to those that calls find; return its number. */
static void *publish(backend *b) {
    static pthread_once_t handles_forks = PTHREAD_ONCE_INIT;
    pthread_once(&handles_forks, handle_forks);
    lock_backends();
    b->number = ++backends.last_number;
    b->next = backends.first;
    backends.first = b;
    unlock_backends();
    return (void *)b->number;
}

/* The link to a backend, or to NULL; `backends` is locked. */
static backend **find_backend(const void *ctx) {
    backend **link = &backends.first;
    while (*link && (*link)->number != (uintptr_t)ctx)
        link = &(*link)->next;
    return link;
}

static void fail_ended(const char *call, inferd_error *error) {
    fail(error, INFERD_INVALID_ARGUMENT, 1, "InvalidArgument",
         "no such backend: it has ended, or the process has forked since", "begin one with init_backend");
    report(is_quiet(), call, error);
}

/* Begin a call of the host; NULL: there is no such backend. `leave` follows. */
static backend *enter(const void *ctx, const char *call, inferd_error *error) {
    *error = (inferd_error){0};
    lock_backends();
    backend *b = *find_backend(ctx);
    if (b)
        b->uses++;
    unlock_backends();
    if (!b)
        fail_ended(call, error);
    return b;
}

/* End a call of the host: report its error, and return the number. */
static int leave(backend *b, const char *call, const inferd_error *error) {
    int number = report(b->quiet, call, error);
    lock_backends();
    if (!--b->uses)
        pthread_cond_broadcast(&backends.unused);
    unlock_backends();
    return number;
}

/* ---- Parameters ---- */

/* See backend.h. */
const char *backend_find_value(const char *json, const char *key) {
    size_t length = strlen(key);
    for (const char *at = json; (at = strchr(at, '"')); at++) {
        const char *text = ++at;
        while (*at && *at != '"')
            at += *at == '\\' && at[1] ? 2 : 1;
        if (!*at)
            return NULL;
        const char *behind = at + 1 + strspn(at + 1, " \t\r\n");
        if ((size_t)(at - text) == length && !memcmp(text, key, length) && *behind == ':')
            return behind + 1 + strspn(behind + 1, " \t\r\n");
    }
    return NULL;
}

/* Set a mode to the value of a key, if the key is there in one of its spellings. */
static void read_mode(bool *mode, const char *json, const char *key, const char *other_key) {
    const char *value = backend_find_value(json, key);
    if (!value)
        value = backend_find_value(json, other_key);
    if (value)
        *mode = !strncmp(value, "true", 4);
}

static void read_modes(modes *m, const char *json) {
    read_mode(&m->prints, json, "stream-stdout", "stream_stdout");
    read_mode(&m->embeds, json, "embedding", "embeddings");
}

/* Overwrite a key whose value is a boolean, and a comma beside it, with spaces. False: there is none. */
static bool blank_key(char *json, const char *key) {
    const char *value = backend_find_value(json, key);
    size_t length = !value ? 0 : !strncmp(value, "true", 4) ? 4 : !strncmp(value, "false", 5) ? 5 : 0;
    if (!length)
        return false;
    char *end = json + (value - json) + length, *start = end - length - 1;
    while (*start != ':')
        start--;
    while (*start != '"')
        start--;
    start -= strlen(key) + 1;
    char *behind = end + strspn(end, " \t\r\n");
    if (*behind == ',') {
        end = behind + 1;
    } else {
        char *before = start;
        while (before > json && strchr(" \t\r\n", before[-1]))
            before--;
        if (before > json && before[-1] == ',')
            start = before - 1;
    }
    memset(start, ' ', (size_t)(end - start));
    return true;
}

/* Take `stream-stdout` from parameters: the daemon would report it as ignored. */
static void take_stream_stdout(char *json) {
    while (blank_key(json, "stream-stdout") || blank_key(json, "stream_stdout"))
        continue;
}

/* ---- Tables of graphs and contexts; the lock is held ---- */

static entry *find_entry(const table *t, uint32_t number) {
    entry *e = t->first;
    while (e && e->number != number)
        e = e->next;
    return e;
}

static entry *find_session(const table *t, const char *session_id) {
    entry *e = t->first;
    while (e && !(e->session_id && !strcmp(e->session_id, session_id)))
        e = e->next;
    return e;
}

static entry *find_idle_longest(const table *t) {
    entry *found = NULL;
    for (entry *e = t->first; e; e = e->next)
        if (!e->calls && (!found || e->used_ns < found->used_ns))
            found = e;
    return found;
}

static void remove_entry(table *t, entry *removed) {
    entry **link = &t->first;
    while (*link != removed)
        link = &(*link)->next;
    *link = removed->next;
    t->count--;
    free(removed->session_id);
    free(removed);
}

/* Add an entry without a handle, or return NULL. */
static entry *add_entry(table *t, const char *session_id) {
    entry *made = calloc(1, sizeof *made);
    if (made && session_id && !(made->session_id = strdup(session_id))) {
        free(made);
        return NULL;
    }
    if (!made)
        return NULL;
    made->number = t->next_number++;
    made->used_ns = now_ns();
    made->next = t->first;
    t->first = made;
    t->count++;
    return made;
}

static void remove_all(table *t) {
    while (t->first)
        remove_entry(t, t->first);
}

/* ---- Calls ---- */

/* The client for a call on a graph or context, whose handle it writes; NULL: there is none. `end_call`
 * follows. */
static inferd_client *begin_call(backend *b, table *t, uint32_t number, inferd_handle *handle, inferd_error *error) {
    pthread_mutex_lock(&b->lock);
    entry *e = find_entry(t, number);
    inferd_client *client = e ? b->client : NULL;
    if (client) {
        *handle = e->handle;
        e->calls++;
        b->calls++;
    }
    pthread_mutex_unlock(&b->lock);
    if (!client)
        fail_argument(error, t == &b->graphs ? "no such graph; the daemon may have restarted since its load"
                                             : "no such context; it was closed, or the daemon has restarted since");
    return client;
}

static void end_call(backend *b, table *t, uint32_t number) {
    pthread_mutex_lock(&b->lock);
    entry *e = find_entry(t, number);
    if (e) {
        e->calls--;
        e->used_ns = now_ns();
    }
    b->calls--;
    pthread_mutex_unlock(&b->lock);
}

/* A copy with a zero byte at its end; NULL for NULL, and if it is too long or memory is exhausted. */
static char *copy_text(const char *text, size_t length, size_t length_max) {
    return text && length <= length_max ? strndup(text, length) : NULL;
}

static modes modes_of(backend *b, uint32_t context) {
    pthread_mutex_lock(&b->lock);
    entry *e = find_entry(&b->contexts, context);
    modes found = e ? e->modes : (modes){0};
    pthread_mutex_unlock(&b->lock);
    return found;
}

static void set_modes(backend *b, uint32_t context, modes followed) {
    pthread_mutex_lock(&b->lock);
    entry *e = find_entry(&b->contexts, context);
    if (e)
        e->modes = followed;
    pthread_mutex_unlock(&b->lock);
}

/* Set parameters of a context, and follow them if the daemon accepts them. */
static void set_parameters(backend *b, uint32_t context, inferd_client *client, inferd_handle handle, const void *data,
                           size_t length, inferd_error *error) {
    modes followed = modes_of(b, context);
    char *json = data && length <= CONFIG_BYTES_MAX ? calloc(1, length + 1) : NULL;
    if (json) {
        memcpy(json, data, length);
        read_modes(&followed, json);
        take_stream_stdout(json);
    }
    if (!inferd_set_input(client, handle, 1, json ? json : data, length, error))
        set_modes(b, context, followed);
    free(json);
}

int backend_set_input(void *ctx, uint32_t context, uint32_t index, const void *data, size_t length,
                      inferd_error *error) {
    inferd_handle handle;
    backend *b = enter(ctx, "set_input", error);
    if (!b)
        return error->number;
    inferd_client *client = begin_call(b, &b->contexts, context, &handle, error);
    if (client) {
        if (index == 1)
            set_parameters(b, context, client, handle, data, length, error);
        else
            inferd_set_input(client, handle, index, data, length, error);
        end_call(b, &b->contexts, context);
    }
    return leave(b, "set_input", error);
}

static inferd_turn turn_of(const backend *b) {
    return (inferd_turn){.priority = b->priority, .timeout_s = b->timeout_s};
}

/* Write text to standard output. A reader that has closed its end is no failure. */
static bool write_output(const void *text, size_t length) {
    bool written = fwrite(text, 1, length, stdout) == length && !fflush(stdout);
    return written || errno == EPIPE;
}

/* Compute a turn, and print its text as it arrives. */
static int print_turn(inferd_client *client, inferd_handle handle, const inferd_turn *turn, inferd_error *error) {
    inferd_call call = {.kind = INFERD_STREAM, .handle = handle, .turn = *turn};
    inferd_event event = {0};
    uint64_t request;
    bool unwritten = false;
    int number = inferd_start(client, &call, &request, error);
    if (number)
        return number;
    do {
        inferd_event_clear(&event);
        if ((number = inferd_next_event(client, request, -1, &event, error))) {
            inferd_cancel_request(client, request, NULL);
            return number;
        }
        if (event.length && !unwritten && !write_output(event.text, event.length)) {
            unwritten = true;
            inferd_cancel_request(client, request, NULL); /* its last event is still read */
        }
    } while (event.kind == INFERD_EVENT_TEXT);
    if (unwritten)
        fail(error, INFERD_RUNTIME_ERROR, 5, "RuntimeError", "standard output cannot be written",
             "free space there, or write it elsewhere");
    else if (event.kind == INFERD_EVENT_FAILED)
        *error = event.error;
    else if (!strcmp(event.stop_reason, "context_full"))
        fail(error, INFERD_CONTEXT_FULL, 101, "ContextFull", "the context is full", "set a shorter prompt");
    inferd_event_clear(&event);
    return error->number;
}

int backend_compute(void *ctx, uint32_t context, inferd_error *error) {
    inferd_handle handle;
    backend *b = enter(ctx, "compute", error);
    if (!b)
        return error->number;
    inferd_client *client = begin_call(b, &b->contexts, context, &handle, error);
    if (client) {
        modes followed = modes_of(b, context);
        inferd_turn turn = turn_of(b);
        if (followed.prints && !followed.embeds)
            print_turn(client, handle, &turn, error);
        else
            inferd_compute(client, handle, &turn, error);
        end_call(b, &b->contexts, context);
    }
    return leave(b, "compute", error);
}

int backend_get_output(void *ctx, uint32_t context, uint32_t index, void *buffer, size_t size, size_t *length,
                       inferd_error *error) {
    inferd_handle handle;
    backend *b = enter(ctx, "get_output", error);
    if (!b)
        return error->number;
    inferd_client *client = begin_call(b, &b->contexts, context, &handle, error);
    if (client) {
        inferd_get_output(client, handle, index, buffer, size, length, error);
        end_call(b, &b->contexts, context);
    }
    return leave(b, "get_output", error);
}

int backend_run_inference(void *ctx, uint32_t context, const void *text, size_t text_length, const char *config,
                          size_t config_length, void *buffer, size_t size, size_t *length, inferd_error *error) {
    inferd_handle handle;
    backend *b = enter(ctx, "run_inference", error);
    if (!b)
        return error->number;
    char *json = copy_text(config, config_length, CONFIG_BYTES_MAX);
    inferd_client *client = NULL;
    if (config && !json)
        fail_argument(error, "the configuration is too long");
    else
        client = begin_call(b, &b->contexts, context, &handle, error);
    if (client) {
        inferd_turn turn = turn_of(b);
        inferd_run_inference(client, handle, text, text_length, json, &turn, buffer, size, length, error);
        end_call(b, &b->contexts, context);
    }
    free(json);
    return leave(b, "run_inference", error);
}

/* ---- Models ---- */

/* Write the model of a name in NAME=MODEL,…; without that list, the name itself. False: it is not listed. */
static bool map_name(const char *models, const char *name, char *model, size_t size) {
    snprintf(model, size, "%s", name);
    if (!models || !*models)
        return true;
    while (*models) {
        size_t length = strcspn(models, ","), name_length = strcspn(models, "=");
        bool any = name_length == 1 && *models == '*';
        if (name_length < length && (any || (strlen(name) == name_length && !memcmp(models, name, name_length)))) {
            snprintf(model, size, "%.*s", (int)(length - name_length - 1), models + name_length + 1);
            return true;
        }
        models += length + (models[length] == ',');
    }
    return false;
}

static bool is_file(const char *model) {
    const char *end = strrchr(model, '.');
    return strchr(model, '/') || (end && !strcmp(end, ".gguf"));
}

/* Begin a connection with the configuration; one that the daemon refuses is left out, as in wasi_nn_backend. */
static void send_config(backend *b) {
    inferd_error error;
    if (b->config && inferd_init_backend(b->client, b->config, &error)) {
        report(b->quiet, "init_backend", &error);
        inferd_init_backend(b->client, NULL, NULL);
    }
}

/* Connect, or connect again if the connection was lost and no call is under way. */
static int connect_backend(backend *b, inferd_error *error) {
    int number = INFERD_OK;
    bool is_new = false;
    pthread_mutex_lock(&b->lock);
    if (b->client && inferd_process(b->client, error) && !b->calls) {
        inferd_close(b->client);
        b->client = NULL;
        b->current = NULL;
        remove_all(&b->graphs);
        remove_all(&b->contexts);
    }
    if (b->ended) {
        number = fail_argument(error, "the backend has ended");
    } else if (!b->client) {
        number = inferd_connect(&(inferd_options){.software = "wasi-nn", .label = b->label}, &b->client, error);
        is_new = !number;
    }
    if (!number)
        b->calls++;
    pthread_mutex_unlock(&b->lock);
    if (is_new)
        send_config(b);
    return number;
}

/* Load a model and add its graph; the connection is there. */
static int load_graph(backend *b, const char *model, char *config, uint32_t *graph, inferd_error *error) {
    inferd_handle handle;
    modes followed = {0};
    if (config) {
        read_modes(&followed, config);
        take_stream_stdout(config);
    }
    int number = (is_file(model) ? inferd_load_file : inferd_load)(b->client, model, config, &handle, error);
    if (number)
        return number;
    pthread_mutex_lock(&b->lock);
    entry *made = b->graphs.count < GRAPHS_MAX ? add_entry(&b->graphs, NULL) : NULL;
    if (made) {
        made->handle = handle;
        made->modes = followed;
        *graph = made->number;
    }
    pthread_mutex_unlock(&b->lock);
    if (made)
        return INFERD_OK;
    inferd_unload(b->client, handle, NULL);
    return fail_busy(error, "too many graphs, or the program's memory is exhausted");
}

/* Remove a context and close it in the daemon. */
static void close_entry(backend *b, entry *e, inferd_error *error) {
    inferd_handle handle = e->handle;
    pthread_mutex_lock(&b->lock);
    remove_entry(&b->contexts, e);
    b->calls++;
    pthread_mutex_unlock(&b->lock);
    inferd_close_context(b->client, handle, 0, error);
    pthread_mutex_lock(&b->lock);
    b->calls--;
    pthread_mutex_unlock(&b->lock);
}

/* Take a graph other than the current one from the table. False: there is none. */
static bool take_old_graph(backend *b, inferd_handle *handle) {
    pthread_mutex_lock(&b->lock);
    entry *e = b->graphs.first;
    while (e && e == b->current)
        e = e->next;
    if (e) {
        *handle = e->handle;
        remove_entry(&b->graphs, e);
    }
    pthread_mutex_unlock(&b->lock);
    return e;
}

static entry *first_context(backend *b) {
    pthread_mutex_lock(&b->lock);
    entry *first = b->contexts.first;
    pthread_mutex_unlock(&b->lock);
    return first;
}

/* Make a graph the current one: close all contexts, and unload all other graphs. */
static void replace_model(backend *b, uint32_t graph) {
    inferd_handle handle;
    entry *first;
    pthread_mutex_lock(&b->lock);
    b->current = find_entry(&b->graphs, graph);
    pthread_mutex_unlock(&b->lock);
    while ((first = first_context(b)))
        close_entry(b, first, NULL);
    while (take_old_graph(b, &handle))
        inferd_unload(b->client, handle, NULL);
}

int backend_load(void *ctx, const char *name, size_t name_length, const char *config, size_t config_length,
                 uint32_t *graph, inferd_error *error) {
    char model[NAME_BYTES_MAX];
    backend *b = enter(ctx, "load_by_name", error);
    if (!b)
        return error->number;
    char *text = copy_text(name, name_length, NAME_BYTES_MAX - 1);
    char *json = copy_text(config, config_length, CONFIG_BYTES_MAX);
    if (!text || (config && !json)) {
        fail_argument(error, "the name or the configuration is missing or too long");
    } else if (!map_name(b->models, text, model, sizeof model)) {
        fail(error, INFERD_MODEL_NOT_FOUND, 103, "ModelNotFound", "the name is not in INFERD_WASI_NN_MODELS",
             "add NAME=MODEL to the variable");
    } else {
        pthread_mutex_lock(&b->opening);
        if (!connect_backend(b, error)) {
            if (!load_graph(b, model, json, graph, error) && b->limits.one_model)
                replace_model(b, *graph);
            pthread_mutex_lock(&b->lock);
            b->calls--;
            pthread_mutex_unlock(&b->lock);
        }
        pthread_mutex_unlock(&b->opening);
    }
    free(text);
    free(json);
    return leave(b, "load_by_name", error);
}

/* ---- Contexts; `opening` is held ---- */

/* Close the context that has been idle for longest, if that is longer than `idle_ms`. */
static bool close_idle_context(backend *b, int64_t idle_ms) {
    pthread_mutex_lock(&b->lock);
    entry *found = find_idle_longest(&b->contexts);
    if (found && now_ns() - found->used_ns <= idle_ms * NS_PER_MS)
        found = NULL;
    pthread_mutex_unlock(&b->lock);
    if (found)
        close_entry(b, found, NULL);
    return found;
}

/* Make a place for another context, if the limits permit it. */
static bool evict_context(backend *b) { return b->limits.evicts && close_idle_context(b, -1); }

/* Open a context in the daemon. If the daemon's own limit refuses it, it is requested again after an
 * eviction. */
static int open_handle(backend *b, uint32_t graph, inferd_handle *context, inferd_error *error) {
    inferd_handle handle;
    inferd_client *client = begin_call(b, &b->graphs, graph, &handle, error);
    if (!client)
        return error->number;
    int number = inferd_open(client, handle, NULL, context, error);
    if ((number == INFERD_BUSY || number == INFERD_QUOTA_EXCEEDED) && evict_context(b))
        number = inferd_open(client, handle, NULL, context, error);
    end_call(b, &b->graphs, graph);
    return number;
}

static int open_context(backend *b, uint32_t graph, const char *session_id, uint32_t *context, inferd_error *error) {
    inferd_handle handle;
    while (b->limits.idle_ms && close_idle_context(b, b->limits.idle_ms))
        continue;
    if (b->contexts.count >= b->limits.contexts_max && !evict_context(b))
        return fail_busy(error, "the maximum of contexts is open");
    if (open_handle(b, graph, &handle, error))
        return error->number;
    pthread_mutex_lock(&b->lock);
    entry *made = add_entry(&b->contexts, session_id);
    if (made) {
        entry *opened = find_entry(&b->graphs, graph);
        made->handle = handle;
        made->modes = opened ? opened->modes : (modes){0};
        *context = made->number;
    }
    pthread_mutex_unlock(&b->lock);
    return made ? INFERD_OK : fail_memory(error);
}

/* Find the open context with a session id, and write its number. False: there is none. */
static bool find_open_session(backend *b, const char *session_id, uint32_t *context) {
    if (!session_id || strnlen(session_id, SESSION_ID_BYTES_MAX) == SESSION_ID_BYTES_MAX)
        return false;
    pthread_mutex_lock(&b->lock);
    entry *open = find_session(&b->contexts, session_id);
    if (open) {
        *context = open->number;
        open->used_ns = now_ns();
    }
    pthread_mutex_unlock(&b->lock);
    return open;
}

int backend_open(void *ctx, uint32_t graph, const char *session_id, uint32_t *context, inferd_error *error) {
    backend *b = enter(ctx, "init_execution_context", error);
    if (!b)
        return error->number;
    pthread_mutex_lock(&b->opening);
    if (b->limits.one_model && !b->current)
        fail_argument(error, "no model is loaded");
    else if (!find_open_session(b, session_id, context))
        open_context(b, b->limits.one_model ? b->current->number : graph, session_id, context, error);
    pthread_mutex_unlock(&b->opening);
    return leave(b, "init_execution_context", error);
}

int backend_close(void *ctx, uint32_t context, inferd_error *error) {
    backend *b = enter(ctx, "close_execution_context", error);
    if (!b)
        return error->number;
    pthread_mutex_lock(&b->opening);
    pthread_mutex_lock(&b->lock);
    entry *found = find_entry(&b->contexts, context);
    pthread_mutex_unlock(&b->lock);
    if (found)
        close_entry(b, found, error);
    else
        fail_argument(error, "no such context; it may have been closed");
    pthread_mutex_unlock(&b->opening);
    return leave(b, "close_execution_context", error);
}

/* ---- Begin and end ---- */

/* Copy a text, or the NULL of a variable that is not set. False: memory is exhausted. */
static bool copy_optional(char **copy, const char *text) {
    *copy = text ? strdup(text) : NULL;
    return !text == !*copy;
}

static void free_backend(backend *b) {
    remove_all(&b->graphs);
    remove_all(&b->contexts);
    pthread_mutex_destroy(&b->lock);
    pthread_mutex_destroy(&b->opening);
    free(b->config);
    free(b->models);
    free(b->label);
    free(b->priority);
    free(b);
}

int backend_begin(void **ctx, uint32_t first_number, const backend_limits *limits, const char *config,
                  inferd_error *error) {
    backend *b = calloc(1, sizeof *b);
    const char *timeout = getenv("INFERD_WASI_NN_TIMEOUT_S");
    if (!b)
        return fail_memory(error);
    pthread_mutex_init(&b->opening, NULL);
    pthread_mutex_init(&b->lock, NULL);
    b->contexts.next_number = first_number;
    b->limits = *limits;
    b->timeout_s = timeout ? strtod(timeout, NULL) : 0;
    b->quiet = is_quiet();
    if (!copy_optional(&b->config, config) || !copy_optional(&b->models, getenv("INFERD_WASI_NN_MODELS")) ||
        !copy_optional(&b->label, getenv("INFERD_WASI_NN_LABEL")) ||
        !copy_optional(&b->priority, getenv("INFERD_WASI_NN_PRIORITY"))) {
        free_backend(b);
        return fail_memory(error);
    }
    *ctx = publish(b);
    *error = (inferd_error){0};
    return INFERD_OK;
}

/* Take a backend from those that calls find. NULL: there is none. */
static backend *take_backend(const void *ctx) {
    lock_backends();
    backend **link = find_backend(ctx), *b = *link;
    if (b)
        *link = b->next;
    unlock_backends();
    return b;
}

int backend_end(void *ctx, inferd_error *error) {
    backend *b = take_backend(ctx);
    *error = (inferd_error){0};
    if (!b) {
        fail_ended("deinit_backend", error);
        return error->number;
    }
    pthread_mutex_lock(&b->lock);
    b->ended = true;
    inferd_client *client = b->client;
    pthread_mutex_unlock(&b->lock);
    inferd_close(client);
    lock_backends();
    while (b->uses)
        pthread_cond_wait(&backends.unused, &backends.lock);
    unlock_backends();
    free_backend(b);
    return INFERD_OK;
}
