/* A program that tests the insides of the C client: its msgpack reader, its frames, its behaviour with a
 * daemon that sends anything. It includes the source file to reach its static functions. */
#include "inferd.c" /* NOLINT */

#include "check.h"

/* ---- Frames as JSON, in the form of docs/protocol-vectors.json ---- */

static void print_json(reader *r);

static void print_text(const value *v) {
    putchar('"');
    for (uint32_t i = 0; i < v->length; i++) {
        uint8_t c = v->bytes[i];
        if (c < 0x20 || c == '"' || c == '\\')
            printf("\\u%04x", c);
        else
            putchar(c);
    }
    putchar('"');
}

static void print_bin(const value *v) {
    printf("{\"$bin\": \"");
    for (uint32_t i = 0; i < v->length; i++)
        printf("%02x", v->bytes[i]);
    printf("\"}");
}

static void print_items(reader *r, const value *head) {
    bool is_map = head->type == MAP;
    putchar(is_map ? '{' : '[');
    for (uint32_t i = 0; i < head->length; i++) {
        if (i)
            putchar(',');
        print_json(r);
        if (is_map) {
            putchar(':');
            print_json(r);
        }
    }
    putchar(is_map ? '}' : ']');
}

static void print_json(reader *r) {
    value v;
    CHECK(read_value(r, &v));
    switch (v.type) {
    case NIL: printf("null"); break;
    case BOOL: printf(v.number ? "true" : "false"); break;
    case INT: v.negative ? printf("%lld", (long long)v.number) : printf("%llu", (unsigned long long)v.number); break;
    case REAL: printf("%.17g", v.real); break;
    case TEXT: print_text(&v); break;
    case BIN: print_bin(&v); break;
    default: print_items(r, &v);
    }
}

static uint8_t *read_hex(const char *line, size_t *length) {
    *length = strcspn(line, "\n") / 2;
    uint8_t *bytes = malloc(*length ? *length : 1);
    CHECK(bytes);
    for (size_t i = 0; i < *length; i++) {
        unsigned byte;
        CHECK(sscanf(line + 2 * i, "%2x", &byte) == 1);
        bytes[i] = (uint8_t)byte;
    }
    return bytes;
}

/* Read frames in hex, one a line. Returns false at the end. */
static bool next_frame(uint8_t **frame, size_t *length) {
    char *line = NULL;
    size_t size = 0;
    bool found = getline(&line, &size, stdin) > 0;
    if (found)
        *frame = read_hex(line, length);
    free(line);
    return found;
}

SCENARIO(prints_each_frame_as_json) {
    uint8_t *frame;
    size_t length;
    while (next_frame(&frame, &length)) {
        reader r = {frame + LENGTH_BYTES, frame + length}, whole = r;
        CHECK(skip_value(&whole) && whole.at == whole.end);
        print_json(&r);
        putchar('\n');
        free(frame);
    }
}

/* ---- Damaged frames ---- */

/* Open a client whose daemon is the other end of a pair of sockets; `inside` receives its connection. */
static inferd_client *open_client(int call_timeout_ms, int *daemon, connection **inside) {
    int ends[2];
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends));
    *inside = make_client(ends[0], call_timeout_ms);
    CHECK(*inside);
    (*inside)->greeted = true;
    *daemon = ends[1];
    return publish(*inside);
}

/* A client with the stream 1 and the call 2 under way. */
static inferd_client *make_fed_client(int *daemon, connection **inside) {
    inferd_client *client = open_client(0, daemon, inside);
    inferd_call stream = {.kind = INFERD_STREAM, .handle = 1}, call = {.kind = INFERD_GET_OUTPUT, .handle = 1};
    uint64_t id;
    CHECK_EQUAL(inferd_start(client, &stream, &id, NULL), 0);
    CHECK_EQUAL(inferd_start(client, &call, &id, NULL), 0);
    return client;
}

/* Feed bytes to a client, take all events, and end the connection: nothing may be left or read beyond. */
static void feed(const uint8_t *bytes, size_t length) {
    int daemon;
    inferd_event event;
    connection *inside;
    inferd_client *client = make_fed_client(&daemon, &inside);
    CHECK_EQUAL(write(daemon, bytes, length), length);
    inferd_process(client, NULL);
    CHECK(!shutdown(daemon, SHUT_RDWR));
    for (int i = 0; i < 2000; i++) {
        CHECK_EQUAL(inferd_next_event(client, 0, -1, &event, NULL), 0);
        bool none = event.kind == INFERD_EVENT_NONE;
        inferd_event_clear(&event);
        if (none)
            break;
    }
    CHECK(!inside->requests && !inside->stored_bytes);
    close(daemon);
    inferd_close(client);
}

