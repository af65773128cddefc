/* A host that opens libwasi_nn_llamacpp.so as WAMR does, by the names and with the types of its wasi-nn. */
#include "host.h"

#include <stdint.h>

/* WAMR's wasi_nn_types.h, as far as backends use it. */
typedef enum { success, invalid_argument, invalid_encoding, missing_memory, busy, runtime_error,
               unsupported_operation, too_large, not_found, context_full = 101, prompt_too_long,
               model_not_found } wasi_nn_error;
typedef struct { uint32_t *buf; uint32_t size; } tensor_dimensions;
typedef struct { uint8_t *buf; uint32_t size; } tensor_data;
typedef struct { tensor_dimensions *dimensions; uint8_t type; uint8_t pad[3]; tensor_data data; } tensor;
typedef struct { uint8_t *buf; uint32_t size; } graph_builder;
typedef struct { graph_builder *buf; uint32_t size; } graph_builder_array;
typedef enum { ggml = 5 } graph_encoding;
typedef enum { cpu = 0 } execution_target;
typedef uint32_t graph, graph_execution_context;

static struct {
    wasi_nn_error (*init)(void **);
    wasi_nn_error (*deinit)(void *);
    wasi_nn_error (*load)(void *, graph_builder_array *, graph_encoding, execution_target, graph *);
    wasi_nn_error (*load_by_name)(void *, const char *, uint32_t, graph *);
    wasi_nn_error (*load_by_name_with_config)(void *, const char *, uint32_t, void *, uint32_t, graph *);
    wasi_nn_error (*init_execution_context)(void *, graph, graph_execution_context *);
    wasi_nn_error (*set_input)(void *, graph_execution_context, uint32_t, tensor *);
    wasi_nn_error (*compute)(void *, graph_execution_context);
    wasi_nn_error (*get_output)(void *, graph_execution_context, uint32_t, tensor_data *, uint32_t *);
} api;

static void *backend;

/* A host's own function of this name must not replace the library's. */
wasi_nn_error load_by_name(void *ctx, const char *name, uint32_t length, graph *g);
wasi_nn_error load_by_name(void *ctx, const char *name, uint32_t length, graph *g) {
    (void)ctx, (void)name, (void)length, (void)g;
    abort();
}

static void open_library(void) {
    void *library = open_with(RTLD_LAZY | RTLD_LOCAL);
    look_up(library, "init_backend", &api.init);
    look_up(library, "deinit_backend", &api.deinit);
    LOOK_UP(library, load);
    LOOK_UP(library, load_by_name);
    LOOK_UP(library, load_by_name_with_config);
    LOOK_UP(library, init_execution_context);
    LOOK_UP(library, set_input);
    LOOK_UP(library, compute);
    LOOK_UP(library, get_output);
}

static wasi_nn_error load(const char *name, const char *config, graph *g) {
    char json[256];
    if (!config)
        return api.load_by_name(backend, name, (uint32_t)strlen(name), g);
    snprintf(json, sizeof json, "%s#", config); /* the length bounds it, not a zero byte */
    return api.load_by_name_with_config(backend, name, (uint32_t)strlen(name), json, (uint32_t)strlen(config), g);
}

static graph_execution_context open_context(const char *name, const char *config) {
    graph g = 99;
    graph_execution_context context = 99;
    CHECK_EQUAL(load(name, config, &g), success);
    CHECK_EQUAL(api.init_execution_context(backend, g, &context), success);
    CHECK(context != 99);
    return context;
}

static wasi_nn_error set_input(graph_execution_context context, uint32_t index, const char *text) {
    uint32_t one = 1;
    char copy[256];
    tensor_dimensions dimensions = {&one, 1};
    tensor input = {&dimensions, 3, {0}, {(uint8_t *)copy, (uint32_t)strlen(text)}};
    snprintf(copy, sizeof copy, "%s#", text);
    return api.set_input(backend, context, index, &input);
}

static wasi_nn_error get_output(graph_execution_context context, uint32_t index, char *text, uint32_t size) {
    tensor_data output = {(uint8_t *)text, size - 1};
    uint32_t length = 0;
    wasi_nn_error error = api.get_output(backend, context, index, &output, &length);
    text[error ? 0 : length] = 0;
    return error;
}

/* Compute a prompt and compare the answer. */
static void check_answer(graph_execution_context context, const char *prompt, const char *answer) {
    char text[256];
    CHECK_EQUAL(set_input(context, 0, prompt), success);
    CHECK_EQUAL(api.compute(backend, context), success);
    CHECK_EQUAL(get_output(context, 0, text, sizeof text), success);
    CHECK_TEXT(text, answer);
}

