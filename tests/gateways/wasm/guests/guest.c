/* Guests for the tests, one scenario each: `guest SCENARIO [MODEL [TEXT…]]`. The first ones make the
 * calls that WasmEdge's example programs make. A guest whose call fails exits with 10 + the error. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "wasi_ephemeral_nn.h"

static char buffer[1 << 20];

static void check(const char *call, uint32_t number) {
  if (number) {
    fflush(stdout);
    fprintf(stderr, "%s: error %u\n", call, number);
    exit(10 + number);
  }
}

static uint32_t load(const char *model, const char *config) {
  uint32_t graph, number;
  number = config ? nn_load_by_name_with_config(model, strlen(model), config, strlen(config), &graph)
                  : nn_load_by_name(model, strlen(model), &graph);
  check("load", number);
  return graph;
}

static uint32_t init(uint32_t graph) {
  uint32_t context;
  check("init_execution_context", nn_init_execution_context(graph, &context));
  return context;
}

static void set_input(uint32_t context, uint32_t index, const char *text) {
  uint32_t one = 1;
  tensor t = {&one, 1, U8, text, strlen(text)};
  check("set_input", nn_set_input(context, index, &t));
}

static const char *output(uint32_t context, uint32_t index) {
  uint32_t written;
  check("get_output", nn_get_output(context, index, buffer, sizeof buffer - 1, &written));
  buffer[written] = 0;
  return buffer;
}

static int number_in(const char *json, const char *key) {
  const char *at = strstr(json, key);
  return at ? atoi(at + strlen(key) + 1) : -1;
}

/* Pulls a turn to its end and returns the error that ends it. */
static uint32_t pull(uint32_t context) {
  uint32_t number, written;
  while (!(number = nn_compute_single(context))) {
    check("get_output_single", nn_get_output_single(context, 0, buffer, sizeof buffer, &written));
    fwrite(buffer, 1, written, stdout);
    fflush(stdout);
  }
  return number;
}

static int stream(const char *model, const char *prompt, const char *config) {
  uint32_t context = init(load(model, config));
  set_input(context, 0, prompt);
  int input = number_in(output(context, 1), "\"input_tokens\"");
  uint32_t number = pull(context);
  if (number == CONTEXT_FULL) printf("\nContext full.");
  else if (number == PROMPT_TOO_LONG) printf("\nPrompt too long.");
  else if (number != END_OF_SEQUENCE) check("compute_single", number);
  printf("\n%d %d\n", input, number_in(output(context, 1), "\"output_tokens\""));
  return 0; /* neither fini_single nor unload */
}

/* Sets each line as a prompt and pulls its turn: the text, a NUL, the metadata. JSON is parameters. */
static int serve(const char *model, const char *config) {
  static char line[4096];
  uint32_t context = init(load(model, config));
  printf("ready\n");
  fflush(stdout);
  while (fgets(line, sizeof line, stdin)) {
    line[strcspn(line, "\n")] = 0;
    set_input(context, line[0] == '{', line);
    if (line[0] == '{') continue;
    uint32_t number = pull(context);
    if (number != END_OF_SEQUENCE) check("compute_single", number);
    putchar(0);
    printf("%s\n", output(context, 1));
    fflush(stdout);
  }
  return 0;
}

static int interactive(const char *model) {
  static char line[4096];
  uint32_t context = init(load(model, "{\"n-predict\":40}"));
  for (;;) {
    printf("? ");
    fflush(stdout);
    if (!fgets(line, sizeof line, stdin)) return 0;
    line[strcspn(line, "\n")] = 0;
    set_input(context, 0, line);
    uint32_t number = pull(context);
    if (number != END_OF_SEQUENCE) check("compute_single", number);
    check("fini_single", nn_fini_single(context));
    printf("\n");
  }
}

static int basic(const char *model, const char *prompt) {
  uint32_t context = init(load(model, "{\"stream-stdout\":true,\"n-predict\":40}"));
  printf("[");
  fflush(stdout);
  set_input(context, 0, prompt);
  check("compute", nn_compute(context));
  output(context, 0);
  printf("]\n");
  return 0;
}

