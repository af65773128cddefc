/* wasi-nn as guests of WasmEdge import it. */
#include <stdint.h>

#define NN(name) __attribute__((import_module("wasi_ephemeral_nn"), import_name(#name)))

typedef struct { const void *data; uint32_t size; } builder;
typedef struct {
  const uint32_t *dimensions; uint32_t dimensions_len;
  uint8_t type;
  const void *data; uint32_t size;
} tensor;

enum { GGML = 6, AUTO = 3, U8 = 3 };
enum { END_OF_SEQUENCE = 100, CONTEXT_FULL = 101, PROMPT_TOO_LONG = 102, MODEL_NOT_FOUND = 103 };

NN(load) uint32_t nn_load(const builder *, uint32_t n, uint32_t encoding, uint32_t target, uint32_t *graph);
NN(load_by_name) uint32_t nn_load_by_name(const char *, uint32_t size, uint32_t *graph);
NN(load_by_name_with_config)
uint32_t nn_load_by_name_with_config(const char *, uint32_t size, const char *config,
                                     uint32_t config_size, uint32_t *graph);
NN(init_execution_context) uint32_t nn_init_execution_context(uint32_t graph, uint32_t *context);
NN(set_input) uint32_t nn_set_input(uint32_t context, uint32_t index, const tensor *);
NN(get_output)
uint32_t nn_get_output(uint32_t context, uint32_t index, void *buffer, uint32_t size, uint32_t *written);
NN(get_output_single)
uint32_t nn_get_output_single(uint32_t context, uint32_t index, void *buffer, uint32_t size,
                              uint32_t *written);
NN(compute) uint32_t nn_compute(uint32_t context);
NN(compute_single) uint32_t nn_compute_single(uint32_t context);
NN(fini_single) uint32_t nn_fini_single(uint32_t context);
NN(unload) uint32_t nn_unload(uint32_t graph);
NN(finalize_execution_context) uint32_t nn_finalize_execution_context(uint32_t context);