SCENARIO(a_model_answers_by_its_name) {
    char metadata[4096];
    graph_execution_context context = open_context("echo", NULL);
    check_answer(context, "What is up?", "What is up?");
    CHECK_EQUAL(get_output(context, 1, metadata, sizeof metadata), success);
    CHECK(strstr(metadata, "\"input_tokens\":") && strstr(metadata, "\"llama_commit\""));
    check_answer(context, "And again?", "And again?");
}

SCENARIO(a_model_answers_by_the_path_of_its_file) {
    char text[4096];
    graph_execution_context context = open_context(getenv("MODEL_FILE"), "{\"n-predict\": 6, \"temp\": 0}");
    CHECK_EQUAL(set_input(context, 0, "The capital of France is"), success);
    CHECK_EQUAL(api.compute(backend, context), success);
    CHECK_EQUAL(get_output(context, 0, text, sizeof text), success);
    CHECK(text[0]);
    CHECK_EQUAL(get_output(context, 1, text, sizeof text), success);
    CHECK(strstr(text, "\"output_tokens\":6"));
}

SCENARIO(the_environment_maps_names_to_models) {
    check_answer(open_context("default", NULL), "mapped", "mapped");
    check_answer(open_context("any/other.gguf", NULL), "mapped", "mapped");
}

/* INFERD_WASI_NN_MODELS is other=echo,default=slow. */
SCENARIO(the_environment_limits_the_names) {
    graph g = 7;
    check_answer(open_context("other", NULL), "x", "x");
    CHECK_EQUAL(load("echo", NULL, &g), model_not_found);
    CHECK_EQUAL(load("othe", NULL, &g), model_not_found);
    CHECK_EQUAL(load("other=echo", NULL, &g), model_not_found);
    CHECK_EQUAL(load("", NULL, &g), model_not_found);
    CHECK_EQUAL(load(getenv("MODEL_FILE"), NULL, &g), model_not_found);
    CHECK_EQUAL(g, 7);
}

SCENARIO(names_and_configurations_have_bounds) {
    graph g = 7;
    uint32_t size = (1 << 20) + 1;
    char *text = malloc(size);
    CHECK(text);
    memset(text, ' ', size);
    memcpy(text, "{}", 2);
    CHECK_EQUAL(api.load_by_name_with_config(backend, "echo", 4, text, 900 << 10, &g), success);
    CHECK_EQUAL(api.load_by_name_with_config(backend, "echo", 4, text, size - 1, &g), too_large); /* by its frame */
    CHECK_EQUAL(api.load_by_name_with_config(backend, "echo", 4, text, size, &g), invalid_argument);
    CHECK_EQUAL(api.load_by_name(backend, text, 4095, &g), model_not_found);
    CHECK_EQUAL(api.load_by_name(backend, text, 4096, &g), invalid_argument);
    free(text);
}

SCENARIO(contexts_and_graphs_are_independent) {
    graph_execution_context one = open_context("echo", "{\"n-predict\": 3}"), two = open_context("echo", NULL);
    char text[64];
    CHECK(one != two);
    CHECK_EQUAL(set_input(one, 0, "first"), success);
    CHECK_EQUAL(set_input(two, 0, "second"), success);
    CHECK_EQUAL(api.compute(backend, two), success);
    CHECK_EQUAL(api.compute(backend, one), success);
    CHECK_EQUAL(get_output(one, 0, text, sizeof text), success);
    CHECK_TEXT(text, "fir");
    CHECK_EQUAL(get_output(two, 0, text, sizeof text), success);
    CHECK_TEXT(text, "second");
    CHECK_EQUAL(set_input(two, 1, "{\"n-predict\": 2}"), success);
    check_answer(two, "third", "th");
    check_answer(one, "third", "thi");
}

SCENARIO(a_small_buffer_gets_nothing_but_the_size) {
    graph_execution_context context = open_context("echo", NULL);
    uint8_t bytes[8] = "#######";
    tensor_data output = {bytes, 4};
    uint32_t length = 0;
    check_answer(context, "12345", "12345");
    CHECK_EQUAL(api.get_output(backend, context, 0, &output, &length), too_large);
    CHECK_EQUAL(length, 5);
    CHECK_TEXT((char *)bytes, "#######");
    output.size = 5;
    CHECK_EQUAL(api.get_output(backend, context, 0, &output, &length), success);
    CHECK_TEXT((char *)bytes, "12345##");
    output = (tensor_data){NULL, 0};
    CHECK_EQUAL(api.get_output(backend, context, 0, &output, &length), too_large);
    CHECK_EQUAL(length, 5);
}

