/* A host that opens libwasi_nn_backend.so as hosts of wasi_nn_backend do, and plays that project's test
 * programs with assertions. MODEL is the model's name or file. */
#include "host.h"

#include <stdbool.h>
#include <stdint.h>

/* The types of wasi_nn_llama.h. */
typedef enum { success, invalid_argument, invalid_encoding, timeout, runtime_error, unsupported_operation,
               too_large, not_found, security, unknown, prompt_too_long = 102, model_not_found = 103 } wasi_nn_error;
typedef struct { uint32_t *buf; uint32_t size; } tensor_dimensions;
typedef enum { fp16, fp32, fp64, bf16, u8 } tensor_type;
typedef uint8_t *tensor_data;
typedef struct { tensor_dimensions *dimensions; tensor_type type; tensor_data data; } tensor;
typedef uint32_t graph, graph_execution_context;

static struct {
    wasi_nn_error (*init_backend)(void **);
    wasi_nn_error (*init_backend_with_config)(void **, const char *, uint32_t);
    wasi_nn_error (*deinit_backend)(void *);
    wasi_nn_error (*load)(void *, void *, int, int, graph *);
    wasi_nn_error (*load_by_name)(void *, const char *, uint32_t, graph *);
    wasi_nn_error (*load_by_name_with_config)(void *, const char *, uint32_t, const char *, uint32_t, graph *);
    wasi_nn_error (*init_execution_context)(void *, graph, graph_execution_context *);
    wasi_nn_error (*init_execution_context_with_session_id)(void *, const char *, graph_execution_context *);
    wasi_nn_error (*close_execution_context)(void *, graph_execution_context);
    wasi_nn_error (*run_inference)(void *, graph_execution_context, uint32_t, tensor *, tensor_data, uint32_t *,
                                   const char *, uint32_t);
    wasi_nn_error (*set_input)(void *, graph_execution_context, uint32_t, tensor *);
    wasi_nn_error (*compute)(void *, graph_execution_context);
    wasi_nn_error (*get_output)(void *, graph_execution_context, uint32_t, tensor_data, uint32_t *);
} api;

static void *backend;
static const char *model;

static void open_library(void) {
    void *library = open_with(RTLD_LAZY);
    LOOK_UP(library, init_backend);
    LOOK_UP(library, init_backend_with_config);
    LOOK_UP(library, deinit_backend);
    LOOK_UP(library, load);
    LOOK_UP(library, load_by_name);
    LOOK_UP(library, load_by_name_with_config);
    LOOK_UP(library, init_execution_context);
    LOOK_UP(library, init_execution_context_with_session_id);
    LOOK_UP(library, close_execution_context);
    LOOK_UP(library, run_inference);
    LOOK_UP(library, set_input);
    LOOK_UP(library, compute);
    LOOK_UP(library, get_output);
}

static uint32_t length_of(const char *text) { return text ? (uint32_t)strlen(text) : 0; }

static void begin(const char *config) {
    CHECK_EQUAL(api.init_backend_with_config(&backend, config, length_of(config)), success);
}

static wasi_nn_error try_load(const char *name, const char *config) {
    graph unused = 42;
    return api.load_by_name_with_config(backend, name, length_of(name), config, length_of(config), &unused);
}

static void load(const char *config) { CHECK_EQUAL(try_load(model, config), success); }

static graph_execution_context open_session(const char *id) {
    graph_execution_context context = 0;
    CHECK_EQUAL(api.init_execution_context_with_session_id(backend, id, &context), success);
    CHECK(context);
    return context;
}

static wasi_nn_error try_run(graph_execution_context context, const char *text, const char *config, char *answer,
                             uint32_t *size) {
    tensor_dimensions none = {NULL, 0};
    tensor input = {&none, u8, (tensor_data)text};
    return api.run_inference(backend, context, 0, &input, (tensor_data)answer, size, config, length_of(config));
}

/* Answer a message; the answer lasts until the next call. */
static const char *run(graph_execution_context context, const char *text, const char *config) {
    static _Thread_local char answer[4096];
    uint32_t size = sizeof answer;
    memset(answer, '#', sizeof answer);
    CHECK_EQUAL(try_run(context, text, config, answer, &size), success);
    CHECK(size > 1 && size < sizeof answer && strlen(answer) == size - 1 && answer[size] == '#');
    return answer;
}

