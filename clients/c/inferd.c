/* inferd: the client of inferd.h. The protocol is described in docs/protocol.md.
 *
 * Sections: buffers and msgpack; errors; frames from the daemon; waiting; open clients; connecting; requests; calls.
 * Functions below "frames from the daemon" expect the connection's lock to be held, unless they take it. */
#define _GNU_SOURCE /* memfd_create */
#include "inferd.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum {
    PROTOCOL_MAJOR = 1,
    NESTING_MAX = 64,
    LENGTH_BYTES = 4,
    HELLO_BYTES_MAX = 1 << 16,    /* of the daemon's first frame, whose limits are not known yet */
    REPLY_BYTES_MAX = 64 << 20,   /* of a frame, whatever the daemon's hello says */
    STORED_BYTES_MAX = 64 << 20,  /* of replies and events that the program has not taken */
    OUT_BYTES_MAX = 4 << 20,      /* of frames that wait to be sent */
    PARAMS_BYTES = 4096,          /* of a frame, besides its longest text */
    READ_BYTES = 1 << 16,
    REQUESTS_MAX = 256,
    DESCRIPTORS_MAX = 16,
    MEDIA_INLINE_BYTES = 1 << 16, /* of an image or a sound within the frame */
    CREDIT = 64,
    CONNECT_TIMEOUT_MS = 10000,
    CONNECT_RETRY_MS = 10
};

/* Kinds of messages. */
enum { HELLO, REQUEST, REPLY, ERROR_REPLY, EVENT, MORE_CREDIT, GOODBYE };

/* ---- Buffers and msgpack ---- */

typedef struct buffer {
    uint8_t *data;
    size_t length, capacity;
    bool failed; /* memory is exhausted, or OUT_BYTES_MAX exceeded; stays until it is reset */
} buffer;

static bool reserve(buffer *b, size_t more, size_t max) {
    if (b->failed || more > max || b->length > max - more) {
        b->failed = true;
        return false;
    }
    if (b->length + more <= b->capacity)
        return true;
    size_t capacity = b->capacity ? b->capacity : 256;
    while (capacity < b->length + more)
        capacity *= 2;
    uint8_t *data = realloc(b->data, capacity);
    if (!data) {
        b->failed = true;
        return false;
    }
    b->data = data;
    b->capacity = capacity;
    return true;
}

static void drop_front(buffer *b, size_t count) {
    b->length -= count;
    if (b->length && count)
        memmove(b->data, b->data + count, b->length);
}

static void put_bytes(buffer *b, const void *bytes, size_t length) {
    if (!reserve(b, length, OUT_BYTES_MAX) || !length)
        return;
    memcpy(b->data + b->length, bytes, length);
    b->length += length;
}

/* Write a code and a number of `size` bytes, most significant byte first. */
static void put_number(buffer *b, uint8_t code, uint64_t number, size_t size) {
    uint8_t bytes[9] = {code};
    for (size_t i = 0; i < size; i++)
        bytes[size - i] = (uint8_t)(number >> (8 * i));
    put_bytes(b, bytes, size + 1);
}

static void put_uint(buffer *b, uint64_t number) {
    if (number < 0x80)
        put_bytes(b, &(uint8_t){(uint8_t)number}, 1);
    else if (number <= UINT32_MAX)
        put_number(b, 0xce, number, 4);
    else
        put_number(b, 0xcf, number, 8);
}

static void put_real(buffer *b, double number) {
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    put_number(b, 0xcb, bits, 8);
}

static void put_bool(buffer *b, bool value) { put_bytes(b, value ? "\xc3" : "\xc2", 1); }

static void put_text_of(buffer *b, const void *text, size_t length) {
    if (length < 32)
        put_bytes(b, &(uint8_t){(uint8_t)(0xa0 | length)}, 1);
    else
        put_number(b, 0xdb, length, 4);
    put_bytes(b, text, length);
}

static void put_text(buffer *b, const char *text) { put_text_of(b, text, strlen(text)); }

static void put_bin(buffer *b, const void *bytes, size_t length) {
    put_number(b, 0xc6, length, 4);
    put_bytes(b, bytes, length);
}

static void put_array(buffer *b, unsigned items) {
    if (items < 16)
        put_bytes(b, &(uint8_t){(uint8_t)(0x90 | items)}, 1);
    else
        put_number(b, 0xdc, items, 2);
}

/* The head of a map of at most 15 items. */
static void put_map(buffer *b, unsigned items) { put_bytes(b, &(uint8_t){(uint8_t)(0x80 | items)}, 1); }

typedef enum value_type { NIL, BOOL, INT, REAL, TEXT, BIN, ARRAY, MAP, EXTENSION } value_type;

/* One value, or the head of an array (`length` items) or map (`length` pairs). */
typedef struct value {
    value_type type;
    bool negative;        /* INT: `number` is then two's complement */
    uint64_t number;      /* INT, BOOL */
    double real;          /* REAL */
    const uint8_t *bytes; /* TEXT, BIN, EXTENSION: points into the frame */
    uint32_t length;
} value;

typedef struct reader {
    const uint8_t *at, *end;
} reader;

static bool read_bytes(reader *r, size_t length, const uint8_t **bytes) {
    if ((size_t)(r->end - r->at) < length)
        return false;
    *bytes = r->at;
    r->at += length;
    return true;
}

static bool read_number(reader *r, size_t size, uint64_t *number) {
    const uint8_t *bytes;
    if (!read_bytes(r, size, &bytes))
        return false;
    *number = 0;
    for (size_t i = 0; i < size; i++)
        *number = *number << 8 | bytes[i];
    return true;
}

static bool read_contents(reader *r, value *v, value_type type, uint64_t length) {
    v->type = type;
    v->length = (uint32_t)length;
    return type == ARRAY || type == MAP || read_bytes(r, (size_t)length, &v->bytes);
}

/* Read a length of `size` bytes, then the contents. */
static bool read_sized(reader *r, value *v, value_type type, size_t size) {
    uint64_t length;
    return read_number(r, size, &length) && read_contents(r, v, type, length + (type == EXTENSION));
}

static bool read_int(reader *r, value *v, size_t size, bool is_signed) {
    v->type = INT;
    if (!read_number(r, size, &v->number))
        return false;
    v->negative = is_signed && v->number >> (8 * size - 1);
    if (v->negative && size < 8)
        v->number |= UINT64_MAX << (8 * size);
    return true;
}

static bool read_real(reader *r, value *v, size_t size) {
    uint64_t bits;
    v->type = REAL;
    if (!read_number(r, size, &bits))
        return false;
    if (size == 8) {
        memcpy(&v->real, &bits, sizeof v->real);
    } else {
        float real;
        uint32_t low = (uint32_t)bits;
        memcpy(&real, &low, sizeof real);
        v->real = (double)real;
    }
    return true;
}

static bool read_coded(reader *r, value *v, uint8_t code) {
    switch (code) {
    case 0xc0: v->type = NIL; return true;
    case 0xc2: case 0xc3: v->type = BOOL; v->number = code & 1; return true;
    case 0xc4: case 0xc5: case 0xc6: return read_sized(r, v, BIN, 1u << (code - 0xc4));
    case 0xc7: case 0xc8: case 0xc9: return read_sized(r, v, EXTENSION, 1u << (code - 0xc7));
    case 0xca: return read_real(r, v, 4);
    case 0xcb: return read_real(r, v, 8);
    case 0xcc: case 0xcd: case 0xce: case 0xcf: return read_int(r, v, 1u << (code - 0xcc), false);
    case 0xd0: case 0xd1: case 0xd2: case 0xd3: return read_int(r, v, 1u << (code - 0xd0), true);
    case 0xd4: case 0xd5: case 0xd6: case 0xd7: case 0xd8:
        return read_contents(r, v, EXTENSION, (1u << (code - 0xd4)) + 1);
    case 0xd9: case 0xda: case 0xdb: return read_sized(r, v, TEXT, 1u << (code - 0xd9));
    case 0xdc: case 0xdd: return read_sized(r, v, ARRAY, 2u << (code - 0xdc));
    case 0xde: case 0xdf: return read_sized(r, v, MAP, 2u << (code - 0xde));
    default: return false; /* 0xc1 has no meaning in msgpack */
    }
}

/* Read a value; of an array or map only its head. False: the frame ends in the middle of it. */
static bool read_value(reader *r, value *v) {
    const uint8_t *first;
    *v = (value){0};
    if (!read_bytes(r, 1, &first))
        return false;
    uint8_t code = *first;
    if (code >= 0xc0 && code < 0xe0)
        return read_coded(r, v, code);
    if (code < 0x80 || code >= 0xe0) {
        v->type = INT;
        v->negative = code >= 0xe0;
        v->number = v->negative ? UINT64_MAX << 8 | code : code;
        return true;
    }
    if (code >= 0xa0)
        return read_contents(r, v, TEXT, code & 0x1f);
    return read_contents(r, v, code >= 0x90 ? ARRAY : MAP, code & 0x0f);
}

/* Skip a whole value. False: it is incomplete, or has more than NESTING_MAX levels. */
static bool skip_value(reader *r) {
    uint64_t left[NESTING_MAX + 1] = {1}; /* values that are left on each level */
    size_t level = 0;
    value v;
    while (left[0] || level) {
        if (!left[level]) {
            level--;
            continue;
        }
        left[level]--;
        if (!read_value(r, &v))
            return false;
        uint64_t items = v.type == ARRAY ? v.length : v.type == MAP ? 2 * (uint64_t)v.length : 0;
        if (!items)
            continue;
        if (level == NESTING_MAX)
            return false;
        left[++level] = items;
    }
    return true;
}

static bool is_text(const value *v, const char *text) {
    return v->type == TEXT && v->length == strlen(text) && !memcmp(v->bytes, text, v->length);
}