SCENARIO(wrong_arguments_have_wasmedges_numbers) {
    graph g = 7;
    graph_execution_context context = open_context("echo", NULL);
    uint32_t length = 0;
    tensor_data output = {NULL, 4};
    tensor input = {NULL, 3, {0}, {NULL, 4}};
    CHECK_EQUAL(load("nothing", NULL, &g), model_not_found);
    CHECK_EQUAL(load("/\x1b[2J\nnothing.gguf", NULL, &g), model_not_found);
    CHECK_EQUAL(load("echo", "{", &g), invalid_encoding);
    CHECK_EQUAL(g, 7);
    CHECK_EQUAL(api.load(backend, NULL, ggml, cpu, &g), unsupported_operation);
    CHECK_EQUAL(api.init(NULL), invalid_argument);
    CHECK_EQUAL(api.deinit(NULL), invalid_argument);
    CHECK_EQUAL(api.load_by_name(backend, NULL, 0, &g), invalid_argument);
    CHECK_EQUAL(api.load_by_name(NULL, "echo", 4, &g), invalid_argument);
    CHECK_EQUAL(api.load_by_name(backend, "echo", 4, NULL), invalid_argument);
    CHECK_EQUAL(api.init_execution_context(backend, 1000, &context), invalid_argument);
    CHECK_EQUAL(api.compute(backend, context), invalid_argument); /* it has no input */
    CHECK_EQUAL(api.compute(backend, 1000), invalid_argument);
    CHECK_EQUAL(api.set_input(backend, context, 0, NULL), invalid_argument);
    CHECK_EQUAL(set_input(context, 0, "What is in <img src=\"data:image/png;base64,AAAA\">?"), invalid_argument);
    CHECK_EQUAL(api.set_input(backend, context, 0, &input), invalid_argument);
    CHECK_EQUAL(api.get_output(backend, context, 0, &output, &length), invalid_argument);
    CHECK_EQUAL(api.get_output(backend, context, 0, NULL, &length), invalid_argument);
    output = (tensor_data){(uint8_t[4]){0}, 4};
    CHECK_EQUAL(api.get_output(backend, context, 2, &output, &length), not_found);
}

SCENARIO(a_failed_turn_is_described_at_index_1) {
    char metadata[4096];
    graph_execution_context context = open_context("echo", "{\"ctx-size\": 9}");
    CHECK_EQUAL(set_input(context, 0, "much too long"), success);
    CHECK_EQUAL(api.compute(backend, context), prompt_too_long);
    CHECK_EQUAL(get_output(context, 1, metadata, sizeof metadata), success);
    CHECK(strstr(metadata, "\"stop_reason\":\"PromptTooLong\",\"stop_detail\":\"the prompt "));
    CHECK(strstr(metadata, "\"error\":{\"name\":\"PromptTooLong\",\"number\":102,\"message\":\"the prompt "));
    CHECK(strstr(metadata, "\"hint\":\"") && strstr(metadata, "\"data\":{\"prompt_tokens\":15,\"ctx_size\":9}"));
    check_answer(context, "ok", "ok");
    CHECK_EQUAL(get_output(context, 1, metadata, sizeof metadata), success);
    CHECK(!strstr(metadata, "\"error\""));
}

SCENARIO(the_graphs_of_a_backend_are_bounded) {
    graph g = 0;
    for (int i = 0; i < 1000; i++)
        CHECK_EQUAL(load("echo", NULL, &g), success);
    CHECK_EQUAL(g, 999);
    CHECK(load("echo", NULL, &g) != success);
    CHECK_EQUAL(g, 999);
}

enum { TURNS = 5 };

static void *compute_turns(void *number) {
    char prompt[32];
    graph_execution_context context = open_context("echo", NULL);
    snprintf(prompt, sizeof prompt, "thread %d", *(int *)number);
    for (int i = 0; i < TURNS; i++)
        check_answer(context, prompt, prompt);
    return NULL;
}

SCENARIO(threads_share_a_backend) {
    run_threads(compute_turns);
}