static const char *metadata(graph_execution_context context) {
    static char json[8192];
    uint32_t size = sizeof json;
    CHECK_EQUAL(api.get_output(backend, context, 1, (tensor_data)json, &size), success);
    CHECK_EQUAL(strlen(json), size - 1);
    return json;
}

static long count_of(graph_execution_context context, const char *key) {
    const char *found = strstr(metadata(context), key);
    CHECK(found);
    return strtol(strchr(found, ':') + 1, NULL, 10);
}

/* ---- Basic ---- */

SCENARIO(backends_begin_and_end_with_any_configuration) {
    const char *configs[] = {
        NULL,
        "{}",
        "{\"max_sessions\":50,\"idle_timeout_ms\":300000,\"auto_cleanup\":true,\"queue_size\":20}",
        "{\"backend\":{\"max_sessions\":5,\"max_concurrent\":4},\"memory_policy\":{\"cache_strategy\":\"lru\"},"
        "\"performance\":{\"batch_size\":512},\"logging\":{\"level\":\"debug\",\"file\":\"/nowhere/x.log\"}}",
        "{\"max_sessions\":-1,\"idle_timeout_ms\":\"soon\"}",
        "{\"max_sessions\":",
        "{\"a\\\"b\":\"c\\\\\",\"\xc3\xa9\":[[[[[[[[[[1]]]]]]]]]]}",
        "\"",
    };
    for (size_t i = 0; i < sizeof configs / sizeof *configs; i++) {
        begin(configs[i]);
        CHECK_EQUAL(api.deinit_backend(backend), success);
    }
    size_t size = 1 << 20;
    char *huge = malloc(size);
    CHECK(huge);
    memset(huge, 'x', size);
    memcpy(huge, "{\"", 2);
    CHECK_EQUAL(api.init_backend_with_config(&backend, huge, (uint32_t)size), success);
    free(huge);
    CHECK_EQUAL(api.deinit_backend(backend), success);
    CHECK_EQUAL(api.init_backend(&backend), success);
    load(NULL);
}

SCENARIO(models_load_with_flat_and_nested_configurations) {
    begin(NULL);
    load("{\"n_gpu_layers\":0,\"ctx_size\":512,\"n_predict\":5,\"batch_size\":128,\"threads\":4}");
    run(open_session("a"), "Hello, you!", NULL);
    load("{\"model\":{\"n_gpu_layers\":98,\"ctx_size\":1024,\"n_predict\":3},\"sampling\":{\"temp\":0,\"top_p\":0.8,"
         "\"top_k\":30,\"min_p\":0.1,\"typical_p\":0.95,\"repeat_penalty\":1.15,\"penalty_last_n\":32,\"mirostat\":1,"
         "\"mirostat_tau\":4.0,\"seed\":12345},\"stopping\":{\"max_tokens\":4}}");
    graph_execution_context context = open_session("a");
    run(context, "Write a short story about", NULL);
    CHECK_EQUAL(count_of(context, "\"output_tokens\""), 4);
    load("{\"n_predict\": not JSON");
    run(open_session("a"), "Hello", "{\"max_tokens\":4}");
}

/* ---- Inference ---- */

SCENARIO(inference_answers) {
    graph_execution_context context = 0;
    begin("{\"max_concurrent\":4}");
    load("{\"n_gpu_layers\":98,\"ctx_size\":2048,\"n_predict\":20,\"sampling\":{\"temp\":0.7}}");
    CHECK_EQUAL(api.init_execution_context(backend, 7, &context), success);
    run(context, "What is artificial intelligence?", NULL);
    CHECK_EQUAL(api.close_execution_context(backend, context), success);
}

