/* A program that uses the C client against a real daemon; each scenario is a test. */
#include "check.h"
#include "inferd.h"

#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <unistd.h>

/* The model `slow` takes ten seconds for it. */
#define LONG "0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789"

static inferd_client *client;
static inferd_error error;

static inferd_handle load(const char *model, const char *config) {
    inferd_handle graph = 0;
    CHECK_EQUAL(inferd_load(client, model, config, &graph, &error), 0);
    CHECK(graph);
    return graph;
}

static inferd_handle open_context(const char *model, const char *config) {
    inferd_handle context = 0;
    CHECK_EQUAL(inferd_open(client, load(model, config), NULL, &context, &error), 0);
    return context;
}

static void set_prompt(inferd_handle context, const char *text) {
    CHECK_EQUAL(inferd_set_input(client, context, 0, text, strlen(text), &error), 0);
}

/* The output as a text in a buffer that lasts until the next call. */
static const char *output(inferd_handle context, uint32_t index) {
    static char text[1 << 16];
    size_t length = 0;
    CHECK_EQUAL(inferd_get_output(client, context, index, text, sizeof text - 1, &length, &error), 0);
    text[length] = 0;
    return text;
}

SCENARIO(computes_a_turn_and_closes_everything) {
    inferd_handle graph = load("echo", NULL), context = 0;
    CHECK_EQUAL(inferd_open(client, graph, NULL, &context, &error), 0);
    set_prompt(context, "one two three");
    CHECK_EQUAL(inferd_compute(client, context, NULL, &error), 0);
    CHECK_TEXT(output(context, 0), "one two three");
    CHECK(strstr(output(context, 1), "\"input_tokens\""));
    CHECK_EQUAL(inferd_close_context(client, context, 0, &error), 0);
    CHECK_EQUAL(inferd_close_context(client, context, 0, &error), INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_unload(client, graph, &error), 0);
}

SCENARIO(lists_the_models_up_to_the_size_of_the_array) {
    inferd_model models[8];
    size_t count = 0;
    CHECK_EQUAL(inferd_models(client, models, 8, &count, &error), 0);
    CHECK_EQUAL(count, 5);
    bool found = false;
    for (size_t i = 0; i < count; i++)
        found |= !strcmp(models[i].name, "slow") && models[i].state[0];
    CHECK(found);
    models[1].name[0] = '!';
    CHECK_EQUAL(inferd_models(client, models, 1, &count, &error), 0);
    CHECK_EQUAL(count, 5);
    CHECK(models[1].name[0] == '!');
}

SCENARIO(ranks_documents) {
    const char *documents[] = {"one text", "another", "a third", NULL};
    inferd_ranked all[4], best[2];
    size_t found = 9;
    inferd_handle graph = load("rank", NULL);
    CHECK_EQUAL(inferd_rerank(client, graph, "a query", documents, 3, 0, NULL, all, 4, &found, &error), 0);
    CHECK_EQUAL(found, 3);
    CHECK_EQUAL(all[0].index + all[1].index + all[2].index, 3);
    for (int i = 0; i < 3; i++) {
        CHECK(0 < all[i].score && all[i].score < 1 && (all[i].score > 0.5) == (all[i].raw_score > 0));
        CHECK(!i || (all[i].score < all[i - 1].score && all[i].raw_score < all[i - 1].raw_score));
    }
    inferd_turn urgent = {.priority = "high", .timeout_s = 30};
    CHECK_EQUAL(inferd_rerank(client, graph, "a query", documents, 3, 1, &urgent, best, 2, &found, &error), 0);
    CHECK_EQUAL(found, 2);
    CHECK(best[0].index == all[0].index && best[1].index == all[1].index);
    CHECK_EQUAL(inferd_rerank(client, graph, "a query", documents, 0, 0, NULL, all, 4, &found, &error),
                INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_rerank(client, graph, "a query", documents, 4, 0, NULL, all, 4, &found, &error),
                INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_rerank(client, graph, NULL, documents, 3, 0, NULL, all, 4, &found, &error),
                INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_rerank(client, graph, "a query", documents, 3, 0, NULL, NULL, 4, &found, &error),
                INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_rerank(client, load("echo", NULL), "a query", documents, 3, 0, NULL, all, 4, &found, &error),
                INFERD_UNSUPPORTED_OPERATION);
}

/* The number of tokens of the last prompt. */
static int input_tokens(inferd_handle context) {
    const char *tokens = strstr(output(context, 1), "\"input_tokens\":");
    CHECK(tokens);
    return atoi(strchr(tokens, ':') + 1);
}

SCENARIO(a_place_in_a_file_is_filled_in) {
    const char *file = "abyz";
    inferd_extra extra[INFERD_EXTRA_MAX + 1] = {{"a.c", "int x;"}, {NULL, "int y;"}};
    inferd_place place = {.prefix = file, .prefix_length = 2, .suffix = file + 2, .suffix_length = 2};
    inferd_handle context = open_context("slow", NULL);
    inferd_turn turn = {.priority = "high", .timeout_s = 30};
    char text[16];
    size_t length = 0;
    CHECK_EQUAL(inferd_infill(client, context, &place, NULL, NULL, text, 4, &length, &error), INFERD_TOO_LARGE);
    CHECK_EQUAL(length, 5);
    CHECK_TEXT(output(context, 0), "ab|yz");
    int tokens = input_tokens(context);
    place.typed = "c";
    place.extra = extra;
    place.extra_count = 2;
    CHECK_EQUAL(inferd_infill(client, context, &place, "buffer", &turn, text, sizeof text, &length, &error), 0);
    CHECK(length == 6 && !memcmp(text, "abc|yz", 6));
    CHECK(input_tokens(context) > tokens + 13); /* both texts and what is typed */
    place.suffix_first = 1;
    CHECK_EQUAL(inferd_infill(client, context, &place, "", &turn, text, sizeof text, &length, &error), 0);
    CHECK(length == 3 && !memcmp(text, "abc", 3));
    for (size_t i = 0; i <= INFERD_EXTRA_MAX; i++)
        extra[i].text = "";
    place.extra_count = INFERD_EXTRA_MAX;
    CHECK_EQUAL(inferd_infill(client, context, &place, NULL, NULL, text, sizeof text, &length, &error), 0);
    place.extra_count++;
    CHECK_EQUAL(inferd_infill(client, context, &place, NULL, NULL, text, sizeof text, &length, &error),
                INFERD_INVALID_ARGUMENT);
    place.extra_count = 1;
    extra[0].text = NULL;
    CHECK_EQUAL(inferd_infill(client, context, &place, NULL, NULL, text, sizeof text, &length, &error),
                INFERD_INVALID_ARGUMENT);
    place = (inferd_place){.prefix_length = 1};
    CHECK_EQUAL(inferd_infill(client, context, &place, NULL, NULL, text, sizeof text, &length, &error),
                INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_infill(client, context, NULL, NULL, NULL, text, sizeof text, &length, &error),
                INFERD_INVALID_ARGUMENT);
    place.prefix_length = 0;
    CHECK_EQUAL(inferd_infill(client, open_context("echo", NULL), &place, NULL, NULL, text, sizeof text, &length,
                              &error), INFERD_UNSUPPORTED_OPERATION);
    inferd_media media = {.type = "image", .data = "x", .length = 1};
    inferd_call call = {.kind = INFERD_STREAM, .handle = context, .place = &place, .media = &media, .media_count = 1};
    uint64_t request = 0;
    CHECK_EQUAL(inferd_start(client, &call, &request, &error), INFERD_INVALID_ARGUMENT);
}