/* Feed the frame cut at each length, in an allocation of exactly that size. */
static void feed_cut(const uint8_t *frame, size_t length) {
    for (size_t cut = LENGTH_BYTES; cut < length; cut++) {
        uint8_t *part = malloc(cut);
        CHECK(part);
        memcpy(part, frame, cut);
        for (size_t i = 0; i < LENGTH_BYTES; i++)
            part[i] = (uint8_t)((cut - LENGTH_BYTES) >> (8 * i));
        feed(part, cut);
        free(part);
    }
}

/* Feed the frame with each byte of its body replaced by bytes that change types and lengths. */
static void feed_changed(uint8_t *frame, size_t length) {
    static const uint8_t BYTES[] = {0x00, 0x80, 0x8f, 0x9f, 0xc0, 0xc1, 0xc6, 0xc9, 0xcf, 0xdb, 0xdd, 0xdf, 0xff};
    for (size_t at = LENGTH_BYTES; at < length && at < 120; at++) {
        uint8_t before = frame[at];
        for (size_t i = 0; i < sizeof BYTES; i++) {
            frame[at] = BYTES[i];
            feed(frame, length);
        }
        frame[at] = before;
    }
}

SCENARIO(damaged_frames_end_in_events) {
    uint8_t *frame;
    size_t length;
    while (next_frame(&frame, &length)) {
        feed_cut(frame, length);
        feed_changed(frame, length);
        free(frame);
    }
}

/* Whether a body of one value inside `levels` arrays can be read. */
static bool reads_levels(size_t levels) {
    uint8_t body[NESTING_MAX + 4];
    memset(body, 0x91, levels);
    body[levels] = 0xc0;
    reader r = {body, body + levels + 1};
    return skip_value(&r);
}

SCENARIO(a_frame_has_at_most_64_levels) {
    CHECK(reads_levels(NESTING_MAX));
    CHECK(!reads_levels(NESTING_MAX + 1));
}

/* Write `head` and zeros: a body of 4096 bytes that claims more. */
static void check_unreadable(const char *head, size_t length) {
    uint8_t body[4096] = {0};
    memcpy(body, head, length);
    reader r = {body, body + sizeof body};
    CHECK(!skip_value(&r));
}

SCENARIO(lengths_beyond_the_frame_are_not_read) {
    check_unreadable("\xdd\xff\xff\xff\xff", 5);
    check_unreadable("\xdf\xff\xff\xff\xff", 5);
    check_unreadable("\xdb\xff\xff\xff\xff", 5);
    check_unreadable("\xc6\xff\xff\xff\xff", 5);
    check_unreadable("\xc9\xff\xff\xff\xff", 5);
    check_unreadable("\xda\x0f\xfe", 3);
    check_unreadable("\xc1", 1);
}

SCENARIO(numbers_have_their_values) {
    uint8_t bytes[] = {0xff, 0xd0, 0x80, 0xd3, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe, 0xca, 0x3f, 0xc0, 0, 0};
    reader r = {bytes, bytes + sizeof bytes};
    value v;
    CHECK(read_value(&r, &v) && v.negative && (int64_t)v.number == -1);
    CHECK(read_value(&r, &v) && v.negative && (int64_t)v.number == -128);
    CHECK(read_value(&r, &v) && v.negative && (int64_t)v.number == -2);
    CHECK(read_value(&r, &v) && v.type == REAL && v.real == 1.5);
}

static void put_event(buffer *b, uint64_t id, uint64_t kind, size_t text_length) {
    static char text[1 << 20];
    size_t start = b->length;
    put_bytes(b, "\0\0\0", LENGTH_BYTES);
    put_array(b, 3);
    put_uint(b, kind);
    put_uint(b, id);
    put_map(b, 1);
    put_text(b, "text");
    put_bin(b, text, text_length);
    size_t length = b->length - start - LENGTH_BYTES;
    for (size_t i = 0; i < LENGTH_BYTES; i++)
        b->data[start + i] = (uint8_t)(length >> (8 * i));
}

/* The number of the error that ends the connection when the daemon sends `events` events of the stream. */
static int end_after_events(int events) {
    int daemon;
    buffer bytes = {0};
    connection *inside;
    inferd_client *client = make_fed_client(&daemon, &inside);
    for (int i = 0; i < events; i++)
        put_event(&bytes, 1, EVENT, 1);
    CHECK_EQUAL(write(daemon, bytes.data, bytes.length), bytes.length);
    int number = inferd_process(client, NULL);
    free(bytes.data);
    close(daemon);
    inferd_close(client);
    return number;
}

SCENARIO(a_stream_has_at_most_64_events_that_were_not_taken) {
    CHECK_EQUAL(end_after_events(CREDIT), 0);
    CHECK_EQUAL(end_after_events(CREDIT + 1), INFERD_PROTOCOL_ERROR);
}