static int unload(const char *model, const char *prompt) {
  for (int i = 0; i < 5; i++) {
    uint32_t graph = load(model, "{\"n-predict\":8}"), context = init(graph);
    set_input(context, 0, prompt);
    check("compute", nn_compute(context));
    printf("%u %s\n", graph, output(context, 0));
    check("unload", nn_unload(graph));
  }
  return 0;
}

static int set_input_twice(const char *model, const char *prompt) {
  uint32_t context = init(load(model, NULL));
  for (int i = 0; i < 2; i++) {
    set_input(context, 0, prompt);
    printf("%d\n", number_in(output(context, 1), "\"input_tokens\""));
  }
  return 0;
}

static int embedding(const char *model, int n, char **texts) {
  uint32_t context = init(load(model, "{\"embedding\":true}"));
  for (int i = 0; i < n; i++) {
    set_input(context, 0, texts[i]);
    check("compute", nn_compute(context));
    printf("%d\n", number_in(output(context, 0), "\"n_embedding\""));
  }
  return 0;
}

static int rpc(const char *model, const char *prompt) {
  uint32_t context = init(load(model, NULL));
  set_input(context, 1, "{\"n-predict\":5,\"temp\":0}");
  set_input(context, 0, prompt);
  int input = number_in(output(context, 1), "\"input_tokens\"");
  check("compute", nn_compute(context));
  printf("%s\n", output(context, 0));
  printf("%d %d\n", input, number_in(output(context, 1), "\"output_tokens\""));
  return 0;
}

static int by_builder(const char *model, const char *prompt) {
  static char name[256] = "preload:";
  strcat(name, model);
  builder builders[2] = {{name, strlen(name)}, {"{\"n-predict\":3}", 15}};
  uint32_t graph;
  check("load", nn_load(builders, 2, GGML, AUTO, &graph));
  uint32_t context = init(graph);
  set_input(context, 0, prompt);
  check("compute", nn_compute(context));
  printf("%s\n", output(context, 0));
  check("finalize", nn_finalize_execution_context(context));
  return 0;
}

/* Parameters as the guests for images send them: the paths are variables of the environment. */
static const char *image_config(int ctx_size) {
  static char config[4096];
  const char *mmproj = getenv("mmproj"), *image = getenv("image");
  int size = snprintf(config, sizeof config, "{\"enable-log\":false,\"n-gpu-layers\":0");
  size += snprintf(config + size, sizeof config - size, ",\"ctx-size\":%d,\"n-predict\":24", ctx_size);
  if (mmproj) size += snprintf(config + size, sizeof config - size, ",\"mmproj\":\"%s\"", mmproj);
  if (image) size += snprintf(config + size, sizeof config - size, ",\"image\":\"%s\"", image);
  snprintf(config + size, sizeof config - size, "}");
  return config;
}

/* Asks about an image with each line, as `llava` does: the prompt grows by the questions and answers. */
static int llava(const char *model) {
  static char line[4096], prompt[1 << 18];
  uint32_t context = init(load(model, image_config(2048)));
  int size = snprintf(prompt, sizeof prompt, "Answer as short as possible.\nUSER:{WASMEDGE_IMAGE}\n");
  while (fgets(line, sizeof line, stdin)) {
    line[strcspn(line, "\n")] = 0;
    size += snprintf(prompt + size, sizeof prompt - size, "%s\nASSISTANT:", line);
    set_input(context, 0, prompt);
    check("compute", nn_compute(context));
    const char *answer = output(context, 0);
    printf("Answer: %s\n", answer);
    size += snprintf(prompt + size, sizeof prompt - size, " %s\nUSER: ", answer);
  }
  return 0;
}