/* Find the value of a key in a map; `map` stands at the map, which was checked by skip_value. If that
 * is an array or map, `inner`, which may be NULL, then stands at it. */
static bool find_key(reader map, const char *key, value *found, reader *inner) {
    value head, name;
    if (!read_value(&map, &head) || head.type != MAP)
        return false;
    for (uint32_t i = 0; i < head.length; i++) {
        if (!read_value(&map, &name))
            return false;
        if (name.type == ARRAY || name.type == MAP)
            return false;
        if (is_text(&name, key)) {
            if (inner)
                *inner = map;
            return read_value(&map, found);
        }
        if (!skip_value(&map))
            return false;
    }
    return false;
}

static uint64_t find_uint(reader map, const char *key, uint64_t otherwise) {
    value v;
    return find_key(map, key, &v, NULL) && v.type == INT && !v.negative ? v.number : otherwise;
}

static double find_real(reader map, const char *key) {
    value v;
    if (!find_key(map, key, &v, NULL))
        return 0;
    return v.type == REAL ? v.real : v.type == INT && !v.negative ? (double)v.number : 0;
}

/* Copy a text and end it with a zero byte; a longer text is cut, not inside a UTF-8 character. */
static void copy_cut(char *target, size_t size, const void *text, size_t length) {
    const char *source = text;
    if (length >= size) {
        length = size - 1;
        while (length && ((uint8_t)source[length] & 0xc0) == 0x80)
            length--;
    }
    if (length)
        memcpy(target, source, length);
    target[length] = 0;
}

static void find_text(reader map, const char *key, char *target, size_t size) {
    value v;
    bool found = find_key(map, key, &v, NULL) && v.type == TEXT;
    copy_cut(target, size, found ? v.bytes : (const uint8_t *)"", found ? v.length : 0);
}

/* ---- Errors ---- */

static const struct {
    const char *name;
    int number, wasi;
} ERRORS[] = {
    {"InvalidArgument", INFERD_INVALID_ARGUMENT, 1},
    {"InvalidEncoding", INFERD_INVALID_ENCODING, 2},
    {"MissingMemory", INFERD_MISSING_MEMORY, 3},
    {"Busy", INFERD_BUSY, 4},
    {"RuntimeError", INFERD_RUNTIME_ERROR, 5},
    {"UnsupportedOperation", INFERD_UNSUPPORTED_OPERATION, 6},
    {"TooLarge", INFERD_TOO_LARGE, 7},
    {"NotFound", INFERD_NOT_FOUND, 8},
    {"EndOfSequence", INFERD_END_OF_SEQUENCE, 100},
    {"ContextFull", INFERD_CONTEXT_FULL, 101},
    {"PromptTooLong", INFERD_PROMPT_TOO_LONG, 102},
    {"ModelNotFound", INFERD_MODEL_NOT_FOUND, 103},
    {"Timeout", INFERD_TIMEOUT, 5},
    {"Cancelled", INFERD_CANCELLED, 5},
    {"SessionBusy", INFERD_SESSION_BUSY, 4},
    {"SessionExpired", INFERD_SESSION_EXPIRED, 1},
    {"ReaderTimeout", INFERD_READER_TIMEOUT, 5},
    {"WorkerCrashed", INFERD_WORKER_CRASHED, 5},
    {"LoadFailed", INFERD_LOAD_FAILED, 1},
    {"PermissionDenied", INFERD_PERMISSION_DENIED, 6},
    {"ShuttingDown", INFERD_SHUTTING_DOWN, 4},
    {"ProtocolError", INFERD_PROTOCOL_ERROR, 1},
    {"VersionMismatch", INFERD_VERSION_MISMATCH, 6},
    {"ConnectionLost", INFERD_CONNECTION_LOST, 5},
    {"KvFull", INFERD_KV_FULL, 3},
    {"QuotaExceeded", INFERD_QUOTA_EXCEEDED, 4},
};

/* Fill in the number and the wasi number of an error by its name. */
static void number_error(inferd_error *error) {
    error->number = INFERD_UNKNOWN;
    error->wasi = 5;
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (!strcmp(ERRORS[i].name, error->name)) {
            error->number = ERRORS[i].number;
            error->wasi = ERRORS[i].wasi;
        }
}

/* Fill `error`, which may be NULL, with an error of this client; return its number. */
static int fail(inferd_error *error, int number, const char *message, const char *hint) {
    inferd_error made = {0};
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].number == number)
            snprintf(made.name, sizeof made.name, "%s", ERRORS[i].name);
    number_error(&made);
    made.retryable = made.wasi == 4;
    snprintf(made.message, sizeof made.message, "%s", message);
    snprintf(made.hint, sizeof made.hint, "%s", hint);
    if (error)
        *error = made;
    return made.number;
}

static int fail_null(inferd_error *error, const char *what) {
    char message[64];
    snprintf(message, sizeof message, "%s is NULL", what);
    return fail(error, INFERD_INVALID_ARGUMENT, message, "pass a pointer");
}

static int fail_memory(inferd_error *error) {
    return fail(error, INFERD_MISSING_MEMORY, "the program's memory is exhausted", "free memory");
}

static int copy_error(inferd_error *error, const inferd_error *source) {
    if (error)
        *error = *source;
    return source->number;
}

static int succeed(inferd_error *error) {
    if (error)
        *error = (inferd_error){0};
    return INFERD_OK;
}

/* Read an error of the protocol; `map` stands at it. */
static void read_error(reader map, inferd_error *error) {
    value v;
    reader data;
    *error = (inferd_error){0};
    find_text(map, "name", error->name, sizeof error->name);
    find_text(map, "message", error->message, sizeof error->message);
    find_text(map, "hint", error->hint, sizeof error->hint);
    error->retryable = find_key(map, "retryable", &v, NULL) && v.type == BOOL && v.number;
    if (find_key(map, "data", &v, &data) && v.type == MAP) {
        error->retry_after_s = find_real(data, "retry_after_s");
        error->needed = find_uint(data, "needed", 0);
    }
    number_error(error);
}

/* ---- Frames from the daemon ---- */

/* A reply or an event that was received and not taken yet. `body` is the frame's array. */
typedef struct stored {
    struct stored *next;
    uint64_t kind;
    size_t length;
    uint8_t body[];
} stored;

typedef struct request {
    struct request *next;
    uint64_t id;
    inferd_kind kind;
    bool waited_for; /* by a call that waits: `inferd_next_event` for any request leaves it out */
    bool abandoned;  /* nothing of it is stored any longer; its reply removes it */
    bool replied;
    unsigned events; /* stored and not taken */
    unsigned taken;  /* events for which no credit was returned yet */
    stored *first, **last;
} request;

/* A client: the program has its number in place of a pointer. */
typedef struct connection {
    struct connection *next; /* these three are guarded by `open_clients.lock` */
    uintptr_t number;
    unsigned uses;        /* calls under way */
    pthread_mutex_t lock; /* guards all that follows, except fd, which never changes */
    pthread_cond_t changed;
    int fd;
    int call_timeout_ms;
    bool polling; /* a thread waits for the socket; others wait for `changed` */
    bool greeted; /* the daemon's hello has come */
    bool ended;   /* the connection has ended with `end` */
    inferd_error end;
    uint64_t frame_bytes_max, reply_bytes_max, requests_max;
    buffer in, out;
    int descriptors[DESCRIPTORS_MAX]; /* go out with the next bytes */
    size_t descriptor_count;
    request *requests;
    size_t request_count, stored_bytes;
    uint64_t last_id;
} connection;

static void end_connection(connection *client, const inferd_error *error) {
    if (client->ended)
        return;
    client->ended = true;
    client->end = *error;
    shutdown(client->fd, SHUT_RDWR);
}

static void end_with(connection *client, int number, const char *message, const char *hint) {
    inferd_error error;
    fail(&error, number, message, hint);
    end_connection(client, &error);
}

static void end_unreadable(connection *client, const char *message) {
    end_with(client, INFERD_PROTOCOL_ERROR, message, "check that the socket is inferd's");
}

static request *find_request(connection *client, uint64_t id) {
    request *r = client->requests;
    while (r && r->id != id)
        r = r->next;
    return r;
}

static void append_request(connection *client, request *r) {
    request **end = &client->requests;
    while (*end)
        end = &(*end)->next;
    *end = r;
    client->request_count++;
}

static void drop_first(connection *client, request *r) {
    stored *first = r->first;
    r->first = first->next;
    if (!r->first)
        r->last = &r->first;
    client->stored_bytes -= first->length;
    free(first);
}

static void remove_request(connection *client, request *r) {
    request **link = &client->requests;
    while (*link != r)
        link = &(*link)->next;
    *link = r->next;
    while (r->first)
        drop_first(client, r);
    free(r);
    client->request_count--;
}

static void store(connection *client, request *r, uint64_t kind, reader body) {
    size_t length = (size_t)(body.end - body.at);
    if (kind == EVENT && r->events >= CREDIT) {
        end_unreadable(client, "the daemon has sent more events than it had credit for");
        return;
    }
    if (length > STORED_BYTES_MAX - client->stored_bytes) {
        end_with(client, INFERD_TOO_LARGE, "more than 64 MiB of replies were not taken", "take them earlier");
        return;
    }
    stored *kept = malloc(sizeof *kept + length);
    if (!kept) {
        end_with(client, INFERD_MISSING_MEMORY, "no memory for a reply", "free memory");
        return;
    }
    kept->next = NULL;
    kept->kind = kind;
    kept->length = length;
    memcpy(kept->body, body.at, length);
    client->stored_bytes += length;
    r->events += kind == EVENT;
    r->replied = kind != EVENT;
    *r->last = kept;
    r->last = &kept->next;
}