SCENARIO(replies_that_were_not_taken_have_a_bound) {
    connection *client = make_client(-1, 0);
    CHECK(client);
    client->greeted = true;
    buffer body = {0};
    inferd_call call = {.kind = INFERD_GET_OUTPUT, .handle = 1};
    uint64_t id;
    put_event(&body, 1, REPLY, 1 << 20);
    reader content = {body.data + LENGTH_BYTES, body.data + body.length};
    int taken = 0;
    while (!client->ended) {
        CHECK_EQUAL(start_request(client, &call, false, &id, NULL), 0);
        receive_answer(client, REPLY, id, content);
        taken += !client->ended;
    }
    CHECK_EQUAL(taken, 63); /* of a little more than 1 MiB each */
    CHECK_EQUAL(client->end.number, INFERD_TOO_LARGE);
    free(body.data);
    free_client(client);
}

SCENARIO(bytes_that_wait_to_be_sent_have_a_bound) {
    int daemon;
    connection *inside;
    inferd_client *client = open_client(0, &daemon, &inside);
    static char data[900 << 10];
    inferd_call call = {.kind = INFERD_SET_INPUT, .handle = 1, .data = data, .length = sizeof data};
    inferd_error error = {0};
    uint64_t id;
    int started = 0;
    while (!inferd_start(client, &call, &id, &error))
        started++;
    CHECK_EQUAL(error.number, INFERD_BUSY);
    CHECK(started >= 4 && inside->out.length <= OUT_BYTES_MAX);
    CHECK(inferd_poll_events(client) & POLLOUT);
    static char sink[1 << 16];
    while (inside->out.length) {
        while (read(daemon, sink, sizeof sink) > 0)
            continue;
        CHECK_EQUAL(inferd_process(client, NULL), 0);
    }
    CHECK_EQUAL(inferd_start(client, &call, &id, &error), 0);
    close(daemon);
    inferd_close(client);
}

SCENARIO(descriptors_that_wait_to_be_sent_have_a_bound) {
    int daemon;
    connection *inside;
    inferd_client *client = open_client(0, &daemon, &inside);
    static char data[900 << 10];
    inferd_call filler = {.kind = INFERD_SET_INPUT, .handle = 1, .data = data, .length = sizeof data};
    inferd_call file = {.kind = INFERD_LOAD_FILE, .fd = 0};
    inferd_error error = {0};
    uint64_t id;
    CHECK_EQUAL(inferd_start(client, &filler, &id, &error), 0); /* fills the socket */
    for (int i = 0; i < DESCRIPTORS_MAX; i++)
        CHECK_EQUAL(inferd_start(client, &file, &id, &error), 0);
    CHECK_EQUAL(inferd_start(client, &file, &id, &error), INFERD_BUSY);
    file.fd = -1;
    inside->descriptor_count--; /* one place is free */
    CHECK_EQUAL(inferd_start(client, &file, &id, &error), INFERD_INVALID_ARGUMENT);
    inside->descriptor_count++;
    close(daemon);
    inferd_close(client);
}

SCENARIO(a_refused_request_takes_its_descriptor_back) {
    int daemon;
    connection *inside;
    inferd_client *client = open_client(0, &daemon, &inside);
    char *config = calloc(1, 5 << 20);
    CHECK(config);
    memset(config, ' ', (5 << 20) - 1);
    inferd_call call = {.kind = INFERD_LOAD_FILE, .fd = 0, .config = config};
    uint64_t id = 0;
    CHECK_EQUAL(inferd_start(client, &call, &id, NULL), INFERD_TOO_LARGE);
    CHECK(!inside->descriptor_count && !inside->out.length && !inside->requests && !id);
    free(config);
    close(daemon);
    inferd_close(client);
}

SCENARIO(long_texts_of_an_error_are_cut_between_characters) {
    char text[600];
    inferd_error error;
    for (size_t i = 0; i < sizeof text; i += 2)
        memcpy(text + i, "\xc3\xa9", 2);
    for (size_t length = 508; length < 516; length += 2) {
        copy_cut(error.message, sizeof error.message, text, length);
        CHECK_EQUAL(strlen(error.message), length < 512 ? length : 510);
    }
}

SCENARIO(a_path_of_a_socket_has_at_most_107_bytes) {
    char path[109];
    inferd_client *client = NULL;
    memset(path, 'x', sizeof path);
    path[108] = 0;
    inferd_options options = {.socket = path};
    CHECK_EQUAL(inferd_connect(&options, &client, NULL), INFERD_INVALID_ARGUMENT);
    path[107] = 0;
    CHECK_EQUAL(inferd_connect(&options, &client, NULL), INFERD_CONNECTION_LOST);
    CHECK(!client);
}

/* ---- Timeouts ---- */

enum { SILENT_MS = 20, THREADS = 8 };

/* A client whose calls time out, since nothing answers them. */
static inferd_client *make_silent_client(int *daemon, connection **inside) {
    return open_client(SILENT_MS, daemon, inside);
}