SCENARIO(runtime_parameters_hold_for_their_turn) {
    begin(NULL);
    load("{\"ctx_size\":2048,\"n_predict\":12,\"sampling\":{\"temp\":0.7,\"top_p\":0.9}}");
    graph_execution_context context = open_session("a");
    run(context, "Generate a creative story about a robot.", NULL);
    long usual = count_of(context, "\"output_tokens\"");
    run(context, "Generate a creative story.", "{\"temperature\":1.2,\"top_p\":0.95,\"max_tokens\":5}");
    CHECK_EQUAL(count_of(context, "\"output_tokens\""), 5);
    run(context, "Generate a creative story about a robot.", "{\"temperature\":0.2,\"seed\":42}");
    CHECK_EQUAL(count_of(context, "\"output_tokens\""), usual);
    CHECK(!strchr(run(context, "One two e. f", "{\"max_tokens\":40,\"stop\":[\"e\"]}"), 'e'));
    run(context, "Explain it", "{\"top_k\":50,\"repeat_penalty\":1.15,\"frequency_penalty\":0.1,\"max_tokens\":7}");
    run(context, "Test invalid config", "{\"temperature\":0.8,\"invalid_json");
    run(context, "Hello", "{\"temperature\":5.0,\"top_p\":0.01,\"max_tokens\":4,\"repeat_penalty\":2.0}");
}

SCENARIO(an_answer_is_the_same_for_the_same_seed) {
    char first[4096];
    begin(NULL);
    load("{\"n_predict\":16}");
    const char *config = "{\"temperature\":0.9,\"seed\":7}";
    snprintf(first, sizeof first, "%s", run(open_session("a"), "Tell me of the sea.", config));
    CHECK_TEXT(run(open_session("b"), "Tell me of the sea.", config), first);
}

SCENARIO(wasi_nn_backends_defaults_hold_where_the_host_sets_none) {
    char text[2100], answer[4096];
    uint32_t size = sizeof answer;
    memset(text, 'x', sizeof text);
    text[sizeof text - 1] = 0;
    begin("{\"memory_policy\":{\"context_shifting\":false}}"); /* else the message is shortened */
    load(NULL);
    graph_execution_context context = open_session("a");
    CHECK_EQUAL(try_run(context, text, NULL, answer, &size), prompt_too_long);
    text[600] = 0;
    run(context, text, NULL);
    CHECK_EQUAL(count_of(context, "\"output_tokens\""), 512);
    CHECK_EQUAL(count_of(context, "\"seed\""), 1234);
    run(context, "x", "{\"seed\":7}");
    CHECK_EQUAL(count_of(context, "\"seed\""), 7);
    text[600] = 'x';
    load("{\"model\":{\"ctx_size\":4000,\"n_predict\":600},\"sampling\":{\"seed\":9}}");
    context = open_session("a");
    run(context, text, NULL);
    CHECK_EQUAL(count_of(context, "\"output_tokens\""), 600);
    CHECK_EQUAL(count_of(context, "\"seed\""), 9);
}

SCENARIO(an_answer_beyond_the_buffer_is_too_large_and_not_lost) {
    char answer[64];
    uint32_t size = 8;
    begin(NULL);
    load(NULL);
    graph_execution_context context = open_session("a");
    memset(answer, '#', sizeof answer);
    CHECK_EQUAL(try_run(context, "12345678", NULL, answer, &size), too_large);
    CHECK_EQUAL(size, 9);
    CHECK(answer[0] == '#' && answer[8] == '#');
    CHECK_EQUAL(api.get_output(backend, context, 0, (tensor_data)answer, &size), success);
    CHECK_TEXT(answer, "12345678");
    CHECK_EQUAL(size, 9);
    CHECK(answer[9] == '#');
    CHECK_EQUAL(try_run(context, "12345678", NULL, answer, &size), success);
    size = 1;
    CHECK_EQUAL(try_run(context, "1", NULL, answer, &size), too_large);
    CHECK_EQUAL(size, 2);
}

SCENARIO(set_input_compute_and_get_output_compute) {
    char text[64];
    uint32_t size = sizeof text;
    tensor input = {NULL, u8, (tensor_data) "a raw prompt"};
    begin(NULL);
    load(NULL);
    graph_execution_context context = open_session("a");
    CHECK_EQUAL(api.set_input(backend, context, 0, &input), success);
    CHECK_EQUAL(api.compute(backend, context), success);
    CHECK_EQUAL(api.get_output(backend, context, 0, (tensor_data)text, &size), success);
    CHECK_TEXT(text, "a raw prompt");
}