/* A reply, an error reply or an event: `body` stands at the map that is its content. */
static void receive_answer(connection *client, uint64_t kind, uint64_t id, reader body) {
    request *r = find_request(client, id);
    if (!r || r->replied || (kind == EVENT && (r->kind != INFERD_STREAM || r->abandoned)))
        return; /* the protocol has clients ignore these */
    if (r->abandoned)
        remove_request(client, r);
    else
        store(client, r, kind, body);
}

static void receive_hello(connection *client, reader map) {
    value v, major;
    reader inner;
    if (!find_key(map, "protocol", &v, &inner) || v.type != ARRAY || v.length != 2 ||
        !read_value(&inner, &v) || !read_value(&inner, &major) || major.type != INT) {
        end_unreadable(client, "the daemon's hello has no protocol version");
        return;
    }
    if (major.negative || major.number != PROTOCOL_MAJOR) {
        end_with(client, INFERD_VERSION_MISMATCH, "the daemon speaks another major version of the protocol",
                 "use the client of the daemon's version");
        return;
    }
    if (find_key(map, "limits", &v, &inner) && v.type == MAP) {
        client->frame_bytes_max = find_uint(inner, "frame_bytes_max", client->frame_bytes_max);
        client->reply_bytes_max = find_uint(inner, "reply_bytes_max", client->reply_bytes_max);
        client->requests_max = find_uint(inner, "requests_max", client->requests_max);
    }
    if (client->reply_bytes_max > REPLY_BYTES_MAX)
        client->reply_bytes_max = REPLY_BYTES_MAX;
    if (client->requests_max > REQUESTS_MAX)
        client->requests_max = REQUESTS_MAX;
    client->greeted = true;
}

/* Handle the body of a frame, one msgpack array. */
static void receive_body(connection *client, reader body) {
    value head, kind, id, content;
    reader whole = body;
    if (!skip_value(&whole) || whole.at != whole.end || !read_value(&body, &head) || head.type != ARRAY ||
        !read_value(&body, &kind) || kind.type != INT || kind.negative) {
        end_unreadable(client, "the daemon has sent a frame that cannot be read");
        return;
    }
    bool answers = kind.number >= REPLY && kind.number <= EVENT;
    if (!answers && kind.number != HELLO && kind.number != GOODBYE)
        return; /* a kind of a later version */
    bool has_id = !answers || (read_value(&body, &id) && id.type == INT && !id.negative);
    reader at = body;
    if (head.length < (answers ? 3u : 2u) || !has_id || !read_value(&body, &content) || content.type != MAP) {
        end_unreadable(client, "the daemon has sent a message without its content");
    } else if (answers) {
        receive_answer(client, kind.number, id.number, at);
    } else if (kind.number == GOODBYE) {
        inferd_error error;
        read_error(at, &error);
        end_connection(client, &error);
    } else if (!client->greeted) {
        receive_hello(client, at);
    }
}

/* Handle all complete frames in `in`. */
static void receive_frames(connection *client) {
    size_t at = 0;
    while (!client->ended && client->in.length - at >= LENGTH_BYTES) {
        const uint8_t *p = client->in.data + at;
        uint64_t length = p[0] | (uint64_t)p[1] << 8 | (uint64_t)p[2] << 16 | (uint64_t)p[3] << 24;
        if (length > (client->greeted ? client->reply_bytes_max : HELLO_BYTES_MAX)) {
            end_with(client, INFERD_TOO_LARGE, "the daemon has sent a frame over its limit",
                     "check that the socket is inferd's");
            return;
        }
        if (client->in.length - at - LENGTH_BYTES < length)
            break;
        p += LENGTH_BYTES;
        receive_body(client, (reader){p, p + length});
        at += LENGTH_BYTES + (size_t)length;
    }
    drop_front(&client->in, at);
}

/* `reason` is an errno, or 0: the daemon has closed the connection. */
static void end_lost(connection *client, int reason) {
    char message[128];
    const char *cause = reason ? strerror(reason) : "closed by the daemon";
    snprintf(message, sizeof message, "the connection was lost: %s", cause);
    end_with(client, INFERD_CONNECTION_LOST, message, "connect again; the daemon may have been restarted");
}

/* Receive the bytes that have arrived. A frame in `in` has a bound, and so have the bytes of one call. */
static void receive(connection *client) {
    for (int i = 0; i < 64 && !client->ended; i++) {
        if (!reserve(&client->in, READ_BYTES, REPLY_BYTES_MAX + 2 * READ_BYTES)) {
            end_with(client, INFERD_MISSING_MEMORY, "no memory for a frame", "free memory");
            return;
        }
        ssize_t got = recv(client->fd, client->in.data + client->in.length, READ_BYTES, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (got <= 0) {
            end_lost(client, got ? errno : 0);
            return;
        }
        client->in.length += (size_t)got;
        receive_frames(client);
        if (got < READ_BYTES)
            return;
    }
}

static void drop_descriptors(connection *client) {
    while (client->descriptor_count)
        close(client->descriptors[--client->descriptor_count]);
}

/* Send one part of `out`, with the descriptors that wait. */
static ssize_t send_part(connection *client) {
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(DESCRIPTORS_MAX * sizeof(int))];
    } control = {0};
    struct iovec part = {client->out.data, client->out.length};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    size_t size = client->descriptor_count * sizeof(int);
    if (size) {
        message.msg_control = &control;
        message.msg_controllen = (socklen_t)CMSG_SPACE(size); /* musl's type */
        control.header.cmsg_len = (socklen_t)CMSG_LEN(size);
        control.header.cmsg_level = SOL_SOCKET;
        control.header.cmsg_type = SCM_RIGHTS;
        memcpy(CMSG_DATA(&control.header), client->descriptors, size);
    }
    return sendmsg(client->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static void transmit(connection *client) {
    while (client->out.length && !client->ended) {
        ssize_t sent = send_part(client);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (sent < 0) {
            int reason = errno;
            receive(client); /* a goodbye that explains it may have come before */
            end_lost(client, reason);
            return;
        }
        drop_descriptors(client);
        drop_front(&client->out, (size_t)sent);
    }
}

static void process(connection *client) {
    transmit(client);
    if (!client->ended)
        receive(client);
}

/* ---- Waiting ---- */

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* The time at which `timeout_ms` has passed; -1: never. */
static int64_t deadline_after(int timeout_ms) { return timeout_ms < 0 ? -1 : now_ms() + timeout_ms; }

static bool has_passed(int64_t deadline) { return deadline >= 0 && now_ms() >= deadline; }

static int left_ms(int64_t deadline) {
    if (deadline < 0)
        return -1;
    int64_t left = deadline - now_ms();
    return left < 0 ? 0 : left > INT32_MAX ? INT32_MAX : (int)left;
}

static short events_wanted(const connection *client) {
    return (short)(client->out.length ? POLLIN | POLLOUT : POLLIN);
}

/* Wait for the socket, without the lock, and process. Several threads may be here: one that waits for
 * replies, and those whose frames are not sent yet. */
static void wait_for_socket(connection *client, int64_t deadline) {
    bool leads = !client->polling;
    struct pollfd polled = {client->fd, events_wanted(client), 0};
    if (leads)
        client->polling = true;
    pthread_mutex_unlock(&client->lock);
    poll(&polled, 1, left_ms(deadline));
    pthread_mutex_lock(&client->lock);
    if (leads)
        client->polling = false;
    process(client);
    pthread_cond_broadcast(&client->changed);
}

static void wait_for_change(connection *client, int64_t deadline) {
    if (deadline < 0) {
        pthread_cond_wait(&client->changed, &client->lock);
        return;
    }
    struct timespec until = {deadline / 1000, deadline % 1000 * 1000000};
    pthread_cond_timedwait(&client->changed, &client->lock, &until);
}

/* The request with the id, or the oldest that no call waits for (0), from which an event can be taken; else NULL.
 * `exists`: whether there is a request that can have events later. */
static request *find_ready(connection *client, uint64_t id, bool *exists) {
    *exists = false;
    for (request *r = client->requests; r; r = r->next) {
        if (r->abandoned || (id ? r->id != id : r->waited_for))
            continue;
        *exists = true;
        if (r->first || client->ended)
            return r;
    }
    return NULL;
}

/* Wait until an event of the request can be taken. NULL: the deadline has passed, or there is no request. */
static request *wait_for_event(connection *client, uint64_t id, int64_t deadline) {
    for (;;) {
        bool exists;
        request *ready = find_ready(client, id, &exists);
        if (ready || !exists || has_passed(deadline))
            return ready;
        if (client->out.length || !client->polling)
            wait_for_socket(client, deadline);
        else
            wait_for_change(client, deadline);
    }
}

/* ---- Open clients ---- */

/* A number is never used again, so a call with a client that was closed is refused. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t unused; /* a client has no call under way any more */
    connection *first;
    connection *inherited; /* in a child process: the parent's, kept reachable for leak checkers */
    uintptr_t last_number;
} open_clients = {.lock = PTHREAD_MUTEX_INITIALIZER, .unused = PTHREAD_COND_INITIALIZER};

static void lock_open_clients(void) { pthread_mutex_lock(&open_clients.lock); }
static void unlock_open_clients(void) { pthread_mutex_unlock(&open_clients.lock); }

/* In a child process: leave the parent's connections to the parent. Other threads may have been changing the
 * clients, so only the descriptors are closed. */
static void forget_open_clients(void) {
    for (connection *c = open_clients.first; c; c = c->next)
        close(c->fd);
    open_clients.inherited = open_clients.first;
    open_clients.first = NULL;
    pthread_cond_init(&open_clients.unused, NULL);
    unlock_open_clients();
}

static void handle_forks(void) { pthread_atfork(lock_open_clients, unlock_open_clients, forget_open_clients); }

/* Add a client to those that calls find. */
static inferd_client *publish(connection *client) {
    static pthread_once_t handles_forks = PTHREAD_ONCE_INIT;
    pthread_once(&handles_forks, handle_forks);
    lock_open_clients();
    client->number = ++open_clients.last_number;
    client->next = open_clients.first;
    open_clients.first = client;
    unlock_open_clients();
    return (inferd_client *)client->number;
}

