/* A program that tests the part that both wasi-nn libraries share, from inside, against a real daemon. */
#include "wasi_nn/backend.c" /* NOLINT */

#include <sys/socket.h>

#include "check.h"

static inferd_error error;

/* Begin a backend and load a model; `inside` receives the backend. */
static void *begin(size_t contexts_max, backend **inside, uint32_t *g) {
    backend_limits limits = {.contexts_max = contexts_max, .idle_ms = 1000, .evicts = true};
    void *ctx = NULL;
    CHECK_EQUAL(backend_begin(&ctx, 1, &limits, NULL, &error), 0);
    CHECK_EQUAL(backend_load(ctx, "echo", 4, NULL, 0, g, &error), 0);
    *inside = *find_backend(ctx);
    CHECK(*inside);
    return ctx;
}

static uint32_t open_session(void *ctx, uint32_t g, const char *id) {
    uint32_t context = 0;
    CHECK_EQUAL(backend_open(ctx, g, id, &context, &error), 0);
    return context;
}

/* Let a context look as if its last call had ended `ms` ago. */
static void age(backend *b, uint32_t context, int64_t ms) {
    find_entry(&b->contexts, context)->used_ns -= ms * NS_PER_MS;
}

SCENARIO(a_new_context_closes_those_that_were_idle_for_too_long) {
    uint32_t g = 0;
    backend *b;
    void *ctx = begin(10, &b, &g);
    uint32_t one = open_session(ctx, g, "one"), two = open_session(ctx, g, "two"), three = open_session(ctx, g, "three");
    age(b, one, 1001);
    age(b, two, 1001);
    CHECK_EQUAL(open_session(ctx, g, "two"), two); /* it is used, not opened: nothing is closed */
    CHECK(find_entry(&b->contexts, one));
    uint32_t four = open_session(ctx, g, "four");
    CHECK(!find_entry(&b->contexts, one));
    CHECK(find_entry(&b->contexts, two) && find_entry(&b->contexts, three) && find_entry(&b->contexts, four));
    CHECK_EQUAL(backend_end(ctx, &error), 0);
}

SCENARIO(a_context_with_a_call_under_way_is_never_closed_for_another) {
    uint32_t g = 0, context = 0;
    inferd_handle handle;
    backend *b;
    void *ctx = begin(2, &b, &g);
    uint32_t one = open_session(ctx, g, "one"), two = open_session(ctx, g, "two");
    age(b, one, 5000);
    CHECK(begin_call(b, &b->contexts, one, &handle, &error));
    uint32_t three = open_session(ctx, g, "three");
    CHECK(find_entry(&b->contexts, one) && !find_entry(&b->contexts, two));
    CHECK(begin_call(b, &b->contexts, three, &handle, &error));
    CHECK_EQUAL(backend_open(ctx, g, "four", &context, &error), INFERD_BUSY);
    CHECK_EQUAL(b->contexts.count, 2);
    end_call(b, &b->contexts, one);
    end_call(b, &b->contexts, three);
    CHECK_EQUAL(open_session(ctx, g, "three"), three);
    CHECK(open_session(ctx, g, "four") > three);
    CHECK(!find_entry(&b->contexts, one));
    CHECK_EQUAL(backend_end(ctx, &error), 0);
}

SCENARIO(a_lost_connection_is_kept_while_calls_are_under_way) {
    uint32_t g = 0;
    inferd_handle handle;
    backend *b;
    void *ctx = begin(2, &b, &g);
    uint32_t one = open_session(ctx, g, "one");
    inferd_client *before = begin_call(b, &b->contexts, one, &handle, &error);
    CHECK(before);
    shutdown(inferd_fd(before), SHUT_RDWR);
    CHECK_EQUAL(backend_load(ctx, "echo", 4, NULL, 0, &g, &error), INFERD_CONNECTION_LOST);
    CHECK(b->client == before);
    end_call(b, &b->contexts, one);
    CHECK_EQUAL(backend_load(ctx, "echo", 4, NULL, 0, &g, &error), 0);
    CHECK_EQUAL(backend_compute(ctx, one, &error), INFERD_INVALID_ARGUMENT);
    open_session(ctx, g, "one");
    CHECK_EQUAL(backend_end(ctx, &error), 0);
}

SCENARIO(names_are_mapped_as_the_list_says) {
    static const struct {
        const char *list, *name, *model;
    } CASES[] = {
        {NULL, "a", "a"},          {"", "a", "a"},           {"a=x", "a", "x"},        {"a=x,b=y", "b", "y"},
        {"b=y,*=x", "c", "x"},     {"*=x,b=y", "b", "x"},    {"a=/p=q.gguf", "a", "/p=q.gguf"},
        {"a=x", "b", NULL},        {"aa=x", "a", NULL},      {"a", "a", NULL},         {"a,b=y", "b", "y"},
        {",,b=y,", "b", "y"},      {"a=", "a", ""},          {"=x", "", "x"},
    };
    char model[64];
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        CHECK_EQUAL(map_name(CASES[i].list, CASES[i].name, model, sizeof model), CASES[i].model != NULL);
        if (CASES[i].model)
            CHECK_TEXT(model, CASES[i].model);
    }
}

#define ENTRY(name) {#name, name}
static const scenario SCENARIOS[] = {
    ENTRY(a_new_context_closes_those_that_were_idle_for_too_long),
    ENTRY(a_context_with_a_call_under_way_is_never_closed_for_another),
    ENTRY(a_lost_connection_is_kept_while_calls_are_under_way),
    ENTRY(names_are_mapped_as_the_list_says),
};

int main(int argc, char **argv) {
    return run_scenario(SCENARIOS, sizeof SCENARIOS / sizeof *SCENARIOS, argc, argv);
}