SCENARIO(a_newer_request_with_the_same_key_supersedes_the_older_one) {
    inferd_place place = {.prefix = LONG, .prefix_length = sizeof LONG - 1};
    inferd_call call = {.kind = INFERD_STREAM, .handle = open_context("slow", NULL), .place = &place,
                        .supersede = "buffer"};
    inferd_handle newer = open_context("slow", NULL);
    inferd_event event;
    uint64_t request = 0;
    char text[16];
    size_t length = 0;
    CHECK_EQUAL(inferd_start(client, &call, &request, &error), 0);
    CHECK_EQUAL(inferd_next_event(client, request, -1, &event, &error), 0);
    CHECK_EQUAL(event.kind, INFERD_EVENT_TEXT);
    CHECK(event.text[0] == '0');
    place = (inferd_place){.prefix = "a", .prefix_length = 1, .suffix = "b", .suffix_length = 1};
    CHECK_EQUAL(inferd_infill(client, newer, &place, "buffer", NULL, text, sizeof text, &length, &error), 0);
    CHECK(length == 3 && !memcmp(text, "a|b", 3));
    do {
        inferd_event_clear(&event);
        CHECK_EQUAL(inferd_next_event(client, request, -1, &event, &error), 0);
    } while (event.kind == INFERD_EVENT_TEXT);
    CHECK_EQUAL(event.kind, INFERD_EVENT_FAILED);
    CHECK_EQUAL(event.error.number, INFERD_CANCELLED);
    CHECK(strstr(event.error.message, "a newer request"));
}

SCENARIO(an_error_has_its_name_numbers_and_hint) {
    inferd_handle graph = 7;
    CHECK_EQUAL(inferd_load(client, "nothing", NULL, &graph, &error), INFERD_MODEL_NOT_FOUND);
    CHECK_EQUAL(graph, 7);
    CHECK_TEXT(error.name, "ModelNotFound");
    CHECK_EQUAL(error.wasi, 103);
    CHECK(strstr(error.message, "nothing") && error.hint[0] && !error.retryable);
    CHECK_EQUAL(inferd_load(client, "echo", "{", &graph, &error), INFERD_INVALID_ENCODING);
    CHECK_EQUAL(inferd_load(client, NULL, NULL, &graph, &error), INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_load(client, "echo", NULL, &graph, NULL), 0);
    CHECK_EQUAL(inferd_load_file(client, "/nothing.gguf", NULL, &graph, &error), INFERD_MODEL_NOT_FOUND);
}

SCENARIO(pulls_tokens_until_the_end_and_ends_a_turn_early) {
    inferd_handle context = open_context("echo", NULL);
    char text[256] = "", piece[64], again[64];
    size_t length = 0;
    int number;
    set_prompt(context, "one two three");
    while (!(number = inferd_compute_single(client, context, NULL, piece, sizeof piece, &length, &error))) {
        size_t same = 0;
        CHECK_EQUAL(inferd_get_output_single(client, context, 0, again, sizeof again, &same, &error), 0);
        CHECK(same == length && !memcmp(piece, again, length));
        strncat(text, piece, length);
    }
    CHECK_EQUAL(number, INFERD_END_OF_SEQUENCE);
    CHECK_TEXT(text, "one two three");
    CHECK_EQUAL(inferd_compute_single(client, context, NULL, piece, sizeof piece, &length, &error), 0);
    CHECK_EQUAL(inferd_fini_single(client, context, &error), 0);
    CHECK_TEXT(output(context, 0), "");
    CHECK_EQUAL(inferd_compute(client, context, NULL, &error), 0);
    CHECK_TEXT(output(context, 0), "one two three");
}

SCENARIO(a_buffer_is_filled_to_its_last_byte_and_never_beyond) {
    inferd_handle context = open_context("echo", NULL);
    char buffer[8] = "#######";
    size_t length = 99;
    set_prompt(context, "12345");
    CHECK_EQUAL(inferd_compute(client, context, NULL, &error), 0);
    CHECK_EQUAL(inferd_get_output(client, context, 0, buffer, 4, &length, &error), INFERD_TOO_LARGE);
    CHECK_EQUAL(length, 5);
    CHECK_EQUAL(error.needed, 5);
    CHECK_EQUAL(inferd_get_output(client, context, 0, NULL, 0, &length, &error), INFERD_TOO_LARGE);
    CHECK_EQUAL(length, 5);
    CHECK_TEXT(buffer, "#######");
    CHECK_EQUAL(inferd_get_output(client, context, 0, buffer, 5, &length, &error), 0);
    CHECK_TEXT(buffer, "12345##");
    CHECK_EQUAL(inferd_run_inference(client, context, "abcdef", 6, NULL, NULL, buffer, 5, &length, &error),
                INFERD_TOO_LARGE);
    CHECK_EQUAL(length, 6);
    CHECK_TEXT(output(context, 0), "abcdef");
}