/* The link to an open client, or to NULL; `open_clients` is locked. */
static connection **find_open(const inferd_client *handle) {
    connection **link = &open_clients.first;
    while (*link && (*link)->number != (uintptr_t)handle)
        link = &(*link)->next;
    return link;
}

static int fail_closed(inferd_error *error) {
    return fail(error, INFERD_INVALID_ARGUMENT, "no such client: it was closed, or the process has forked since",
                "connect a client");
}

/* Return an open client with its lock held, which `leave` releases; NULL: there is none. */
static connection *enter(const inferd_client *handle, inferd_error *error) {
    lock_open_clients();
    connection *client = *find_open(handle);
    if (client)
        client->uses++;
    unlock_open_clients();
    if (client)
        pthread_mutex_lock(&client->lock);
    else
        fail_closed(error);
    return client;
}

static void leave(connection *client) {
    pthread_mutex_unlock(&client->lock);
    lock_open_clients();
    if (!--client->uses)
        pthread_cond_broadcast(&open_clients.unused);
    unlock_open_clients();
}

/* ---- Connecting ---- */

static bool is_socket(const char *path) {
    struct stat found;
    return !stat(path, &found) && S_ISSOCK(found.st_mode);
}

static const char SYSTEM_SOCKET[] = "/run/inferd/inferd.sock";

static bool is_folder(const char *path) {
    struct stat found;
    return !stat(path, &found) && S_ISDIR(found.st_mode);
}

/* The user's private folder. Any user can make it, so that it and its daemon are checked. */
static void private_folder(char *path, size_t size) {
    snprintf(path, size, "/tmp/inferd-%ju", (uintmax_t)geteuid());
}

static const char PRIVATE_HINT[] =
    "remove it if it is yours, or set INFERD_SOCKET or XDG_RUNTIME_DIR to a path that only you can change";

static bool is_in_private_folder(const char *path) {
    char folder[64];
    private_folder(folder, sizeof folder);
    const char *end = strrchr(path, '/');
    return end && (size_t)(end - path) == strlen(folder) && !strncmp(path, folder, strlen(folder));
}

/* Check the private folder: it is the user's alone. A link is not followed: another user may change its target.
 * INFERD_CONNECTION_LOST: there is no such folder. */
static int check_private_folder(inferd_error *error) {
    char folder[64], message[256];
    const char *wrong = NULL;
    struct stat found;
    private_folder(folder, sizeof folder);
    if (lstat(folder, &found)) {
        snprintf(message, sizeof message, "no daemon answers in %s: %s", folder, strerror(errno));
        return fail(error, INFERD_CONNECTION_LOST, message, "start it with `inferd start`, or set INFERD_SOCKET");
    }
    if (!S_ISDIR(found.st_mode))
        wrong = "is not a folder";
    else if (found.st_uid != geteuid())
        wrong = "belongs to another user";
    else if (found.st_mode & 077)
        wrong = "is open to other users";
    if (!wrong)
        return INFERD_OK;
    snprintf(message, sizeof message, "%s %s", folder, wrong);
    return fail(error, INFERD_PERMISSION_DENIED, message, PRIVATE_HINT);
}

/* Return whether the program at the other end is this user's. */
static bool is_own_program(int fd) {
    struct ucred peer = {0};
    socklen_t size = sizeof peer;
    return !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) && peer.uid == geteuid();
}

/* Write the path on which a daemon without a configured path listens, other than in the runtime folder. */
static void find_shared_or_private(char *path, size_t size) {
    char folder[64];
    private_folder(folder, sizeof folder);
    if (is_folder("/run/inferd") || !faccessat(AT_FDCWD, "/run", W_OK, AT_EACCESS))
        snprintf(path, size, "%s", SYSTEM_SOCKET);
    else
        snprintf(path, size, "%s/inferd.sock", folder);
}

/* Write the first socket that exists: in the runtime folder, of the system, in the private folder. If none exists,
 * write the path on which a daemon would listen. */
static void find_socket(const char *given, char *path, size_t size) {
    const char *set = given && *given ? given : getenv("INFERD_SOCKET");
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    char users[64], folder[64], private_path[80];
    if (set && *set) {
        snprintf(path, size, "%s", set);
        return;
    }
    snprintf(users, sizeof users, "/run/user/%ju", (uintmax_t)geteuid());
    if (!runtime || !*runtime)
        runtime = is_folder(users) ? users : NULL;
    if (runtime)
        snprintf(path, size, "%s/inferd/inferd.sock", runtime);
    else
        find_shared_or_private(path, size);
    private_folder(folder, sizeof folder);
    snprintf(private_path, sizeof private_path, "%s/inferd.sock", folder);
    if (is_socket(path))
        return;
    if (is_socket(SYSTEM_SOCKET))
        snprintf(path, size, "%s", SYSTEM_SOCKET);
    else if (is_socket(private_path) && !check_private_folder(NULL))
        snprintf(path, size, "%s", private_path);
}

/* Connect a socket; return it, or -1 with errno. While many clients connect at once, `connect` fails with
 * EAGAIN: it is repeated. */
static int connect_socket(const struct sockaddr_un *address, int64_t deadline) {
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    while (fd >= 0 && connect(fd, (const struct sockaddr *)address, sizeof *address)) {
        if ((errno != EAGAIN && errno != EINTR) || has_passed(deadline)) {
            int reason = errno;
            close(fd);
            errno = reason;
            return -1;
        }
        poll(NULL, 0, CONNECT_RETRY_MS);
    }
    return fd;
}

static int connect_to(const char *path, int64_t deadline, int *fd, inferd_error *error) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char message[256];
    bool is_private = is_in_private_folder(path);
    int number = is_private ? check_private_folder(error) : INFERD_OK;
    if (number)
        return number;
    if (strlen(path) >= sizeof address.sun_path)
        return fail(error, INFERD_INVALID_ARGUMENT, "the socket's path has more than 107 bytes",
                    "use a shorter path, or a symbolic link");
    memcpy(address.sun_path, path, strlen(path));
    *fd = connect_socket(&address, deadline);
    if (*fd >= 0 && is_private && !is_own_program(*fd)) {
        close(*fd);
        return fail(error, INFERD_PERMISSION_DENIED, "the program that listens in the private folder is another user's",
                    PRIVATE_HINT);
    }
    if (*fd >= 0)
        return INFERD_OK;
    snprintf(message, sizeof message, "cannot connect to %.107s: %s", path, strerror(errno));
    return fail(error, INFERD_CONNECTION_LOST, message, "start the daemon with `inferd serve`, or set INFERD_SOCKET");
}

static connection *make_client(int fd, int call_timeout_ms) {
    connection *client = calloc(1, sizeof *client);
    if (!client)
        return NULL;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&client->lock, NULL);
    pthread_cond_init(&client->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    client->fd = fd;
    client->call_timeout_ms = call_timeout_ms;
    client->frame_bytes_max = 1 << 20;
    client->reply_bytes_max = 8 << 20;
    client->requests_max = REQUESTS_MAX;
    return client;
}

/* Begin a frame; `end_frame` writes its length, or removes it again. */
static size_t begin_frame(connection *client) {
    size_t start = client->out.length;
    put_bytes(&client->out, "\0\0\0", LENGTH_BYTES);
    return start;
}

static int end_frame(connection *client, size_t start, inferd_error *error) {
    buffer *out = &client->out;
    size_t length = out->length - start - LENGTH_BYTES;
    int number = INFERD_OK;
    if (out->failed && start)
        number = fail(error, INFERD_BUSY, "too many bytes wait to be sent",
                      "call inferd_process, or wait for replies first");
    else if (out->failed || length > client->frame_bytes_max)
        number = fail(error, INFERD_TOO_LARGE, "the request exceeds the daemon's frame_bytes_max",
                      "pass a long prompt by inferd_set_input");
    if (number) {
        out->failed = false;
        out->length = start;
        return number;
    }
    for (size_t i = 0; i < LENGTH_BYTES; i++)
        out->data[start + i] = (uint8_t)(length >> (8 * i));
    return INFERD_OK;
}


/* A map of at most 15 fields, whose number is written at the end. */
typedef struct fields {
    buffer *out;
    size_t head;
    unsigned count;
} fields;

static buffer *put_key(fields *f, const char *key) {
    f->count++;
    put_text(f->out, key);
    return f->out;
}

static void put_text_field(fields *f, const char *key, const char *text) {
    if (text && *text)
        put_text(put_key(f, key), text);
}

static fields begin_fields(buffer *out) {
    fields f = {out, out->length, 0};
    put_map(out, 0);
    return f;
}

static void end_fields(const fields *f) {
    if (!f->out->failed)
        f->out->data[f->head] |= (uint8_t)f->count;
}

static int put_hello(connection *client, const inferd_options *options, inferd_error *error) {
    size_t start = begin_frame(client);
    put_array(&client->out, 2);
    put_uint(&client->out, HELLO);
    fields f = begin_fields(&client->out);
    put_array(put_key(&f, "protocol"), 2);
    put_uint(f.out, PROTOCOL_MAJOR);
    put_uint(f.out, 0);
    put_text_field(&f, "software", options->software ? options->software : "inferd-c");
    put_text_field(&f, "label", options->label);
    put_text_field(&f, "on_behalf_of", options->on_behalf_of);
    end_fields(&f);
    return end_frame(client, start, error);
}

/* A daemon without a free place sends its hello, then at once a goodbye: the client waits for the hello
 * and then receives the bytes that have arrived. */