/* Pulls the answers about an image in base64, as `llava-base64-stream` does. */
static int base64_stream(const char *model, const char *file) {
  static char line[4096], prompt[1 << 20];
  uint32_t context = init(load(model, image_config(2048)));
  int size = snprintf(prompt, sizeof prompt, "USER:<img src=\"data:image/png;base64,");
  FILE *encoded = fopen(file, "r");
  if (!encoded) return 2;
  size += fread(prompt + size, 1, sizeof prompt / 2, encoded);
  size += snprintf(prompt + size, sizeof prompt - size, "\">\n");
  while (fgets(line, sizeof line, stdin)) {
    line[strcspn(line, "\n")] = 0;
    size += snprintf(prompt + size, sizeof prompt - size, "%s\nASSISTANT:", line);
    set_input(context, 0, prompt);
    printf("ASSISTANT: ");
    uint32_t number = pull(context);
    if (number != END_OF_SEQUENCE) check("compute_single", number);
    const char *answer = output(context, 0);
    printf("\n");
    size += snprintf(prompt + size, sizeof prompt - size, " %s\nUSER: ", answer);
    check("fini_single", nn_fini_single(context));
  }
  return 0;
}

/* Answers one prompt, as `gemma-3`, `gemma-4` and `qwen2vl` do; the tensor has its length. */
static int describe(const char *model, const char *prompt) {
  uint32_t context = init(load(model, image_config(4096))), length = strlen(prompt);
  tensor t = {&length, 1, U8, prompt, length};
  check("set_input", nn_set_input(context, 0, &t));
  int input = number_in(output(context, 1), "\"input_tokens\"");
  check("compute", nn_compute(context));
  printf("%s\n", output(context, 0));
  printf("%d %d\n", input, number_in(output(context, 1), "\"output_tokens\""));
  return 0;
}

static int leave(const char *model, const char *prompt, const char *way) {
  uint32_t context = init(load(model, NULL));
  set_input(context, 0, prompt);
  check("compute_single", nn_compute_single(context));
  printf("leaving\n");
  fflush(stdout);
  if (!strcmp(way, "exit")) exit(7);
  if (!strcmp(way, "trap")) __builtin_trap();
  if (!strcmp(way, "loop")) for (volatile int i = 0;; i++);
  if (!strcmp(way, "sleep")) sleep(600);
  if (!strcmp(way, "read")) getchar();
  if (!strcmp(way, "compute")) nn_compute(context);
  return 0;
}

static int grow(void) {
  int size = 0;
  for (volatile char *block; (block = malloc(1 << 20)); size++) *block = 1;
  printf("%d MiB\n", size);
  return 0;
}

static int show(int argc, char **argv) {
  for (int i = 1; i < argc; i++) printf("%s ", argv[i]);
  printf("%s\n", getenv("COLOUR") ? getenv("COLOUR") : "-");
  FILE *file = fopen("/data/note", "r");
  if (file) printf("%s", fgets(buffer, sizeof buffer, file));
  printf("%s\n", fopen("/data/new", "w") ? "written" : "not written");
  return 0;
}

int main(int argc, char **argv) {
  const char *scenario = argc > 1 ? argv[1] : "", *model = argc > 2 ? argv[2] : "echo";
  const char *text = argc > 3 ? argv[3] : "", *more = argc > 4 ? argv[4] : NULL;
  if (!strcmp(scenario, "stream")) return stream(model, text, more);
  if (!strcmp(scenario, "serve")) return serve(model, text);
  if (!strcmp(scenario, "interactive")) return interactive(model);
  if (!strcmp(scenario, "basic")) return basic(model, text);
  if (!strcmp(scenario, "unload")) return unload(model, text);
  if (!strcmp(scenario, "twice")) return set_input_twice(model, text);
  if (!strcmp(scenario, "embedding")) return embedding(model, argc - 3, argv + 3);
  if (!strcmp(scenario, "rpc")) return rpc(model, text);
  if (!strcmp(scenario, "builder")) return by_builder(model, text);
  if (!strcmp(scenario, "llava")) return llava(model);
  if (!strcmp(scenario, "base64")) return base64_stream(model, text);
  if (!strcmp(scenario, "describe")) return describe(model, text);
  if (!strcmp(scenario, "leave")) return leave(model, text, more);
  if (!strcmp(scenario, "grow")) return grow();
  return show(argc, argv);
}