/* ---- Sessions ---- */

SCENARIO(a_failed_turn_is_described_at_index_1) {
    char answer[64];
    uint32_t size = sizeof answer;
    begin(NULL);
    load(NULL);
    graph_execution_context context = open_session("a");
    run(context, "hi", NULL);
    CHECK(!strstr(metadata(context), "\"error\""));
    CHECK_EQUAL(try_run(context, "hi", "{\"grammar\": \"root ::= (\"}", answer, &size), invalid_argument);
    CHECK(strstr(metadata(context), "\"error\":{\"name\":\"InvalidArgument\""));
    run(context, "hi", NULL);
    CHECK(!strstr(metadata(context), "\"error\""));
}

SCENARIO(a_session_remembers_its_turns) {
    graph_execution_context context = 0, same = 0;
    begin("{\"max_sessions\":10,\"idle_timeout_ms\":600000,\"auto_cleanup\":true}");
    load("{\"ctx_size\":2048,\"n_predict\":16}");
    CHECK_EQUAL(api.init_execution_context(backend, 0, &context), success);
    CHECK_EQUAL(api.init_execution_context(backend, 0, &same), success);
    CHECK_EQUAL(same, context);
    run(context, "Hello, my name is Alice.", NULL);
    long before = count_of(context, "\"input_tokens\"");
    run(context, "What is my name?", NULL);
    CHECK(count_of(context, "\"input_tokens\"") > before + 10);
    graph_execution_context other = open_session("other");
    run(other, "Hello, my name is Alice.", NULL);
    CHECK_EQUAL(count_of(other, "\"input_tokens\""), before);
}

SCENARIO(the_session_that_was_idle_for_longest_makes_room) {
    char answer[64];
    uint32_t size = sizeof answer;
    begin("{\"max_sessions\":3,\"idle_timeout_ms\":100}");
    load(NULL);
    graph_execution_context one = open_session("session_1"), two = open_session("session_2");
    open_session("session_3");
    CHECK_EQUAL(open_session("session_1"), one); /* it is used again */
    graph_execution_context four = open_session("session_4");
    CHECK_EQUAL(try_run(two, "gone", NULL, answer, &size), invalid_argument);
    run(one, "here", NULL);
    run(four, "here", NULL);
    CHECK(open_session("session_2") > four);
}

SCENARIO(without_cleanup_the_maximum_of_sessions_is_an_error) {
    graph_execution_context context = 0;
    begin("{\"backend\":{\"max_sessions\" : 2, \"auto_cleanup\" : false}}");
    load(NULL);
    graph_execution_context one = open_session("no_cleanup_1");
    open_session("no_cleanup_2");
    CHECK_EQUAL(api.init_execution_context_with_session_id(backend, "no_cleanup_3", &context), runtime_error);
    CHECK_EQUAL(context, 0);
    CHECK_EQUAL(api.close_execution_context(backend, one), success);
    CHECK_EQUAL(api.close_execution_context(backend, one), invalid_argument);
    CHECK(open_session("no_cleanup_3") > one);
}

/* The daemon has places for 16 sessions. */
SCENARIO(the_daemons_maximum_of_sessions_makes_room_too) {
    char id[16];
    begin(NULL);
    load(NULL);
    for (int i = 0; i < 20; i++) {
        snprintf(id, sizeof id, "%d", i);
        run(open_session(id), "hello", NULL);
    }
}

/* ---- Models ---- */

SCENARIO(a_failed_switch_changes_nothing_and_another_replaces_the_model) {
    char answer[64];
    uint32_t size = sizeof answer;
    begin(NULL);
    load("{\"n_predict\":9}");
    graph_execution_context context = open_session("a");
    run(context, "Hello", NULL);
    CHECK_EQUAL(try_load("./nonexistent_model.gguf", NULL), model_not_found);
    CHECK_EQUAL(try_load("nothing", NULL), model_not_found);
    run(context, "Still there?", NULL);
    CHECK_EQUAL(try_load(getenv("MODEL_FILE"), "{\"n_predict\":3}"), success);
    CHECK_EQUAL(try_run(context, "gone", NULL, answer, &size), invalid_argument);
    graph_execution_context next = open_session("a");
    CHECK(next != context);
    run(next, "Hello", NULL);
    CHECK_EQUAL(count_of(next, "\"output_tokens\""), 3);
}