static int exchange_hellos(connection *client, const inferd_options *options, int64_t deadline,
                           inferd_error *error) {
    pthread_mutex_lock(&client->lock);
    int number = put_hello(client, options, error);
    while (!number && !client->greeted && !client->ended && !has_passed(deadline))
        wait_for_socket(client, deadline);
    if (client->greeted && !client->ended)
        process(client);
    if (!number && client->ended)
        number = copy_error(error, &client->end);
    else if (!number && !client->greeted)
        number = fail(error, INFERD_TIMEOUT, "the daemon has sent no hello in time", "see the daemon's log");
    pthread_mutex_unlock(&client->lock);
    return number;
}

static void free_client(connection *client) {
    close(client->fd);
    drop_descriptors(client);
    while (client->requests)
        remove_request(client, client->requests);
    free(client->in.data);
    free(client->out.data);
    pthread_cond_destroy(&client->changed);
    pthread_mutex_destroy(&client->lock);
    free(client);
}

int inferd_connect(const inferd_options *options, inferd_client **client, inferd_error *error) {
    inferd_options used = options ? *options : (inferd_options){0};
    int timeout = used.connect_timeout_ms > 0 ? used.connect_timeout_ms : CONNECT_TIMEOUT_MS;
    int64_t deadline = deadline_after(timeout);
    char path[4096];
    int fd = -1;
    if (!client)
        return fail_null(error, "the client");
    find_socket(used.socket, path, sizeof path);
    int number = connect_to(path, deadline, &fd, error);
    if (number)
        return number;
    connection *made = make_client(fd, used.call_timeout_ms);
    if (!made) {
        close(fd);
        return fail_memory(error);
    }
    number = exchange_hellos(made, &used, deadline, error);
    if (number) {
        free_client(made);
        return number;
    }
    *client = publish(made);
    return succeed(error);
}

/* Take a client from those that calls find. NULL: there is none. */
static connection *take_open(const inferd_client *handle) {
    lock_open_clients();
    connection **link = find_open(handle), *client = *link;
    if (client)
        *link = client->next;
    unlock_open_clients();
    return client;
}

int inferd_close(inferd_client *handle) {
    connection *client = take_open(handle);
    if (!client)
        return fail_closed(NULL);
    pthread_mutex_lock(&client->lock);
    end_with(client, INFERD_CONNECTION_LOST, "the program has closed the client", "connect another");
    pthread_cond_broadcast(&client->changed);
    pthread_mutex_unlock(&client->lock);
    lock_open_clients();
    while (client->uses)
        pthread_cond_wait(&open_clients.unused, &open_clients.lock);
    unlock_open_clients();
    free_client(client);
    return INFERD_OK;
}

/* ---- Requests ---- */

/* Fields of a request's parameters. */
enum {
    GRAPH = 1 << 0,
    CONTEXT = 1 << 1,
    NAME = 1 << 2,
    SESSION = 1 << 3,
    CONFIG = 1 << 4,
    MODEL_FILE = 1 << 5,
    INDEX = 1 << 6,
    TENSOR = 1 << 7,
    SIZE_MAX_FIELD = 1 << 8,
    PROMPT = 1 << 9,
    KEEP = 1 << 10,
    TURN = 1 << 11,
    TURN_TIMEOUT = 1 << 12, /* the parts of TURN without queue_timeout_s */
    DOCUMENTS = 1 << 13,
    PLACE = 1 << 14 /* of INFERD_STREAM it may be missing */
};

static const struct {
    const char *name;
    unsigned fields;
} CALLS[] = {
    [INFERD_LOAD] = {"load_by_name_with_config", NAME | CONFIG},
    [INFERD_LOAD_FILE] = {"load", MODEL_FILE},
    [INFERD_LOAD_BUILDERS] = {"load", MODEL_FILE},
    [INFERD_UNLOAD] = {"unload", GRAPH | KEEP},
    [INFERD_OPEN] = {"init_execution_context", GRAPH},
    [INFERD_OPEN_SESSION] = {"init_execution_context_with_session_id", GRAPH | SESSION},
    [INFERD_SET_INPUT] = {"set_input", CONTEXT | INDEX | TENSOR},
    [INFERD_COMPUTE] = {"compute", CONTEXT | TURN},
    [INFERD_COMPUTE_SINGLE] = {"compute_single", CONTEXT | TURN},
    [INFERD_GET_OUTPUT] = {"get_output", CONTEXT | INDEX | SIZE_MAX_FIELD},
    [INFERD_GET_OUTPUT_SINGLE] = {"get_output_single", CONTEXT | INDEX | SIZE_MAX_FIELD},
    [INFERD_FINI_SINGLE] = {"fini_single", CONTEXT},
    [INFERD_RUN_INFERENCE] = {"run_inference", CONTEXT | TENSOR | CONFIG | SIZE_MAX_FIELD | TURN_TIMEOUT},
    [INFERD_STREAM] = {"stream", CONTEXT | PROMPT | PLACE | TURN},
    [INFERD_CANCEL] = {"cancel", CONTEXT},
    [INFERD_CLOSE] = {"finalize_execution_context", CONTEXT | KEEP},
    [INFERD_INIT_BACKEND] = {"init_backend", CONFIG},
    [INFERD_MODELS] = {"models", 0},
    [INFERD_END_REASONING] = {"end_reasoning", CONTEXT},
    [INFERD_RERANK] = {"rerank", GRAPH | DOCUMENTS | TURN},
    [INFERD_INFILL] = {"chat", CONTEXT | PLACE | TURN},
};

static void put_seconds(fields *f, const char *key, double seconds) {
    if (seconds > 0)
        put_real(put_key(f, key), seconds);
}

static void put_turn(fields *f, const inferd_turn *turn, unsigned wanted) {
    put_text_field(f, "priority", turn->priority);
    put_seconds(f, "timeout_s", turn->timeout_s);
    if (wanted & TURN)
        put_seconds(f, "queue_timeout_s", turn->queue_timeout_s);
}

static void put_tensor(fields *f, const inferd_call *call, bool in_descriptor) {
    put_map(put_key(f, "tensor"), call->type ? 3 : 1);
    if (in_descriptor) {
        put_text(f->out, "fd");
        put_uint(f->out, 0);
    } else {
        put_text(f->out, "data");
        put_bin(f->out, call->data, call->length);
    }
    if (!call->type)
        return;
    put_text(f->out, "type");
    put_text(f->out, call->type);
    put_text(f->out, "dimensions");
    put_array(f->out, (unsigned)call->dimension_count);
    for (size_t i = 0; i < call->dimension_count; i++)
        put_uint(f->out, call->dimensions[i]);
}

/* Whether the bytes of a part are sent in a descriptor: the caller's, or a memfd. */
static bool in_own_descriptor(const inferd_media *media) { return !media->data || media->length > MEDIA_INLINE_BYTES; }

static void put_media(buffer *out, const inferd_media *media) {
    fields f = begin_fields(out);
    put_text_field(&f, "type", media->type);
    put_text_field(&f, "alt", media->alt);
    if (media->tokens_max)
        put_uint(put_key(&f, "tokens_max"), media->tokens_max);
    put_key(&f, "data");
    if (in_own_descriptor(media)) {
        put_map(out, 1);
        put_text(out, "fd");
        put_uint(out, 0);
    } else {
        put_bin(out, media->data, media->length);
    }
    end_fields(&f);
}

/* One message of the user: images and sounds, and then the text. */
static void put_message(fields *f, const inferd_call *call) {
    put_array(put_key(f, "messages"), 1);
    put_map(f->out, 2);
    put_text(f->out, "role");
    put_text(f->out, "user");
    put_text(f->out, "content");
    put_array(f->out, (unsigned)call->media_count + (call->data ? 1u : 0u));
    for (size_t i = 0; i < call->media_count; i++)
        put_media(f->out, &call->media[i]);
    if (!call->data)
        return;
    put_map(f->out, 2);
    put_text(f->out, "type");
    put_text(f->out, "text");
    put_text(f->out, "text");
    put_text_of(f->out, call->data, call->length);
}

/* The bytes of the files travel in descriptors, whose order alone has a meaning. */
static void put_model_file(fields *f, const inferd_call *call) {
    const char *config = call->config ? call->config : "";
    const char *any = call->kind == INFERD_LOAD_FILE ? "ggml" : "autodetect";
    put_array(put_key(f, "builders"), *config ? 2 : 1);
    put_bin(f->out, "", 0);
    if (*config)
        put_bin(f->out, config, strlen(config));
    put_text(put_key(f, "encoding"), call->name ? call->name : any);
    put_uint(put_key(f, "fd"), 0);
    if (call->kind == INFERD_LOAD_BUILDERS && call->builder_count > 1) {
        put_map(put_key(f, "weights"), 1);
        put_text(f->out, "fd");
        put_uint(f->out, 1);
    }
}

static void put_documents(fields *f, const inferd_call *call) {
    put_text(put_key(f, "query"), call->name);
    put_array(put_key(f, "documents"), (unsigned)call->document_count);
    for (size_t i = 0; i < call->document_count; i++)
        put_text(f->out, call->documents[i]);
    put_uint(put_key(f, "top_n"), call->top_n);
    put_bool(put_key(f, "truncate"), call->truncate);
}

static void put_place(buffer *out, const inferd_place *place) {
    fields f = begin_fields(out);
    put_text_of(put_key(&f, "prefix"), place->prefix, place->prefix_length);
    put_text_of(put_key(&f, "suffix"), place->suffix, place->suffix_length);
    put_text_field(&f, "typed", place->typed);
    if (place->suffix_first)
        put_bool(put_key(&f, "suffix_first"), true);
    if (place->extra_count)
        put_array(put_key(&f, "extra"), (unsigned)place->extra_count);
    for (size_t i = 0; i < place->extra_count; i++) {
        fields extra = begin_fields(out);
        put_text_field(&extra, "name", place->extra[i].name);
        put_text(put_key(&extra, "text"), place->extra[i].text);
        end_fields(&extra);
    }
    end_fields(&f);
}