SCENARIO(an_output_that_cannot_be_written_fails_the_turn) {
    graph_execution_context context = open_context("echo", "{\"stream-stdout\": true}");
    CHECK(freopen("/dev/full", "w", stdout));
    CHECK_EQUAL(set_input(context, 0, "printed"), success);
    CHECK_EQUAL(api.compute(backend, context), runtime_error);
    CHECK_EQUAL(set_input(context, 1, "{\"stream-stdout\": false}"), success);
    check_answer(context, "silent", "silent");
}

SCENARIO(stream_stdout_prints_the_answers) {
    graph_execution_context context = open_context("echo", "{\"stream-stdout\": true, \"ctx-size\": 20}");
    char text[64];
    check_answer(context, "printed,", "printed,");
    CHECK_EQUAL(set_input(context, 1, "{\"stream_stdout\": false}"), success);
    check_answer(context, "silent", "silent");
    CHECK_EQUAL(set_input(context, 1, "{\"stream-stdout\": true}"), success);
    CHECK_EQUAL(set_input(context, 0, "a full context.."), success);
    CHECK_EQUAL(api.compute(backend, context), context_full);
    CHECK_EQUAL(get_output(context, 0, text, sizeof text), success);
    CHECK_TEXT(text, "a ");
    CHECK_EQUAL(set_input(context, 1, "{\"embedding\": true}"), success);
    CHECK_EQUAL(set_input(context, 0, "a text"), success);
    CHECK_EQUAL(api.compute(backend, context), success);
    CHECK_EQUAL(api.compute(backend, 1000), invalid_argument);
}

SCENARIO(a_load_after_a_restart_of_the_daemon_connects_again) {
    graph_execution_context old = open_context("echo", NULL);
    char text[64];
    wait_for_partner(); /* the daemon is killed */
    CHECK_EQUAL(set_input(old, 0, "lost"), runtime_error);
    graph g;
    CHECK_EQUAL(load("echo", NULL, &g), runtime_error);
    wait_for_partner(); /* another one has started */
    graph_execution_context context = open_context("echo", NULL);
    check_answer(context, "again", "again");
    CHECK(context != old);
    CHECK_EQUAL(get_output(old, 0, text, sizeof text), invalid_argument);
}

/* Check that each function refuses a backend that does not exist. */
static void check_refused(void *wrong) {
    graph g = 7;
    graph_execution_context context = 7;
    uint32_t length = 7;
    uint8_t bytes[8];
    tensor_data output = {bytes, sizeof bytes};
    tensor input = {NULL, 3, {0}, {(uint8_t *)"a", 1}};
    const wasi_nn_error errors[] = {
        api.deinit(wrong),
        api.load_by_name(wrong, "echo", 4, &g),
        api.load_by_name_with_config(wrong, "echo", 4, "{}", 2, &g),
        api.init_execution_context(wrong, 0, &context),
        api.set_input(wrong, 0, 0, &input),
        api.compute(wrong, 0),
        api.get_output(wrong, 0, 0, &output, &length),
    };
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        CHECK_EQUAL(errors[i], invalid_argument);
    CHECK_EQUAL(api.load(wrong, NULL, ggml, cpu, &g), unsupported_operation);
    CHECK(g == 7 && context == 7);
}

SCENARIO(a_backend_that_does_not_exist_is_refused_by_each_function) {
    void *ended = backend;
    open_context("echo", NULL);
    CHECK_EQUAL(api.deinit(ended), success);
    check_refused(ended);
    CHECK_EQUAL(api.init(&backend), success);
    CHECK(backend != ended);
    check_refused(ended);
    check_refused(NULL);
    check_refused(&ended);
    check_answer(open_context("echo", NULL), "still works", "still works");
}

static void use_in_child(void) {
    check_refused(backend);
    CHECK_EQUAL(api.init(&backend), success);
    check_answer(open_context("echo", NULL), "the child's", "the child's");
    CHECK_EQUAL(api.deinit(backend), success);
}

SCENARIO(a_child_process_has_no_backend_of_its_parent) {
    graph_execution_context context = open_context("echo", NULL);
    run_in_child(use_in_child);
    check_answer(context, "the parent's", "the parent's");
}

/* Use the backend until it has ended; thread 0 computes a long turn. */
static void *use_until_the_end(void *number) {
    graph g = 0;
    graph_execution_context context = 0;
    wasi_nn_error error = load(*(int *)number ? "echo" : "slow", NULL, &g);
    if (!error)
        error = api.init_execution_context(backend, g, &context);
    while (!error) {
        error = set_input(context, 0, "0123456789012345678901234567890123456789");
        error = error ? error : api.compute(backend, context);
    }
    CHECK(error == invalid_argument || error == runtime_error);
    return NULL;
}