SCENARIO(parameters_hold_for_their_turn_context_or_graph) {
    char text[64];
    size_t length = 0;
    inferd_handle context = open_context("echo", "{\"n-predict\": 2}");
    set_prompt(context, "one two three");
    CHECK_EQUAL(inferd_compute(client, context, NULL, &error), 0);
    CHECK_TEXT(output(context, 0), "on");
    CHECK_EQUAL(inferd_set_input(client, context, 1, "{\"n-predict\": 1}", 16, &error), 0);
    CHECK_EQUAL(inferd_compute(client, context, NULL, &error), 0);
    CHECK_TEXT(output(context, 0), "o");
    CHECK_EQUAL(inferd_run_inference(client, context, "a b c d", 7, "{\"n_predict\": 3}", NULL, text, sizeof text,
                                     &length, &error), 0);
    CHECK_EQUAL(length, 3);
    CHECK(!memcmp(text, "a b", 3));
}

SCENARIO(a_context_size_that_does_not_hold_is_reported_as_a_whole_number) {
    inferd_handle context = open_context("echo", "{\"ctx-size\": 16.0}");
    CHECK_EQUAL(inferd_set_input(client, context, 1, "{\"ctx-size\": 100000.0}", 22, &error), 0);
    CHECK(strstr(output(context, 1), "\"not_applied\":{\"ctx-size\":16}"));
    set_prompt(context, LONG);
    CHECK_EQUAL(inferd_compute(client, context, NULL, &error), INFERD_PROMPT_TOO_LONG);
    CHECK(strstr(error.message, "the context holds 15 and one for the answer"));
}

SCENARIO(a_session_with_an_id_outlives_its_connection) {
    inferd_handle graph = load("echo", NULL), context = 0;
    CHECK_EQUAL(inferd_open(client, graph, "c-session", &context, &error), 0);
    set_prompt(context, "kept words");
    CHECK_EQUAL(inferd_compute(client, context, NULL, &error), 0);
    CHECK_EQUAL(inferd_close_context(client, context, 1, &error), 0);
    inferd_close(client);
    CHECK_EQUAL(inferd_connect(NULL, &client, &error), 0);
    CHECK_EQUAL(inferd_open(client, load("echo", NULL), "c-session", &context, &error), 0);
    CHECK_EQUAL(inferd_set_input(client, context, 1, "{\"append\": true}", 16, &error), 0);
    set_prompt(context, "more");
    CHECK_EQUAL(inferd_compute(client, context, NULL, &error), 0);
    const char *tokens = strstr(output(context, 1), "\"input_tokens\":");
    CHECK(tokens && atoi(strchr(tokens, ':') + 1) > 20); /* the history's and the new ones */
    CHECK_EQUAL(inferd_close_context(client, context, 0, &error), 0);
}

/* Open the session "same" with a client of its own; return the error's number. */
static int open_as(inferd_options options, inferd_client **own, inferd_handle *context) {
    inferd_handle graph = 0;
    int number = inferd_connect(&options, own, &error);
    if (!number)
        number = inferd_load(*own, "echo", NULL, &graph, &error);
    return number ? number : inferd_open(*own, graph, "same", context, &error);
}

SCENARIO(a_label_or_a_named_user_has_sessions_of_its_own) {
    static const struct {
        inferd_options options;
        int number;
    } CASES[] = {
        {{.label = "one"}, 0},
        {{.label = "one"}, INFERD_SESSION_BUSY},
        {{.label = "two"}, 0},
        {{.label = "one", .on_behalf_of = "@ada"}, 0},
        {{.label = "no spaces"}, INFERD_INVALID_ARGUMENT},
    };
    enum { COUNT = sizeof CASES / sizeof *CASES };
    inferd_client *own[COUNT] = {NULL};
    inferd_handle contexts[COUNT] = {0};
    for (int i = 0; i < COUNT; i++)
        CHECK_EQUAL(open_as(CASES[i].options, &own[i], &contexts[i]), CASES[i].number);
    CHECK(strstr(error.message, "label"));
    for (int i = 0; i < COUNT; i++) {
        if (contexts[i])
            CHECK_EQUAL(inferd_close_context(own[i], contexts[i], 0, &error), 0);
        inferd_close(own[i]);
    }
}

SCENARIO(a_prompt_larger_than_a_frame_travels_in_a_memfd) {
    inferd_handle context = open_context("echo", NULL);
    size_t size = 2 << 20;
    char *prompt = malloc(size);
    CHECK(prompt);
    memset(prompt, 'x', size);
    int number = inferd_set_input(client, context, 0, prompt, size, &error);
    if (!number)
        number = inferd_compute(client, context, NULL, &error);
    CHECK_EQUAL(number, INFERD_PROMPT_TOO_LONG);
    inferd_call call = {.kind = INFERD_STREAM, .handle = context, .data = prompt, .length = size};
    uint64_t request = 0;
    CHECK_EQUAL(inferd_start(client, &call, &request, &error), INFERD_TOO_LARGE);
    CHECK_EQUAL(request, 0);
    free(prompt);
    set_prompt(context, "still works");
    CHECK_EQUAL(inferd_compute(client, context, NULL, &error), 0);
}

SCENARIO(a_frame_larger_than_the_sockets_buffer_is_sent_in_parts) {
    inferd_handle context = open_context("echo", "{\"n-predict\": 1}");
    size_t size = 1000 << 10; /* with the rest of its frame just below the bound of frames */
    char *prompt = malloc(size);
    CHECK(prompt);
    memset(prompt, 'x', size);
    int number = inferd_set_input(client, context, 0, prompt, size, &error);
    if (!number)
        number = inferd_compute(client, context, NULL, &error);
    CHECK_EQUAL(number, INFERD_PROMPT_TOO_LONG);
    CHECK_EQUAL(inferd_set_input(client, context, 0, prompt, 4000, &error), 0);
    CHECK_EQUAL(inferd_compute(client, context, NULL, &error), 0);
    free(prompt);
}

/* An image of one pixel. */
static const unsigned char PNG[] = {
    0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a, 0x00, 0x00, 0x00, 0x0d, 0x49, 0x48, 0x44, 0x52, 0x00, 0x00,
    0x00, 0x01, 0x00, 0x00, 0x00, 0x01, 0x08, 0x02, 0x00, 0x00, 0x00, 0x90, 0x77, 0x53, 0xde, 0x00, 0x00, 0x00,
    0x0c, 0x49, 0x44, 0x41, 0x54, 0x78, 0x9c, 0x63, 0xf8, 0xcf, 0xc0, 0x00, 0x00, 0x03, 0x01, 0x01, 0x00, 0xc9,
    0xfe, 0x92, 0xef, 0x00, 0x00, 0x00, 0x00, 0x49, 0x45, 0x4e, 0x44, 0xae, 0x42, 0x60, 0x82};