static void put_fields(fields *f, const inferd_call *call, bool in_descriptor) {
    unsigned wanted = CALLS[call->kind].fields;
    if (wanted & (GRAPH | CONTEXT))
        put_uint(put_key(f, wanted & GRAPH ? "graph" : "context"), call->handle);
    if (wanted & (NAME | SESSION))
        put_text(put_key(f, wanted & NAME ? "name" : "session_id"), call->name);
    if (wanted & CONFIG)
        put_text_field(f, "config", call->config);
    if (wanted & MODEL_FILE)
        put_model_file(f, call);
    if (wanted & INDEX)
        put_uint(put_key(f, "index"), call->index);
    if (wanted & TENSOR)
        put_tensor(f, call, in_descriptor);
    if (wanted & SIZE_MAX_FIELD && call->size_max)
        put_uint(put_key(f, "size_max"), call->size_max);
    if (wanted & PLACE && call->place)
        put_place(put_key(f, "infill"), call->place);
    else if (wanted & PROMPT && call->media_count)
        put_message(f, call);
    else if (wanted & PROMPT && call->data)
        put_text_of(put_key(f, "prompt"), call->data, call->length);
    if (wanted & PROMPT && call->raw)
        put_bool(put_key(f, "raw"), true);
    if (wanted & PLACE)
        put_text_field(f, "supersede", call->supersede);
    if (wanted & DOCUMENTS)
        put_documents(f, call);
    if (wanted & KEEP && call->keep)
        put_bool(put_key(f, "keep"), true);
    if (wanted & (TURN | TURN_TIMEOUT))
        put_turn(f, &call->turn, wanted);
}

static int put_request(connection *client, uint64_t id, const inferd_call *call, bool in_descriptor,
                       inferd_error *error) {
    size_t start = begin_frame(client);
    put_array(&client->out, 4);
    put_uint(&client->out, REQUEST);
    put_uint(&client->out, id);
    put_text(&client->out, CALLS[call->kind].name);
    fields f = begin_fields(&client->out);
    put_fields(&f, call, in_descriptor);
    end_fields(&f);
    return end_frame(client, start, error);
}

/* Return a memfd with the data, which nobody can change, or -1. */
static int make_memfd(const void *data, size_t length) {
    const char *at = data;
    int fd = memfd_create("inferd-tensor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    while (fd >= 0 && length) {
        ssize_t written = write(fd, at, length);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0) {
            close(fd);
            return -1;
        }
        at += written;
        length -= (size_t)written;
    }
    if (fd >= 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) {
        close(fd);
        return -1;
    }
    return fd;
}