SCENARIO(a_call_past_its_timeout_is_cancelled_and_its_late_reply_dropped) {
    int daemon;
    connection *inside;
    inferd_client *client = make_silent_client(&daemon, &inside);
    uint8_t sent[256] = {0};
    buffer late = {0};
    CHECK_EQUAL(inferd_fini_single(client, 1, NULL), INFERD_TIMEOUT);
    CHECK_EQUAL(inside->request_count, 1);
    ssize_t length = read(daemon, sent, sizeof sent);
    CHECK(length > 0 && memmem(sent, (size_t)length, "\xa6" "cancel\x81\xa7request\x01", 17));
    put_event(&late, 1, REPLY, 10);
    CHECK_EQUAL(write(daemon, late.data, late.length), late.length);
    CHECK_EQUAL(inferd_process(client, NULL), 0);
    CHECK(!inside->request_count && !inside->stored_bytes);
    free(late.data);
    close(daemon);
    inferd_close(client);
}

static void *time_out(void *client) {
    CHECK_EQUAL(inferd_fini_single(client, 1, NULL), INFERD_TIMEOUT);
    return NULL;
}

SCENARIO(threads_time_out_side_by_side) {
    int daemon;
    connection *inside;
    inferd_client *client = make_silent_client(&daemon, &inside);
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        CHECK(!pthread_create(&threads[i], NULL, time_out, client));
    for (int i = 0; i < THREADS; i++)
        CHECK(!pthread_join(threads[i], NULL));
    close(daemon);
    inferd_close(client);
}

SCENARIO(an_event_is_waited_for_until_the_timeout) {
    int daemon;
    connection *inside;
    inferd_client *client = make_silent_client(&daemon, &inside);
    inferd_call call = {.kind = INFERD_STREAM, .handle = 1};
    inferd_event event;
    uint64_t id;
    CHECK_EQUAL(inferd_next_event(client, 0, -1, &event, NULL), 0); /* nothing is under way */
    CHECK_EQUAL(event.kind, INFERD_EVENT_NONE);
    CHECK_EQUAL(inferd_start(client, &call, &id, NULL), 0);
    CHECK_EQUAL(inferd_next_event(client, id, SILENT_MS, &event, NULL), 0);
    CHECK_EQUAL(event.kind, INFERD_EVENT_NONE);
    close(daemon);
    CHECK_EQUAL(inferd_next_event(client, id, -1, &event, NULL), 0);
    CHECK_EQUAL(event.kind, INFERD_EVENT_FAILED);
    CHECK_EQUAL(event.error.number, INFERD_CONNECTION_LOST);
    inferd_close(client);
}

/* ---- A daemon that plays a vector ---- */

/* Connect and make the call `models`, each within TIMEOUT_MS, and print the error's name, or `reply`. */
SCENARIO(calls_a_daemon_and_prints_the_outcome) {
    int timeout_ms = atoi(getenv("TIMEOUT_MS"));
    inferd_options options = {.connect_timeout_ms = timeout_ms, .call_timeout_ms = timeout_ms};
    inferd_client *client = NULL;
    inferd_error error;
    inferd_model model;
    size_t count = 0;
    if (!inferd_connect(&options, &client, &error))
        inferd_models(client, &model, 1, &count, &error);
    puts(error.number == INFERD_UNKNOWN ? "Unknown" : error.number ? error.name : "reply");
    inferd_close(client);
}

#define ENTRY(name) {#name, name}
static const scenario SCENARIOS[] = {
    ENTRY(prints_each_frame_as_json),
    ENTRY(damaged_frames_end_in_events),
    ENTRY(a_frame_has_at_most_64_levels),
    ENTRY(lengths_beyond_the_frame_are_not_read),
    ENTRY(numbers_have_their_values),
    ENTRY(a_stream_has_at_most_64_events_that_were_not_taken),
    ENTRY(replies_that_were_not_taken_have_a_bound),
    ENTRY(bytes_that_wait_to_be_sent_have_a_bound),
    ENTRY(descriptors_that_wait_to_be_sent_have_a_bound),
    ENTRY(a_refused_request_takes_its_descriptor_back),
    ENTRY(long_texts_of_an_error_are_cut_between_characters),
    ENTRY(a_path_of_a_socket_has_at_most_107_bytes),
    ENTRY(a_call_past_its_timeout_is_cancelled_and_its_late_reply_dropped),
    ENTRY(threads_time_out_side_by_side),
    ENTRY(an_event_is_waited_for_until_the_timeout),
    ENTRY(calls_a_daemon_and_prints_the_outcome),
};

int main(int argc, char **argv) {
    return run_scenario(SCENARIOS, sizeof SCENARIOS / sizeof *SCENARIOS, argc, argv);
}