/* Return the number of the error with which a turn with images ends, or 0. */
static int ask_about(inferd_handle context, const inferd_media *media, size_t count) {
    inferd_call call = {.kind = INFERD_STREAM, .handle = context, .data = "What?", .length = 5,
                        .media = media, .media_count = count};
    uint64_t request = 0;
    int number = inferd_start(client, &call, &request, &error);
    while (!number) {
        inferd_event event;
        CHECK_EQUAL(inferd_next_event(client, request, 20000, &event, &error), 0);
        inferd_event_kind kind = event.kind;
        number = event.error.number;
        inferd_event_clear(&event);
        CHECK(kind != INFERD_EVENT_NONE);
        if (kind == INFERD_EVENT_END)
            return 0;
        if (kind == INFERD_EVENT_FAILED)
            return number;
    }
    return number;
}

SCENARIO(images_travel_within_the_frame_in_memfds_and_in_descriptors) {
    inferd_handle context = open_context("eyes", "{\"n-predict\": 4}");
    size_t size = 100 << 10;
    unsigned char *large = calloc(1, size);
    FILE *file = tmpfile();
    CHECK(large && file);
    memcpy(large, PNG, sizeof PNG);
    CHECK(fwrite(PNG, 1, sizeof PNG, file) == sizeof PNG && !fflush(file));
    inferd_media media[INFERD_MEDIA_MAX + 1] = {
        {.type = "image", .data = PNG, .length = sizeof PNG, .tokens_max = 70, .alt = "a dot"},
        {.type = "image", .data = large, .length = size},
        {.type = "image", .fd = fileno(file)},
    };
    CHECK_EQUAL(ask_about(context, media, 3), 0);
    for (size_t i = 0; i < INFERD_MEDIA_MAX + 1; i++)
        media[i] = (inferd_media){.type = "image", .data = PNG, .length = sizeof PNG};
    CHECK_EQUAL(ask_about(context, media, INFERD_MEDIA_MAX), 0);
    CHECK_EQUAL(ask_about(context, media, INFERD_MEDIA_MAX + 1), INFERD_TOO_LARGE);
    for (size_t i = 0; i < 17; i++)
        media[i] = (inferd_media){.type = "image", .fd = fileno(file)};
    CHECK_EQUAL(ask_about(context, media, 16), 0);
    CHECK_EQUAL(ask_about(context, media, 17), INFERD_TOO_LARGE);
    media[1].fd = -1;
    CHECK_EQUAL(ask_about(context, media, 2), INFERD_INVALID_ARGUMENT);
    media[1] = (inferd_media){.data = PNG, .length = sizeof PNG};
    CHECK_EQUAL(ask_about(context, media, 2), INFERD_INVALID_ARGUMENT); /* without a type */
    media[1] = (inferd_media){.type = "image", .data = "no image", .length = 8};
    CHECK_EQUAL(ask_about(context, media, 2), INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(ask_about(context, media, 1), 0); /* no descriptor of a refused call is left */
    CHECK_EQUAL(ask_about(open_context("echo", NULL), media, 1), INFERD_UNSUPPORTED_OPERATION);
    inferd_call raw = {.kind = INFERD_STREAM, .handle = context, .data = "x", .length = 1, .raw = 1,
                       .media = media, .media_count = 1};
    uint64_t request;
    CHECK_EQUAL(inferd_start(client, &raw, &request, &error), INFERD_INVALID_ARGUMENT);
    fclose(file);
    free(large);
}

/* Take the stream's events by polling, as a program with an event loop does; return its text. */
static void stream_by_polling(uint64_t request, char *text, size_t size, inferd_event *last) {
    size_t length = 0;
    for (;;) {
        struct pollfd polled = {inferd_fd(client), inferd_poll_events(client), 0};
        CHECK(poll(&polled, 1, 20000) == 1);
        CHECK_EQUAL(inferd_process(client, &error), 0);
        for (;;) {
            CHECK_EQUAL(inferd_next_event(client, request, 0, last, &error), 0);
            if (last->kind == INFERD_EVENT_NONE)
                break;
            CHECK(length + last->length < size);
            if (last->length)
                memcpy(text + length, last->text, last->length);
            length += last->length;
            text[length] = 0;
            inferd_event event = *last;
            free(event.text);
            last->text = NULL;
            if (last->kind != INFERD_EVENT_TEXT)
                return;
        }
    }
}

SCENARIO(streams_more_events_than_its_credit_without_blocking) {
    char prompt[2000] = "", text[2000] = "";
    inferd_handle context = open_context("echo", NULL);
    for (int i = 0; i < 300; i++)
        strcat(prompt, i ? " word" : "word");
    inferd_call call = {.kind = INFERD_STREAM, .handle = context, .data = prompt, .length = strlen(prompt), .raw = 1};
    uint64_t request = 0;
    inferd_event last;
    CHECK_EQUAL(inferd_start(client, &call, &request, &error), 0);
    stream_by_polling(request, text, sizeof text, &last);
    CHECK_EQUAL(last.kind, INFERD_EVENT_END);
    CHECK_TEXT(text, prompt);
    CHECK_TEXT(last.stop_reason, "eos");
    CHECK_EQUAL(inferd_next_event(client, request, -1, &last, &error), 0);
    CHECK_EQUAL(last.kind, INFERD_EVENT_NONE);
}

SCENARIO(every_call_can_be_started_without_waiting) {
    inferd_event event;
    uint64_t request = 0;
    inferd_call call = {.kind = INFERD_LOAD, .name = "echo"};
    CHECK_EQUAL(inferd_start(client, &call, &request, &error), 0);
    CHECK_EQUAL(inferd_next_event(client, request, -1, &event, &error), 0);
    CHECK_EQUAL(event.kind, INFERD_EVENT_END);
    call = (inferd_call){.kind = INFERD_OPEN, .handle = event.handle};
    CHECK_EQUAL(inferd_start(client, &call, &request, &error), 0);
    CHECK_EQUAL(inferd_next_event(client, 0, -1, &event, &error), 0);
    CHECK_EQUAL(event.kind, INFERD_EVENT_END);
    CHECK(event.request == request && event.handle);
    call = (inferd_call){.kind = INFERD_COMPUTE, .handle = event.handle};
    CHECK_EQUAL(inferd_start(client, &call, &request, &error), 0);
    CHECK_EQUAL(inferd_next_event(client, 0, -1, &event, &error), 0);
    CHECK_EQUAL(event.kind, INFERD_EVENT_FAILED);
    CHECK_EQUAL(event.error.number, INFERD_INVALID_ARGUMENT);
}

static void *cancel_other(void *context) {
    int cancelled = 0;
    while (!cancelled)
        CHECK_EQUAL(inferd_cancel(client, *(inferd_handle *)context, &cancelled, NULL), 0);
    return NULL;
}

SCENARIO(another_thread_cancels_a_call_that_waits) {
    inferd_handle context = open_context("slow", NULL);
    pthread_t thread;
    set_prompt(context, LONG);
    CHECK(!pthread_create(&thread, NULL, cancel_other, &context));
    CHECK_EQUAL(inferd_compute(client, context, NULL, &error), INFERD_CANCELLED);
    CHECK(!pthread_join(thread, NULL));
}

SCENARIO(a_started_request_is_cancelled_by_its_id) {
    inferd_handle context = open_context("slow", NULL);
    inferd_call call = {.kind = INFERD_STREAM, .handle = context, .data = LONG, .length = sizeof LONG - 1, .raw = 1};
    uint64_t request = 0;
    inferd_event event;
    CHECK_EQUAL(inferd_start(client, &call, &request, &error), 0);
    CHECK_EQUAL(inferd_next_event(client, request, -1, &event, &error), 0);
    CHECK_EQUAL(event.kind, INFERD_EVENT_TEXT);
    inferd_event_clear(&event);
    CHECK_EQUAL(inferd_cancel_request(client, request, &error), 0);
    do {
        inferd_event_clear(&event);
        CHECK_EQUAL(inferd_next_event(client, request, -1, &event, &error), 0);
    } while (event.kind == INFERD_EVENT_TEXT);
    CHECK_EQUAL(event.kind, INFERD_EVENT_FAILED);
    CHECK_EQUAL(event.error.number, INFERD_CANCELLED);
    CHECK_EQUAL(inferd_cancel_request(client, request, &error), INFERD_INVALID_ARGUMENT);
}

SCENARIO(the_reasoning_of_a_running_turn_is_ended) {
    static const char thought[] = "<think>0123456789012345678901234567890123456789012345678901234567890123456789"
                                  "012345678901234567890123456789012345678901234567890123</think>The answer.";
    inferd_handle context = open_context("slow", "{\"reasoning-format\": \"deepseek\"}");
    inferd_call call = {.kind = INFERD_STREAM, .handle = context, .data = thought, .length = sizeof thought - 1};
    uint64_t request = 0;
    inferd_event event;
    int ended = 7, times = 0;
    CHECK_EQUAL(inferd_end_reasoning(client, context, &ended, &error), 0);
    CHECK_EQUAL(ended, 0);
    CHECK_EQUAL(inferd_start(client, &call, &request, &error), 0);
    while (!ended) {
        CHECK_EQUAL(inferd_end_reasoning(client, context, &ended, &error), 0);
        times++;
    }
    CHECK(ended == 1 && times);
    CHECK_EQUAL(inferd_end_reasoning(client, context, NULL, NULL), 0);
    do
        CHECK_EQUAL(inferd_next_event(client, request, -1, &event, &error), 0);
    while (event.kind == INFERD_EVENT_TEXT && (inferd_event_clear(&event), 1));
    CHECK_EQUAL(event.kind, INFERD_EVENT_END);
    inferd_event_clear(&event);
    CHECK(strstr(output(context, 1), "\"reasoning_tokens\":"));
    CHECK_EQUAL(inferd_end_reasoning(client, context, &ended, &error), 0);
    CHECK_EQUAL(ended, 0);
    call = (inferd_call){.kind = INFERD_END_REASONING, .handle = context};
    CHECK_EQUAL(inferd_start(client, &call, &request, &error), 0);
    CHECK_EQUAL(inferd_next_event(client, request, -1, &event, &error), 0);
    CHECK(event.kind == INFERD_EVENT_END && !event.handle);
}

SCENARIO(a_turn_ends_at_its_own_timeout) {
    inferd_handle context = open_context("slow", NULL);
    inferd_turn turn = {.priority = "low", .timeout_s = 0.05};
    set_prompt(context, LONG);
    CHECK_EQUAL(inferd_compute(client, context, &turn, &error), INFERD_TIMEOUT);
    turn.priority = "none";
    CHECK_EQUAL(inferd_compute(client, context, &turn, &error), INFERD_INVALID_ARGUMENT);
}

SCENARIO(the_requests_of_a_connection_are_bounded) {
    inferd_handle context = open_context("slow", NULL);
    inferd_call call = {.kind = INFERD_STREAM, .handle = context, .data = LONG, .length = sizeof LONG - 1};
    inferd_call other = {.kind = INFERD_GET_OUTPUT, .handle = context};
    uint64_t request = 0;
    CHECK_EQUAL(inferd_start(client, &call, &request, &error), 0);
    for (int i = 0; i < 255; i++)
        CHECK_EQUAL(inferd_start(client, &other, &request, &error), 0);
    CHECK_EQUAL(inferd_start(client, &other, &request, &error), INFERD_BUSY);
    CHECK(error.retryable);
    inferd_event event;
    CHECK_EQUAL(inferd_next_event(client, request, -1, &event, &error), 0);
    inferd_event_clear(&event);
    CHECK_EQUAL(inferd_start(client, &other, &request, &error), 0);
}

enum { THREADS = 8, TURNS = 20 };

static void *compute_turns(void *number) {
    char prompt[32], text[32];
    size_t length = 0;
    inferd_handle graph = 0, context = 0;
    snprintf(prompt, sizeof prompt, "thread %d", *(int *)number);
    CHECK_EQUAL(inferd_load(client, "echo", NULL, &graph, NULL), 0);
    CHECK_EQUAL(inferd_open(client, graph, NULL, &context, NULL), 0);
    for (int i = 0; i < TURNS; i++) {
        CHECK_EQUAL(inferd_set_input(client, context, 0, prompt, strlen(prompt), NULL), 0);
        CHECK_EQUAL(inferd_compute(client, context, NULL, NULL), 0);
        CHECK_EQUAL(inferd_get_output(client, context, 0, text, sizeof text - 1, &length, NULL), 0);
        text[length] = 0;
        CHECK_TEXT(text, prompt);
    }
    CHECK_EQUAL(inferd_close_context(client, context, 0, NULL), 0);
    return NULL;
}

SCENARIO(threads_share_a_client) {
    pthread_t threads[THREADS];
    int numbers[THREADS];
    for (int i = 0; i < THREADS; i++) {
        numbers[i] = i;
        CHECK(!pthread_create(&threads[i], NULL, compute_turns, &numbers[i]));
    }
    for (int i = 0; i < THREADS; i++)
        CHECK(!pthread_join(threads[i], NULL));
}

enum { CLIENTS = 100 };

static void *connect_once(void *unused) {
    inferd_client *own = NULL;
    inferd_handle graph = 0;
    (void)unused;
    CHECK_EQUAL(inferd_connect(NULL, &own, NULL), 0);
    CHECK_EQUAL(inferd_load(own, "echo", NULL, &graph, NULL), 0);
    inferd_close(own);
    return NULL;
}

SCENARIO(a_hundred_clients_connect_at_once) {
    pthread_t threads[CLIENTS];
    for (int i = 0; i < CLIENTS; i++)
        CHECK(!pthread_create(&threads[i], NULL, connect_once, NULL));
    for (int i = 0; i < CLIENTS; i++)
        CHECK(!pthread_join(threads[i], NULL));
}

SCENARIO(a_file_is_loaded_by_its_descriptor) {
    inferd_handle graph = 0, context = 0;
    CHECK_EQUAL(inferd_load_file(client, getenv("MODEL_FILE"), "{\"n-predict\": 4, \"temp\": 0}", &graph, &error), 0);
    CHECK_EQUAL(inferd_open(client, graph, NULL, &context, &error), 0);
    set_prompt(context, "Once upon a time");
    CHECK_EQUAL(inferd_compute(client, context, NULL, &error), 0);
    CHECK(output(context, 0)[0]);
    CHECK(strstr(output(context, 1), "\"output_tokens\":4"));
}

/* The bytes of a file of the test, which the program frees. */
static inferd_builder file_of(const char *variable) {
    FILE *file = fopen(getenv(variable), "rb");
    CHECK(file);
    static char part[1 << 16];
    char *data = NULL;
    size_t length = 0, read;
    while ((read = fread(part, 1, sizeof part, file))) {
        data = realloc(data, length + read);
        CHECK(data);
        memcpy(data + length, part, read);
        length += read;
    }
    fclose(file);
    return (inferd_builder){data, length};
}

/* Twice `a` and `b` by a graph with the fp32 inputs a and b of [n, 2]. */
static void compute_affine(inferd_handle graph) {
    inferd_handle context = 0;
    float a[2] = {1, 2}, b[2] = {10, 20}, y[2] = {0};
    uint32_t shape[2] = {1, 2};
    size_t length = 0;
    CHECK_EQUAL(inferd_open(client, graph, NULL, &context, &error), 0);
    CHECK_EQUAL(inferd_set_tensor(client, context, 0, a, sizeof a, shape, 2, "fp32", &error), 0);
    CHECK_EQUAL(inferd_set_tensor(client, context, 1, b, sizeof b, shape, 1, "fp32", &error), INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_set_tensor(client, context, 0, b, sizeof b, shape, 2, NULL, &error), INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_set_tensor(client, context, 1, b, sizeof b, NULL, 2, "fp32", &error), INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_set_tensor(client, context, 1, b, sizeof b, shape, 33, "fp32", &error), INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_set_tensor(client, context, 1, b, sizeof b, shape, 2, "fp32", &error), 0);
    CHECK_EQUAL(inferd_compute(client, context, NULL, &error), 0);
    CHECK_EQUAL(inferd_get_output(client, context, 0, y, sizeof y, &length, &error), 0);
    CHECK_EQUAL(length, sizeof y);
    CHECK(y[0] == 12 && y[1] == 24);
    CHECK_EQUAL(inferd_close_context(client, context, 0, &error), 0);
}

SCENARIO(graphs_are_loaded_from_one_builder_or_two) {
    inferd_builder xml_and_weights[2] = {file_of("XML_FILE"), file_of("WEIGHTS_FILE")}, onnx = file_of("ONNX_FILE");
    const char *encodings[] = {"openvino", NULL};
    inferd_handle graph = 0;
    for (size_t i = 0; i < 2; i++) {
        CHECK_EQUAL(inferd_load_builders(client, xml_and_weights, 2, encodings[i], NULL, &graph, &error), 0);
        compute_affine(graph);
        CHECK_EQUAL(inferd_unload(client, graph, &error), 0);
    }
    CHECK_EQUAL(inferd_load_builders(client, &onnx, 1, "onnx", NULL, &graph, &error), 0);
    compute_affine(graph);
    inferd_call call = {.kind = INFERD_LOAD_BUILDERS, .builders = xml_and_weights, .builder_count = 2};
    uint64_t request = 0;
    inferd_event event;
    CHECK_EQUAL(inferd_start(client, &call, &request, &error), 0);
    CHECK_EQUAL(inferd_next_event(client, request, -1, &event, &error), 0);
    CHECK_EQUAL(event.kind, INFERD_EVENT_END);
    compute_affine(event.handle);
    inferd_event_clear(&event);
    /* The weights are missing, or belong to another encoding. */
    CHECK_EQUAL(inferd_load_builders(client, xml_and_weights, 1, "openvino", NULL, &graph, &error), INFERD_LOAD_FAILED);
    CHECK(strstr(error.message, "OpenVINO"));
    inferd_builder wrong[2] = {onnx, xml_and_weights[1]};
    CHECK_EQUAL(inferd_load_builders(client, wrong, 2, "onnx", NULL, &graph, &error), INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_load_builders(client, wrong, 0, NULL, NULL, &graph, &error), INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_load_builders(client, wrong, 3, NULL, NULL, &graph, &error), INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_load_builders(client, NULL, 1, NULL, NULL, &graph, &error), INFERD_INVALID_ARGUMENT);
    wrong[1].data = NULL;
    CHECK_EQUAL(inferd_load_builders(client, wrong, 2, NULL, NULL, &graph, &error), INFERD_INVALID_ARGUMENT);
    for (size_t i = 0; i < 2; i++)
        free((void *)(uintptr_t)xml_and_weights[i].data);
    free((void *)(uintptr_t)onnx.data);
}

SCENARIO(a_split_model_is_loaded_by_the_path_of_a_part) {
    inferd_handle graph = 0, context = 0;
    char *path = getenv("PART_FILE"), *name = strrchr(path, '/');
    CHECK_EQUAL(inferd_load_file(client, path, "{\"n-predict\": 4, \"temp\": 0}", &graph, &error), 0);
    CHECK_EQUAL(inferd_open(client, graph, NULL, &context, &error), 0);
    set_prompt(context, "Once upon a time");
    CHECK_EQUAL(inferd_compute(client, context, NULL, &error), 0);
    CHECK(strstr(output(context, 1), "\"output_tokens\":4"));
    CHECK_EQUAL(inferd_load_file(client, "/tmp/none-00001-of-00003.gguf", NULL, &graph, &error), INFERD_MODEL_NOT_FOUND);
    *name++ = 0;
    CHECK(!chdir(path));
    CHECK_EQUAL(inferd_load_file(client, name, NULL, &graph, &error), 0);
}

/* Check that each function refuses a client that does not exist. */
static void check_refused(inferd_client *wrong) {
    inferd_call call = {.kind = INFERD_MODELS};
    inferd_place place = {0};
    inferd_event event;
    inferd_handle handle = 7;
    inferd_model model;
    uint64_t request = 7;
    size_t length = 7;
    int cancelled = 7;
    char text[8];
    const int numbers[] = {
        inferd_close(wrong),
        inferd_models(wrong, &model, 1, &length, &error),
        inferd_rerank(wrong, 1, "a", (const char *[]){"b"}, 1, 0, NULL, NULL, 0, &length, &error),
        inferd_infill(wrong, 1, &place, NULL, NULL, text, sizeof text, &length, &error),
        inferd_init_backend(wrong, NULL, &error),
        inferd_load(wrong, "echo", NULL, &handle, &error),
        inferd_load_file(wrong, "/dev/null", NULL, &handle, &error),
        inferd_load_builders(wrong, &(inferd_builder){"a", 1}, 1, NULL, NULL, &handle, &error),
        inferd_unload(wrong, 1, &error),
        inferd_open(wrong, 1, NULL, &handle, &error),
        inferd_set_input(wrong, 1, 0, "a", 1, &error),
        inferd_set_tensor(wrong, 1, 0, "a", 1, &(uint32_t){1}, 1, NULL, &error),
        inferd_compute(wrong, 1, NULL, &error),
        inferd_compute_single(wrong, 1, NULL, text, sizeof text, &length, &error),
        inferd_fini_single(wrong, 1, &error),
        inferd_get_output(wrong, 1, 0, text, sizeof text, &length, &error),
        inferd_get_output_single(wrong, 1, 0, text, sizeof text, &length, &error),
        inferd_run_inference(wrong, 1, "a", 1, NULL, NULL, text, sizeof text, &length, &error),
        inferd_cancel(wrong, 1, &cancelled, &error),
        inferd_end_reasoning(wrong, 1, &cancelled, &error),
        inferd_close_context(wrong, 1, 0, &error),
        inferd_start(wrong, &call, &request, &error),
        inferd_next_event(wrong, 1, -1, &event, &error),
        inferd_cancel_request(wrong, 1, &error),
        inferd_process(wrong, &error),
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        CHECK_EQUAL(numbers[i], INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_fd(wrong), -1);
    CHECK_EQUAL(inferd_poll_events(wrong), 0);
    CHECK(error.number == INFERD_INVALID_ARGUMENT && error.hint[0]);
    CHECK(handle == 7 && request == 7 && length == 7 && cancelled == 7 && event.kind == INFERD_EVENT_NONE);
}

SCENARIO(a_client_that_does_not_exist_is_refused_by_each_function) {
    inferd_client *closed = client;
    CHECK_EQUAL(inferd_close(closed), 0);
    CHECK_EQUAL(inferd_connect(NULL, &client, &error), 0);
    CHECK(client != closed);
    check_refused(closed);
    check_refused(NULL);
    check_refused((inferd_client *)&closed);
    CHECK_EQUAL(inferd_set_input(client, open_context("echo", NULL), 0, "a", 1, &error), 0);
}

SCENARIO(a_result_without_a_place_is_refused) {
    inferd_call call = {.kind = INFERD_MODELS};
    inferd_handle context = open_context("echo", NULL);
    inferd_model model;
    uint64_t request;
    size_t count = 0;
    set_prompt(context, "text");
    CHECK_EQUAL(inferd_connect(NULL, NULL, &error), INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_models(client, &model, 1, NULL, &error), INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_models(client, NULL, 1, &count, &error), INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_models(client, NULL, 0, &count, &error), 0);
    CHECK_EQUAL(count, 5);
    CHECK_EQUAL(inferd_load(client, "echo", NULL, NULL, &error), INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_load_file(client, "/dev/null", NULL, NULL, &error), INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_load_file(client, NULL, NULL, NULL, &error), INFERD_MODEL_NOT_FOUND);
    CHECK_EQUAL(inferd_open(client, 1, NULL, NULL, &error), INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_set_input(client, context, 0, NULL, 1, &error), INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_compute_single(client, context, NULL, NULL, 1, NULL, &error), INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_compute(client, context, NULL, NULL), 0);
    CHECK_EQUAL(inferd_get_output(client, context, 0, NULL, 8, NULL, &error), INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_get_output_single(client, context, 0, NULL, 8, NULL, NULL), INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_run_inference(client, context, "a", 1, NULL, NULL, NULL, 1, NULL, &error),
                INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_cancel(client, context, NULL, &error), 0);
    CHECK_EQUAL(inferd_start(client, NULL, &request, &error), INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_start(client, &call, NULL, &error), INFERD_INVALID_ARGUMENT);
    CHECK_EQUAL(inferd_next_event(client, 0, 0, NULL, &error), INFERD_INVALID_ARGUMENT);
    inferd_event_clear(NULL);
    CHECK_TEXT(output(context, 0), "text");
}

static void use_in_child(void) {
    inferd_client *parents = client;
    check_refused(parents);
    CHECK_EQUAL(inferd_connect(NULL, &client, &error), 0);
    check_refused(parents);
    set_prompt(open_context("echo", NULL), "the child's");
    CHECK_EQUAL(inferd_close(client), 0);
}

SCENARIO(a_child_process_has_no_client_of_its_parent) {
    inferd_handle context = open_context("echo", NULL);
    run_in_child(use_in_child);
    set_prompt(context, "the parent's");
    CHECK_EQUAL(inferd_compute(client, context, NULL, &error), 0);
    CHECK_TEXT(output(context, 0), "the parent's");
}

static void *compute_until_an_error(void *context) {
    int number = INFERD_OK;
    while (!number)
        number = inferd_compute(client, *(inferd_handle *)context, NULL, NULL);
    CHECK(number == INFERD_CONNECTION_LOST || number == INFERD_INVALID_ARGUMENT);
    return NULL;
}

static void *close_client(void *unused) {
    (void)unused;
    return inferd_close(client) ? NULL : client;
}

SCENARIO(a_client_is_closed_once_while_other_threads_use_it) {
    enum { COUNT = 4 };
    pthread_t threads[COUNT], closers[2];
    inferd_handle contexts[COUNT];
    void *closed[2] = {NULL};
    for (int i = 0; i < COUNT; i++) {
        contexts[i] = open_context(i ? "echo" : "slow", NULL);
        set_prompt(contexts[i], LONG);
        CHECK(!pthread_create(&threads[i], NULL, compute_until_an_error, &contexts[i]));
    }
    while (inferd_set_input(client, contexts[0], 0, LONG, sizeof LONG - 1, &error) != INFERD_SESSION_BUSY)
        CHECK_EQUAL(error.number, 0);
    for (int i = 0; i < 2; i++)
        CHECK(!pthread_create(&closers[i], NULL, close_client, NULL));
    for (int i = 0; i < COUNT; i++)
        CHECK(!pthread_join(threads[i], NULL));
    for (int i = 0; i < 2; i++)
        CHECK(!pthread_join(closers[i], &closed[i]));
    CHECK(!closed[0] != !closed[1]);
    CHECK_EQUAL(inferd_connect(NULL, &client, &error), 0);
}

/* The daemon is killed once this program has printed a line. */
SCENARIO(a_killed_daemon_fails_the_calls_under_way_and_all_later_ones) {
    inferd_handle context = open_context("slow", NULL);
    inferd_call call = {.kind = INFERD_STREAM, .handle = context, .data = LONG, .length = sizeof LONG - 1, .raw = 1};
    uint64_t request = 0;
    inferd_event event;
    CHECK_EQUAL(inferd_start(client, &call, &request, &error), 0);
    CHECK_EQUAL(inferd_next_event(client, request, -1, &event, &error), 0);
    CHECK_EQUAL(event.kind, INFERD_EVENT_TEXT);
    puts("running");
    fflush(stdout);
    do {
        inferd_event_clear(&event);
        CHECK_EQUAL(inferd_next_event(client, request, -1, &event, &error), 0);
    } while (event.kind == INFERD_EVENT_TEXT);
    CHECK_EQUAL(event.kind, INFERD_EVENT_FAILED);
    CHECK_EQUAL(event.error.number, INFERD_CONNECTION_LOST);
    CHECK_EQUAL(inferd_compute(client, context, NULL, &error), INFERD_CONNECTION_LOST);
    CHECK_EQUAL(inferd_process(client, &error), INFERD_CONNECTION_LOST);
    inferd_client *other = NULL;
    CHECK_EQUAL(inferd_connect(NULL, &other, &error), INFERD_CONNECTION_LOST);
    CHECK(error.hint[0] && !other);
}

/* The program ends with a turn under way. */
SCENARIO(vanishes_during_a_turn) {
    inferd_handle context = open_context("slow", NULL);
    inferd_call call = {.kind = INFERD_STREAM, .handle = context, .data = LONG, .length = sizeof LONG - 1, .raw = 1};
    uint64_t request = 0;
    inferd_event event;
    CHECK_EQUAL(inferd_start(client, &call, &request, &error), 0);
    CHECK_EQUAL(inferd_next_event(client, request, -1, &event, &error), 0);
    inferd_event_clear(&event);
}

#define ENTRY(name) {#name, name}
static const scenario SCENARIOS[] = {
    ENTRY(computes_a_turn_and_closes_everything),
    ENTRY(lists_the_models_up_to_the_size_of_the_array),
    ENTRY(ranks_documents),
    ENTRY(a_place_in_a_file_is_filled_in),
    ENTRY(a_newer_request_with_the_same_key_supersedes_the_older_one),
    ENTRY(an_error_has_its_name_numbers_and_hint),
    ENTRY(pulls_tokens_until_the_end_and_ends_a_turn_early),
    ENTRY(a_buffer_is_filled_to_its_last_byte_and_never_beyond),
    ENTRY(parameters_hold_for_their_turn_context_or_graph),
    ENTRY(a_context_size_that_does_not_hold_is_reported_as_a_whole_number),
    ENTRY(a_session_with_an_id_outlives_its_connection),
    ENTRY(a_label_or_a_named_user_has_sessions_of_its_own),
    ENTRY(a_prompt_larger_than_a_frame_travels_in_a_memfd),
    ENTRY(images_travel_within_the_frame_in_memfds_and_in_descriptors),
    ENTRY(streams_more_events_than_its_credit_without_blocking),
    ENTRY(every_call_can_be_started_without_waiting),
    ENTRY(another_thread_cancels_a_call_that_waits),
    ENTRY(a_started_request_is_cancelled_by_its_id),
    ENTRY(the_reasoning_of_a_running_turn_is_ended),
    ENTRY(a_turn_ends_at_its_own_timeout),
    ENTRY(the_requests_of_a_connection_are_bounded),
    ENTRY(threads_share_a_client),
    ENTRY(a_hundred_clients_connect_at_once),
    ENTRY(a_frame_larger_than_the_sockets_buffer_is_sent_in_parts),
    ENTRY(a_file_is_loaded_by_its_descriptor),
    ENTRY(graphs_are_loaded_from_one_builder_or_two),
    ENTRY(a_split_model_is_loaded_by_the_path_of_a_part),
    ENTRY(a_client_that_does_not_exist_is_refused_by_each_function),
    ENTRY(a_result_without_a_place_is_refused),
    ENTRY(a_child_process_has_no_client_of_its_parent),
    ENTRY(a_client_is_closed_once_while_other_threads_use_it),
    ENTRY(a_killed_daemon_fails_the_calls_under_way_and_all_later_ones),
    ENTRY(vanishes_during_a_turn),
};

int main(int argc, char **argv) {
    if (inferd_connect(NULL, &client, &error))
        fprintf(stderr, "%s: %s\n", error.name, error.message);
    CHECK_EQUAL(error.number, 0);
    int status = run_scenario(SCENARIOS, sizeof SCENARIOS / sizeof *SCENARIOS, argc, argv);
    CHECK_EQUAL(inferd_close(client), 0);
    return status;
}