/* Queue a descriptor: the client's own copy of `own`, or a memfd with the data. */
static int pass_descriptor(connection *client, const void *data, size_t length, int own, inferd_error *error) {
    if (client->descriptor_count == DESCRIPTORS_MAX)
        return fail(error, INFERD_BUSY, "16 descriptors wait to be sent", "call inferd_process first");
    int fd = data ? make_memfd(data, length) : fcntl(own, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return fail(error, data ? INFERD_MISSING_MEMORY : INFERD_INVALID_ARGUMENT,
                    "the descriptor to pass cannot be made", "check the descriptor, and the limit of open files");
    client->descriptors[client->descriptor_count++] = fd;
    return INFERD_OK;
}

/* Queue the descriptors that a call needs. */
static int pass_descriptors(connection *client, const inferd_call *call, inferd_error *error) {
    if (call->kind == INFERD_LOAD_FILE)
        return pass_descriptor(client, NULL, 0, call->fd, error);
    if (call->kind == INFERD_LOAD_BUILDERS) {
        int number = INFERD_OK;
        for (size_t i = 0; !number && i < call->builder_count; i++)
            number = pass_descriptor(client, call->builders[i].data, call->builders[i].length, -1, error);
        return number;
    }
    if (CALLS[call->kind].fields & TENSOR && call->length > client->frame_bytes_max - PARAMS_BYTES)
        return pass_descriptor(client, call->data, call->length, -1, error);
    size_t count = CALLS[call->kind].fields & PROMPT ? call->media_count : 0, passed = 0;
    for (size_t i = 0; i < count; i++)
        passed += in_own_descriptor(&call->media[i]);
    if (passed > DESCRIPTORS_MAX)
        return fail(error, INFERD_TOO_LARGE, "more than 16 images and sounds are large or in descriptors",
                    "send some of them with the next message");
    for (size_t i = 0; i < count; i++) {
        const inferd_media *media = &call->media[i];
        int number = in_own_descriptor(media)
                         ? pass_descriptor(client, media->data, media->length, media->fd, error)
                         : INFERD_OK;
        if (number)
            return number;
    }
    return INFERD_OK;
}

static int check_place(const inferd_call *call, inferd_error *error) {
    const inferd_place *place = call->place;
    if (!place)
        return fail(error, INFERD_INVALID_ARGUMENT, "the place is NULL", "set the field place");
    if ((place->prefix_length && !place->prefix) || (place->suffix_length && !place->suffix) ||
        (place->extra_count && !place->extra))
        return fail(error, INFERD_INVALID_ARGUMENT, "a part of the place is NULL, its length is not 0", "set both");
    if (place->extra_count > INFERD_EXTRA_MAX)
        return fail(error, INFERD_INVALID_ARGUMENT, "a call has at most 256 parts of other files", "send fewer");
    for (size_t i = 0; i < place->extra_count; i++)
        if (!place->extra[i].text)
            return fail(error, INFERD_INVALID_ARGUMENT, "the text of another file is NULL", "send an empty text");
    if (CALLS[call->kind].fields & PROMPT && call->media_count)
        return fail(error, INFERD_INVALID_ARGUMENT, "the call has a place and media", "send one of them");
    return INFERD_OK;
}

static int check_builders(const inferd_call *call, inferd_error *error) {
    if (!call->builders || !call->builder_count || call->builder_count > INFERD_BUILDERS_MAX)
        return fail(error, INFERD_INVALID_ARGUMENT, "a load has one or two builders",
                    "pass the bytes of the model's file, and of OpenVINO's weights");
    for (size_t i = 0; i < call->builder_count; i++)
        if (!call->builders[i].data)
            return fail(error, INFERD_INVALID_ARGUMENT, "the data of a builder is NULL", "pass the bytes of a file");
    return INFERD_OK;
}

static int check_call(connection *client, const inferd_call *call, inferd_error *error) {
    if (call->kind > INFERD_LOAD_BUILDERS)
        return fail(error, INFERD_INVALID_ARGUMENT, "no such kind of call", "use a constant of inferd_kind");
    if (CALLS[call->kind].fields & (NAME | SESSION) && !call->name)
        return fail(error, INFERD_INVALID_ARGUMENT, "the call needs a name", "set the field name");
    if (call->length && !call->data)
        return fail(error, INFERD_INVALID_ARGUMENT, "the data is NULL, its length is not 0", "set the field data");
    if (CALLS[call->kind].fields & TENSOR && call->type &&
        (call->dimension_count > INFERD_DIMENSIONS_MAX || (call->dimension_count && !call->dimensions)))
        return fail(error, INFERD_INVALID_ARGUMENT, "the dimensions are NULL, or more than 32", "set them");
    if (call->kind == INFERD_LOAD_BUILDERS) {
        int number = check_builders(call, error);
        if (number)
            return number;
    }
    if (CALLS[call->kind].fields & DOCUMENTS) {
        if (!call->name || !call->documents)
            return fail(error, INFERD_INVALID_ARGUMENT, "the query or the documents are NULL", "send both");
        if (call->document_count > INFERD_DOCUMENTS_MAX)
            return fail(error, INFERD_INVALID_ARGUMENT, "a call has at most 256 documents", "make several calls");
        for (size_t i = 0; i < call->document_count; i++)
            if (!call->documents[i])
                return fail(error, INFERD_INVALID_ARGUMENT, "a document is NULL", "send an empty text");
    }
    if (call->kind == INFERD_INFILL || (CALLS[call->kind].fields & PLACE && call->place)) {
        int number = check_place(call, error);
        if (number)
            return number;
    }
    if (CALLS[call->kind].fields & PROMPT && call->media_count) {
        if (!call->media || call->raw)
            return fail(error, INFERD_INVALID_ARGUMENT, "media is NULL, or the message is raw",
                        "set the field media, and raw to 0");
        if (call->media_count > INFERD_MEDIA_MAX)
            return fail(error, INFERD_TOO_LARGE, "a call has at most 64 images and sounds",
                        "send the others with the next message");
        for (size_t i = 0; i < call->media_count; i++)
            if (!call->media[i].type)
                return fail(error, INFERD_INVALID_ARGUMENT, "the type of an image or a sound is NULL",
                            "set the field type");
    }
    if (client->ended)
        return copy_error(error, &client->end);
    if (client->request_count >= client->requests_max)
        return fail(error, INFERD_BUSY, "too many requests are under way", "take their events first");
    return INFERD_OK;
}

/* Add a request and queue its frame. */
static int start_request(connection *client, const inferd_call *call, bool waited_for, uint64_t *id,
                         inferd_error *error) {
    size_t descriptors = client->descriptor_count;
    int number = check_call(client, call, error);
    request *made = number ? NULL : calloc(1, sizeof *made);
    if (!made)
        return number ? number : fail_memory(error);
    number = pass_descriptors(client, call, error);
    if (!number)
        number = put_request(client, client->last_id + 1, call, client->descriptor_count > descriptors, error);
    if (number) {
        while (client->descriptor_count > descriptors) /* else the next request would get them */
            close(client->descriptors[--client->descriptor_count]);
        free(made);
        return number;
    }
    made->id = ++client->last_id;
    made->kind = call->kind;
    made->waited_for = waited_for;
    made->last = &made->first;
    append_request(client, made);
    *id = made->id;
    return INFERD_OK;
}

static void put_cancel(connection *client, uint64_t id) {
    size_t start = begin_frame(client);
    put_array(&client->out, 4);
    put_uint(&client->out, REQUEST);
    put_uint(&client->out, ++client->last_id); /* its reply is ignored */
    put_text(&client->out, "cancel");
    put_map(&client->out, 1);
    put_text(&client->out, "request");
    put_uint(&client->out, id);
    end_frame(client, start, NULL);
    transmit(client);
}

/* Return the credit of events that were taken, once it is half of all. */
static void return_credit(connection *client, request *r) {
    r->events--;
    if (++r->taken < CREDIT / 2 || r->replied || client->ended)
        return;
    size_t start = begin_frame(client);
    put_array(&client->out, 3);
    put_uint(&client->out, MORE_CREDIT);
    put_uint(&client->out, r->id);
    put_uint(&client->out, r->taken);
    end_frame(client, start, NULL);
    r->taken = 0;
    transmit(client);
}

static bool copy_text(inferd_event *event, const value *text) {
    event->text = malloc((size_t)text->length + 1);
    if (!event->text)
        return false;
    if (text->length)
        memcpy(event->text, text->bytes, text->length);
    event->text[text->length] = 0;
    event->length = text->length;
    return true;
}

/* Read a result, or an event of a stream. False: memory is exhausted. */
static bool read_result(reader map, inferd_event *event) {
    static const char *const TEXTS[] = {"text", "data", "piece"};
    value v;
    reader metadata;
    event->handle = find_uint(map, "graph", find_uint(map, "context", 0));
    if ((find_key(map, "cancelled", &v, NULL) || find_key(map, "ended", &v, NULL)) && v.type == BOOL)
        event->handle = v.number;
    if (find_key(map, "metadata", &v, &metadata))
        find_text(metadata, "stop_reason", event->stop_reason, sizeof event->stop_reason);
    for (size_t i = 0; i < sizeof TEXTS / sizeof *TEXTS; i++)
        if (find_key(map, TEXTS[i], &v, NULL) && (v.type == BIN || v.type == TEXT))
            return copy_text(event, &v);
    return true;
}

/* Take the first event of a request that is ready; remove the request with its last one. Kind NONE: that
 * event of a stream released no text. False: memory is exhausted. */
static bool take_event(connection *client, request *r, inferd_event *event) {
    stored *first = r->first;
    bool success = true;
    *event = (inferd_event){.kind = INFERD_EVENT_FAILED, .request = r->id, .error = client->end};
    if (first) {
        reader body = {first->body, first->body + first->length};
        if (first->kind == ERROR_REPLY) {
            read_error(body, &event->error);
        } else {
            event->error = (inferd_error){0};
            success = read_result(body, event);
            event->kind = first->kind == REPLY ? INFERD_EVENT_END
                          : event->length      ? INFERD_EVENT_TEXT
                                               : INFERD_EVENT_NONE;
        }
        if (!success)
            return false;
    }
    if (first && first->kind == EVENT) {
        drop_first(client, r);
        return_credit(client, r);
    } else {
        remove_request(client, r);
    }
    return true;
}

int inferd_start(inferd_client *handle, const inferd_call *call, uint64_t *id, inferd_error *error) {
    if (!call || !id)
        return fail_null(error, call ? "the request" : "the call");
    connection *client = enter(handle, error);
    if (!client)
        return INFERD_INVALID_ARGUMENT;
    int number = start_request(client, call, false, id, error);
    if (!number)
        transmit(client);
    leave(client);
    return number ? number : succeed(error);
}

int inferd_next_event(inferd_client *handle, uint64_t id, int timeout_ms, inferd_event *event,
                      inferd_error *error) {
    int64_t deadline = deadline_after(timeout_ms);
    request *ready;
    bool success = true;
    if (!event)
        return fail_null(error, "the event");
    *event = (inferd_event){0};
    connection *client = enter(handle, error);
    if (!client)
        return INFERD_INVALID_ARGUMENT;
    while ((ready = wait_for_event(client, id, deadline))) {
        success = take_event(client, ready, event);
        if (!success || event->kind != INFERD_EVENT_NONE)
            break;
        inferd_event_clear(event);
    }
    leave(client);
    return success ? succeed(error) : fail_memory(error);
}

void inferd_event_clear(inferd_event *event) {
    if (!event)
        return;
    free(event->text);
    *event = (inferd_event){0};
}

int inferd_cancel_request(inferd_client *handle, uint64_t id, inferd_error *error) {
    connection *client = enter(handle, error);
    if (!client)
        return INFERD_INVALID_ARGUMENT;
    request *r = find_request(client, id);
    if (r && !r->abandoned && !client->ended)
        put_cancel(client, id);
    leave(client);
    if (!r)
        return fail(error, INFERD_INVALID_ARGUMENT, "no such request", "it may have ended");
    return succeed(error);
}

int inferd_fd(const inferd_client *handle) {
    connection *client = enter(handle, NULL);
    if (!client)
        return -1;
    int fd = client->fd;
    leave(client);
    return fd;
}

short inferd_poll_events(inferd_client *handle) {
    connection *client = enter(handle, NULL);
    if (!client)
        return 0;
    short events = events_wanted(client);
    leave(client);
    return events;
}

int inferd_process(inferd_client *handle, inferd_error *error) {
    connection *client = enter(handle, error);
    if (!client)
        return INFERD_INVALID_ARGUMENT;
    process(client);
    pthread_cond_broadcast(&client->changed);
    int number = client->ended ? copy_error(error, &client->end) : succeed(error);
    leave(client);
    return number;
}

/* ---- Calls that wait ---- */

/* Cancel a request whose caller waits no longer; its reply removes it. */
static void abandon(connection *client, uint64_t id) {
    request *r = find_request(client, id);
    if (!r)
        return;
    while (r->first)
        drop_first(client, r);
    r->abandoned = true;
    put_cancel(client, r->id);
}

/* Start a request and wait for its reply; the caller gets it as it was stored, and frees it. */
static int wait_for_reply(connection *client, const inferd_call *call, uint64_t *id, inferd_error *error) {
    int64_t deadline = deadline_after(client->call_timeout_ms > 0 ? client->call_timeout_ms : -1);
    int number = start_request(client, call, true, id, error);
    if (number)
        return number;
    transmit(client);
    if (wait_for_event(client, *id, deadline))
        return INFERD_OK;
    abandon(client, *id);
    return fail(error, INFERD_TIMEOUT, "the call has taken longer than call_timeout_ms", "the request was cancelled");
}

/* Make a call. On success the caller clears the event. */
static int call_and_wait(inferd_client *handle, const inferd_call *call, inferd_event *event, inferd_error *error) {
    uint64_t id;
    *event = (inferd_event){0};
    connection *client = enter(handle, error);
    if (!client)
        return INFERD_INVALID_ARGUMENT;
    int number = wait_for_reply(client, call, &id, error);
    if (!number && !take_event(client, find_request(client, id), event))
        number = fail_memory(error);
    leave(client);
    if (number)
        return number;
    return event->kind == INFERD_EVENT_FAILED ? copy_error(error, &event->error) : succeed(error);
}

static int call_without_result(inferd_client *client, const inferd_call *call, inferd_error *error) {
    inferd_event event;
    int number = call_and_wait(client, call, &event, error);
    inferd_event_clear(&event);
    return number;
}

static int call_for_handle(inferd_client *client, const inferd_call *call, uint64_t *handle, inferd_error *error) {
    inferd_event event;
    if (!handle)
        return fail_null(error, "the handle to write");
    int number = call_and_wait(client, call, &event, error);
    if (!number)
        *handle = event.handle;
    inferd_event_clear(&event);
    return number;
}

/* Make a call whose text goes into the caller's buffer. */
static int call_for_text(inferd_client *client, const inferd_call *call, void *buffer_, size_t size, size_t *length,
                         inferd_error *error) {
    inferd_event event;
    inferd_error own;
    if (size && !buffer_)
        return fail_null(error, "the buffer");
    int number = call_and_wait(client, call, &event, &own);
    copy_error(error, &own);
    if (!number && event.length > size) {
        number = fail(error, INFERD_TOO_LARGE, "the buffer is too small for the output", "pass a larger buffer");
        own.needed = event.length;
        if (error)
            error->needed = event.length;
    }
    if (!number && event.length)
        memcpy(buffer_, event.text, event.length);
    if (length && (!number || (number == INFERD_TOO_LARGE && own.needed)))
        *length = number ? (size_t)own.needed : event.length;
    inferd_event_clear(&event);
    return number;
}

static inferd_turn turn_of(const inferd_turn *turn) { return turn ? *turn : (inferd_turn){0}; }

int inferd_init_backend(inferd_client *client, const char *config, inferd_error *error) {
    inferd_call call = {.kind = INFERD_INIT_BACKEND, .config = config};
    return call_without_result(client, &call, error);
}

int inferd_load(inferd_client *client, const char *name, const char *config, inferd_handle *graph,
                inferd_error *error) {
    inferd_call call = {.kind = INFERD_LOAD, .name = name, .config = config};
    return call_for_handle(client, &call, graph, error);
}

/* Whether a file's name ends as those of the parts of a split model: -00001-of-00003.gguf. */
static bool is_part(const char *path) {
    static const char FORM[] = "-00000-of-00000.gguf";
    size_t length = strlen(path), size = sizeof FORM - 1;
    if (length <= size || path[length - size - 1] == '/')
        return false;
    for (size_t i = 0; i < size; i++) {
        char c = path[length - size + i];
        if (FORM[i] == '0' ? c < '0' || c > '9' : c != FORM[i])
            return false;
    }
    return true;
}

/* Load a split model by the absolute path of one of its parts, as a descriptor has that part only. */
static int load_split(inferd_client *client, const char *path, const char *config, inferd_handle *graph,
                      inferd_error *error) {
    char *folder = *path == '/' ? strdup("") : getcwd(NULL, 0);
    size_t size = (folder ? strlen(folder) : 0) + strlen(path) + 2;
    char *name = folder ? malloc(size) : NULL;
    if (name)
        snprintf(name, size, "%s%s%s", folder, *folder ? "/" : "", path);
    int number = name ? inferd_load(client, name, config, graph, error)
                      : fail(error, INFERD_MISSING_MEMORY, "the path has no memory", "free memory");
    free(name);
    free(folder);
    return number;
}

int inferd_load_file(inferd_client *client, const char *path, const char *config, inferd_handle *graph,
                     inferd_error *error) {
    char message[512];
    if (path && is_part(path))
        return load_split(client, path, config, graph, error);
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) {
        snprintf(message, sizeof message, "cannot open %.400s: %s", path ? path : "NULL", strerror(errno));
        return fail(error, INFERD_MODEL_NOT_FOUND, message, "check the path of the file");
    }
    inferd_call call = {.kind = INFERD_LOAD_FILE, .config = config, .fd = fd};
    int number = call_for_handle(client, &call, graph, error);
    close(fd);
    return number;
}