static void *end_backend(void *number) {
    return api.deinit(backend) ? NULL : number;
}

SCENARIO(a_backend_is_ended_once_while_other_threads_use_it) {
    pthread_t users[THREADS], enders[2];
    int numbers[THREADS];
    void *ended[2] = {NULL};
    for (int i = 0; i < THREADS; i++) {
        numbers[i] = i;
        CHECK(!pthread_create(&users[i], NULL, use_until_the_end, &numbers[i]));
    }
    check_answer(open_context("echo", NULL), "another turn", "another turn");
    for (int i = 0; i < 2; i++)
        CHECK(!pthread_create(&enders[i], NULL, end_backend, &numbers[i]));
    for (int i = 0; i < 2; i++)
        CHECK(!pthread_join(enders[i], &ended[i]));
    for (int i = 0; i < THREADS; i++)
        CHECK(!pthread_join(users[i], NULL));
    CHECK(!ended[0] != !ended[1]);
    CHECK_EQUAL(api.init(&backend), success);
}

SCENARIO(a_key_that_the_library_follows_is_not_ignored) {
    static const char *const CONFIGS[] = {
        "{\"stream-stdout\": false}",
        "{ \"stream_stdout\" :false, \"n-predict\": 9}",
        "{\"n-predict\": 9 , \"stream-stdout\": false }",
        "{\"stop\": [\"x\"],\"stream-stdout\":false,\"stream_stdout\":false, \"n-predict\": 9}",
        "{\"n-predict\": 9, \"grammar\": \"root ::= \\\"stream-stdout\\\" | [a-z]+ # ,\",\"stream-stdout\": false}",
    };
    char metadata[4096];
    for (size_t i = 0; i < sizeof CONFIGS / sizeof *CONFIGS; i++) {
        graph_execution_context context = open_context("echo", CONFIGS[i]);
        check_answer(context, "abcdefghijkl", i ? "abcdefghi" : "abcdefghijkl");
        CHECK_EQUAL(get_output(context, 1, metadata, sizeof metadata), success);
        CHECK(strstr(metadata, "\"ignored\":[]"));
        CHECK_EQUAL(set_input(context, 1, CONFIGS[i]), success);
        CHECK_EQUAL(get_output(context, 1, metadata, sizeof metadata), success);
        CHECK(strstr(metadata, "\"ignored\":[]"));
    }
    graph_execution_context context = open_context("echo", "{\"stream-stdout\": 1, \"enable-log\": true}");
    CHECK_EQUAL(get_output(context, 1, metadata, sizeof metadata), success);
    CHECK(strstr(metadata, "\"ignored\":[\"enable-log\",\"stream-stdout\"]"));
}

#define ENTRY(name) {#name, name}
static const scenario SCENARIOS[] = {
    ENTRY(a_model_answers_by_its_name),
    ENTRY(a_model_answers_by_the_path_of_its_file),
    ENTRY(the_environment_maps_names_to_models),
    ENTRY(the_environment_limits_the_names),
    ENTRY(names_and_configurations_have_bounds),
    ENTRY(contexts_and_graphs_are_independent),
    ENTRY(a_small_buffer_gets_nothing_but_the_size),
    ENTRY(wrong_arguments_have_wasmedges_numbers),
    ENTRY(a_failed_turn_is_described_at_index_1),
    ENTRY(the_graphs_of_a_backend_are_bounded),
    ENTRY(threads_share_a_backend),
    ENTRY(an_output_that_cannot_be_written_fails_the_turn),
    ENTRY(stream_stdout_prints_the_answers),
    ENTRY(a_backend_that_does_not_exist_is_refused_by_each_function),
    ENTRY(a_child_process_has_no_backend_of_its_parent),
    ENTRY(a_backend_is_ended_once_while_other_threads_use_it),
    ENTRY(a_key_that_the_library_follows_is_not_ignored),
    ENTRY(a_load_after_a_restart_of_the_daemon_connects_again),
};

int main(int argc, char **argv) {
    open_library();
    CHECK_EQUAL(api.init(&backend), success);
    int status = run_scenario(SCENARIOS, sizeof SCENARIOS / sizeof *SCENARIOS, argc, argv);
    CHECK_EQUAL(api.deinit(backend), success);
    return status;
}