SCENARIO(the_memory_policy_decides_whether_full_contexts_are_shifted) {
    const struct {
        const char *config;
        bool shifts;
    } cases[] = {
        {NULL, true},
        {"{\"max_sessions\":", true},
        {"{\"memory_policy\":{\"context_shifting\":\"often\"}}", true},
        {"{\"memory\":{\"context_shifting\":true,\"n_keep_tokens\":8}}", true},
        {"{\"memory_policy\":{\"context_shifting\":false}}", false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        begin(cases[i].config);
        load("{\"ctx_size\":64,\"n_predict\":36}");
        graph_execution_context context = open_session("a");
        char answer[64];
        uint32_t size = sizeof answer;
        try_run(context, "abcdefghijklmnopqrstuvwxyz0123456789", NULL, answer, &size);
        CHECK_EQUAL(count_of(context, "\"shifts\"") > 0, cases[i].shifts);
        CHECK_EQUAL(api.deinit_backend(backend), success);
    }
    begin(NULL);
}

SCENARIO(a_full_conversation_goes_on) {
    begin(NULL);
    load("{\"ctx_size\":160,\"n_predict\":20}");
    graph_execution_context context = open_session("a");
    long drops = 0;
    for (int i = 0; i < 30; i++) {
        char text[64];
        snprintf(text, sizeof text, "Tell me fact number %d about the sea, please.", i);
        char answer[256];
        uint32_t size = sizeof answer;
        CHECK_EQUAL(try_run(context, text, NULL, answer, &size), success);
        drops += count_of(context, "\"dropped_tokens\"") > 0;
        CHECK(count_of(context, "\"input_tokens\"") < 160);
    }
    CHECK(drops > 5);
}

/* ---- Stopping ---- */

SCENARIO(stop_texts_of_the_configuration_hold) {
    begin(NULL);
    load("{\"n_predict\":50,\"stopping\":{\"stop\":[\"!\",\"STOP\"]},\"context_aware\":true,"
         "\"dynamic_timeout\":{\"base_ms\":1000},\"token_conditions\":[{\"token_id\":2}]}");
    CHECK_TEXT(run(open_session("a"), "Hello STOP world", NULL), "Hello ");
    CHECK_TEXT(run(open_session("b"), "one, two", "{\"stop\":[\",\"]}"), "one");
}

/* ---- Errors ---- */

SCENARIO(wrong_arguments_have_wasi_nn_backends_numbers) {
    graph_execution_context context = 0;
    char answer[8];
    uint32_t size = sizeof answer, none = 0;
    tensor empty = {NULL, u8, NULL};
    CHECK_EQUAL(api.init_backend(NULL), invalid_argument);
    CHECK_EQUAL(api.deinit_backend(NULL), invalid_argument);
    begin(NULL);
    CHECK_EQUAL(api.init_execution_context(backend, 0, &context), invalid_argument); /* no model */
    CHECK_EQUAL(api.load(backend, NULL, 5, 0, NULL), unsupported_operation);
    CHECK_EQUAL(api.load_by_name(backend, NULL, 0, NULL), invalid_argument);
    CHECK_EQUAL(api.load_by_name(backend, model, length_of(model), NULL), success);
    CHECK_EQUAL(api.init_execution_context_with_session_id(backend, NULL, &context), invalid_argument);
    CHECK_EQUAL(api.init_execution_context(backend, 0, NULL), invalid_argument);
    CHECK_EQUAL(api.close_execution_context(backend, 12345), invalid_argument);
    CHECK_EQUAL(try_run(12345, "x", NULL, answer, &size), invalid_argument);
    context = open_session("a");
    CHECK_EQUAL(try_run(context, "x", NULL, NULL, &size), invalid_argument);
    CHECK_EQUAL(try_run(context, "x", NULL, answer, &none), invalid_argument);
    CHECK_EQUAL(try_run(context, NULL, NULL, answer, &size), invalid_argument);
    CHECK_EQUAL(api.run_inference(backend, context, 0, &empty, (tensor_data)answer, &size, NULL, 0), invalid_argument);
    CHECK_EQUAL(api.set_input(backend, context, 0, &empty), invalid_argument);
    CHECK_EQUAL(try_run(context, "<img src=\"data:image/png;base64,AAAA\">", NULL, answer, &size), invalid_argument);
    CHECK_EQUAL(api.compute(backend, context), invalid_argument); /* it has no input */
    CHECK_EQUAL(api.get_output(backend, context, 0, NULL, &size), invalid_argument);
    CHECK_EQUAL(api.get_output(backend, context, 2, (tensor_data)answer, &size), not_found);
}

/* INFERD_WASI_NN_TIMEOUT_S is 0.05, and the model slow. */
SCENARIO(a_turn_ends_at_the_timeout_of_the_environment) {
    char answer[64];
    uint32_t size = sizeof answer;
    begin(NULL);
    CHECK_EQUAL(try_load("slow", NULL), success);
    CHECK_EQUAL(try_run(open_session("a"), "a b c d e f g h", NULL, answer, &size), timeout);
}

enum { TURNS = 2 };

static void *compute_turns(void *number) {
    char text[32];
    snprintf(text, sizeof text, "thread %d", *(int *)number);
    for (int i = 0; i < TURNS; i++)
        CHECK_TEXT(run(open_session(text), text, "{\"max_tokens\":40}"), text);
    return NULL;
}

SCENARIO(threads_share_a_backend) {
    begin(NULL);
    load(NULL);
    run_threads(compute_turns);
}

SCENARIO(a_load_after_a_restart_of_the_daemon_connects_again) {
    char answer[64];
    uint32_t size = sizeof answer;
    begin(NULL);
    load(NULL);
    graph_execution_context old = open_session("a");
    wait_for_partner(); /* the daemon is killed */
    CHECK_EQUAL(try_run(old, "lost", NULL, answer, &size), runtime_error);
    CHECK_EQUAL(try_load(model, NULL), runtime_error);
    wait_for_partner(); /* another one has started */
    load(NULL);
    CHECK_TEXT(run(open_session("a"), "again", NULL), "again");
    CHECK_EQUAL(try_run(old, "lost", NULL, answer, &size), invalid_argument);
}

/* Check that each function refuses a backend that does not exist. */
static void check_refused(void *wrong) {
    graph g = 7;
    graph_execution_context context = 7;
    char answer[8];
    uint32_t size = sizeof answer;
    tensor input = {NULL, u8, (tensor_data) "a"};
    const wasi_nn_error errors[] = {
        api.deinit_backend(wrong),
        api.load_by_name(wrong, "echo", 4, &g),
        api.load_by_name_with_config(wrong, "echo", 4, "{}", 2, &g),
        api.init_execution_context(wrong, 0, &context),
        api.init_execution_context_with_session_id(wrong, "a", &context),
        api.close_execution_context(wrong, 1),
        api.run_inference(wrong, 1, 0, &input, (tensor_data)answer, &size, NULL, 0),
        api.set_input(wrong, 1, 0, &input),
        api.compute(wrong, 1),
        api.get_output(wrong, 1, 0, (tensor_data)answer, &size),
    };
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        CHECK_EQUAL(errors[i], invalid_argument);
    CHECK_EQUAL(api.load(wrong, NULL, 5, 0, &g), unsupported_operation);
    CHECK(g == 7 && context == 7 && size == sizeof answer);
}

SCENARIO(a_backend_that_does_not_exist_is_refused_by_each_function) {
    begin(NULL);
    load(NULL);
    open_session("a");
    void *ended = backend;
    CHECK_EQUAL(api.deinit_backend(ended), success);
    check_refused(ended);
    begin(NULL);
    CHECK(backend != ended);
    check_refused(ended);
    check_refused(NULL);
    check_refused(&ended);
    load(NULL);
    CHECK_TEXT(run(open_session("a"), "still works", NULL), "still works");
}

static void use_in_child(void) {
    check_refused(backend);
    begin(NULL);
    load(NULL);
    CHECK_TEXT(run(open_session("a"), "the child's", NULL), "the child's");
    CHECK_EQUAL(api.deinit_backend(backend), success);
}

SCENARIO(a_child_process_has_no_backend_of_its_parent) {
    begin(NULL);
    load(NULL);
    graph_execution_context context = open_session("a");
    run_in_child(use_in_child);
    CHECK_TEXT(run(context, "the parent's", NULL), "the parent's");
}

/* Use the backend until it has ended; thread 0 replaces its model meanwhile. */
static void *use_until_the_end(void *number) {
    wasi_nn_error error;
    do {
        char answer[64];
        uint32_t size = sizeof answer;
        graph_execution_context context = 0;
        if (!api.init_execution_context_with_session_id(backend, "a", &context))
            try_run(context, "a text", NULL, answer, &size);
        error = try_load(*(int *)number ? "nothing" : model, NULL);
    } while (error == success || error == model_not_found);
    CHECK(error == invalid_argument || error == runtime_error);
    return NULL;
}

static void *end_backend(void *number) {
    return api.deinit_backend(backend) ? NULL : number;
}

SCENARIO(a_backend_is_ended_once_while_other_threads_use_it) {
    pthread_t users[THREADS], enders[2];
    int numbers[THREADS];
    void *ended[2] = {NULL};
    begin(NULL);
    load(NULL);
    for (int i = 0; i < THREADS; i++) {
        numbers[i] = i;
        CHECK(!pthread_create(&users[i], NULL, use_until_the_end, &numbers[i]));
    }
    CHECK_EQUAL(try_load("nothing", NULL), model_not_found);
    for (int i = 0; i < 2; i++)
        CHECK(!pthread_create(&enders[i], NULL, end_backend, &numbers[i]));
    for (int i = 0; i < 2; i++)
        CHECK(!pthread_join(enders[i], &ended[i]));
    for (int i = 0; i < THREADS; i++)
        CHECK(!pthread_join(users[i], NULL));
    CHECK(!ended[0] != !ended[1]);
    begin(NULL);
}

#define ENTRY(name) {#name, name}
static const scenario SCENARIOS[] = {
    ENTRY(backends_begin_and_end_with_any_configuration),
    ENTRY(models_load_with_flat_and_nested_configurations),
    ENTRY(inference_answers),
    ENTRY(runtime_parameters_hold_for_their_turn),
    ENTRY(an_answer_is_the_same_for_the_same_seed),
    ENTRY(wasi_nn_backends_defaults_hold_where_the_host_sets_none),
    ENTRY(an_answer_beyond_the_buffer_is_too_large_and_not_lost),
    ENTRY(set_input_compute_and_get_output_compute),
    ENTRY(a_failed_turn_is_described_at_index_1),
    ENTRY(a_session_remembers_its_turns),
    ENTRY(the_session_that_was_idle_for_longest_makes_room),
    ENTRY(without_cleanup_the_maximum_of_sessions_is_an_error),
    ENTRY(the_daemons_maximum_of_sessions_makes_room_too),
    ENTRY(a_failed_switch_changes_nothing_and_another_replaces_the_model),
    ENTRY(the_memory_policy_decides_whether_full_contexts_are_shifted),
    ENTRY(a_full_conversation_goes_on),
    ENTRY(stop_texts_of_the_configuration_hold),
    ENTRY(wrong_arguments_have_wasi_nn_backends_numbers),
    ENTRY(a_turn_ends_at_the_timeout_of_the_environment),
    ENTRY(threads_share_a_backend),
    ENTRY(a_backend_that_does_not_exist_is_refused_by_each_function),
    ENTRY(a_child_process_has_no_backend_of_its_parent),
    ENTRY(a_backend_is_ended_once_while_other_threads_use_it),
    ENTRY(a_load_after_a_restart_of_the_daemon_connects_again),
};

int main(int argc, char **argv) {
    open_library();
    model = getenv("MODEL");
    CHECK(model);
    int status = run_scenario(SCENARIOS, sizeof SCENARIOS / sizeof *SCENARIOS, argc, argv);
    CHECK_EQUAL(api.deinit_backend(backend), success);
    return status;
}