int inferd_load_builders(inferd_client *client, const inferd_builder *builders, size_t count, const char *encoding,
                         const char *config, inferd_handle *graph, inferd_error *error) {
    inferd_call call = {.kind = INFERD_LOAD_BUILDERS, .name = encoding, .config = config, .builders = builders,
                        .builder_count = count};
    return call_for_handle(client, &call, graph, error);
}

int inferd_unload(inferd_client *client, inferd_handle graph, inferd_error *error) {
    inferd_call call = {.kind = INFERD_UNLOAD, .handle = graph};
    return call_without_result(client, &call, error);
}

int inferd_open(inferd_client *client, inferd_handle graph, const char *session_id, inferd_handle *context,
                inferd_error *error) {
    inferd_call call = {.kind = session_id ? INFERD_OPEN_SESSION : INFERD_OPEN, .handle = graph, .name = session_id};
    return call_for_handle(client, &call, context, error);
}

int inferd_set_input(inferd_client *client, inferd_handle context, uint32_t index, const void *data, size_t length,
                     inferd_error *error) {
    inferd_call call = {.kind = INFERD_SET_INPUT, .handle = context, .index = index, .data = data, .length = length};
    return call_without_result(client, &call, error);
}

int inferd_set_tensor(inferd_client *client, inferd_handle context, uint32_t index, const void *data, size_t length,
                      const uint32_t *dimensions, size_t dimension_count, const char *type, inferd_error *error) {
    inferd_call call = {.kind = INFERD_SET_INPUT, .handle = context, .index = index, .data = data, .length = length,
                        .type = type ? type : "u8", .dimensions = dimensions, .dimension_count = dimension_count};
    return call_without_result(client, &call, error);
}

int inferd_compute(inferd_client *client, inferd_handle context, const inferd_turn *turn, inferd_error *error) {
    inferd_call call = {.kind = INFERD_COMPUTE, .handle = context, .turn = turn_of(turn)};
    return call_without_result(client, &call, error);
}

int inferd_compute_single(inferd_client *client, inferd_handle context, const inferd_turn *turn, void *buffer_,
                          size_t size, size_t *length, inferd_error *error) {
    inferd_call call = {.kind = INFERD_COMPUTE_SINGLE, .handle = context, .turn = turn_of(turn)};
    return call_for_text(client, &call, buffer_, size, length, error);
}

int inferd_fini_single(inferd_client *client, inferd_handle context, inferd_error *error) {
    inferd_call call = {.kind = INFERD_FINI_SINGLE, .handle = context};
    return call_without_result(client, &call, error);
}

int inferd_get_output(inferd_client *client, inferd_handle context, uint32_t index, void *buffer_, size_t size,
                      size_t *length, inferd_error *error) {
    inferd_call call = {.kind = INFERD_GET_OUTPUT, .handle = context, .index = index, .size_max = size};
    return call_for_text(client, &call, buffer_, size, length, error);
}

int inferd_get_output_single(inferd_client *client, inferd_handle context, uint32_t index, void *buffer_, size_t size,
                             size_t *length, inferd_error *error) {
    inferd_call call = {.kind = INFERD_GET_OUTPUT_SINGLE, .handle = context, .index = index, .size_max = size};
    return call_for_text(client, &call, buffer_, size, length, error);
}

int inferd_run_inference(inferd_client *client, inferd_handle context, const void *data, size_t length,
                         const char *config, const inferd_turn *turn, void *buffer_, size_t size, size_t *written,
                         inferd_error *error) {
    inferd_call call = {.kind = INFERD_RUN_INFERENCE, .handle = context, .data = data, .length = length,
                        .config = config, .size_max = size, .turn = turn_of(turn)};
    return call_for_text(client, &call, buffer_, size, written, error);
}

int inferd_infill(inferd_client *client, inferd_handle context, const inferd_place *place, const char *supersede,
                  const inferd_turn *turn, void *buffer_, size_t size, size_t *length, inferd_error *error) {
    inferd_call call = {.kind = INFERD_INFILL, .handle = context, .place = place, .supersede = supersede,
                        .turn = turn_of(turn)};
    return call_for_text(client, &call, buffer_, size, length, error);
}

int inferd_cancel(inferd_client *client, inferd_handle context, int *cancelled, inferd_error *error) {
    inferd_call call = {.kind = INFERD_CANCEL, .handle = context};
    uint64_t result = 0;
    int number = call_for_handle(client, &call, &result, error);
    if (!number && cancelled)
        *cancelled = result != 0;
    return number;
}

int inferd_end_reasoning(inferd_client *client, inferd_handle context, int *ended, inferd_error *error) {
    inferd_call call = {.kind = INFERD_END_REASONING, .handle = context};
    uint64_t result = 0;
    int number = call_for_handle(client, &call, &result, error);
    if (!number && ended)
        *ended = result != 0;
    return number;
}

int inferd_close_context(inferd_client *client, inferd_handle context, int keep, inferd_error *error) {
    inferd_call call = {.kind = INFERD_CLOSE, .handle = context, .keep = keep};
    return call_without_result(client, &call, error);
}

/* Read the array `models` of a result. */
static size_t read_models(reader result, inferd_model *models, size_t size) {
    value v;
    reader list;
    if (!find_key(result, "models", &v, &list) || v.type != ARRAY || !read_value(&list, &v))
        return 0;
    size_t count = v.length;
    for (size_t i = 0; i < count && i < size; i++) {
        find_text(list, "name", models[i].name, sizeof models[i].name);
        find_text(list, "state", models[i].state, sizeof models[i].state);
        skip_value(&list);
    }
    return count;
}

/* Stand at the first item of an array in a result; return the number of its items. */
static size_t find_array(reader result, const char *key, reader *items) {
    value v;
    if (!find_key(result, key, &v, items) || v.type != ARRAY || !read_value(items, &v))
        return 0;
    return v.length;
}

static double read_score(reader *r) {
    value v;
    return read_value(r, &v) && v.type == REAL ? v.real : 0;
}

static size_t read_ranked(reader result, inferd_ranked *ranked, size_t size) {
    reader indexes, scores, raw;
    value v;
    size_t count = find_array(result, "indexes", &indexes);
    if (find_array(result, "scores", &scores) != count || find_array(result, "raw_scores", &raw) != count)
        return 0;
    for (size_t i = 0; i < count && i < size; i++) {
        bool read = read_value(&indexes, &v) && v.type == INT;
        ranked[i] = (inferd_ranked){read ? (size_t)v.number : 0, read_score(&scores), read_score(&raw)};
    }
    return count < size ? count : size;
}

int inferd_rerank(inferd_client *handle, inferd_handle graph, const char *query, const char *const *documents,
                  size_t count, int truncate, const inferd_turn *turn, inferd_ranked *ranked, size_t size,
                  size_t *found, inferd_error *error) {
    inferd_call call = {.kind = INFERD_RERANK, .handle = graph, .name = query, .documents = documents};
    inferd_event event = {0};
    uint64_t id;
    if (!found || (size && !ranked))
        return fail_null(error, found ? "the array" : "the count");
    call.document_count = count;
    call.top_n = size < count ? size : 0;
    call.truncate = truncate;
    if (turn)
        call.turn = *turn;
    connection *client = enter(handle, error);
    if (!client)
        return INFERD_INVALID_ARGUMENT;
    int number = wait_for_reply(client, &call, &id, error);
    if (!number) {
        request *r = find_request(client, id);
        if (r->first && r->first->kind == REPLY)
            *found = read_ranked((reader){r->first->body, r->first->body + r->first->length}, ranked, size);
        if (!take_event(client, r, &event))
            number = fail_memory(error);
    }
    leave(client);
    if (number)
        return number;
    number = event.kind == INFERD_EVENT_FAILED ? copy_error(error, &event.error) : succeed(error);
    inferd_event_clear(&event);
    return number;
}

int inferd_models(inferd_client *handle, inferd_model *models, size_t size, size_t *count, inferd_error *error) {
    inferd_call call = {.kind = INFERD_MODELS};
    inferd_event event = {0};
    uint64_t id;
    if (!count || (size && !models))
        return fail_null(error, count ? "the array" : "the count");
    connection *client = enter(handle, error);
    if (!client)
        return INFERD_INVALID_ARGUMENT;
    int number = wait_for_reply(client, &call, &id, error);
    if (!number) {
        request *r = find_request(client, id);
        if (r->first && r->first->kind == REPLY)
            *count = read_models((reader){r->first->body, r->first->body + r->first->length}, models, size);
        if (!take_event(client, r, &event))
            number = fail_memory(error);
    }
    leave(client);
    if (number)
        return number;
    number = event.kind == INFERD_EVENT_FAILED ? copy_error(error, &event.error) : succeed(error);
    inferd_event_clear(&event);
    return number;
}
