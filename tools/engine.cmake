# The definitions of the light build of llama-cpp-python, for `cmake -C`: `make` and the README's `pip install`
# both read this file. It builds libllama and libmtmd, which reads images and sounds.
set(GGML_OPENMP OFF CACHE BOOL "llama.cpp's own threads, which sleep while there is no work")
set(LLAVA_BUILD ON CACHE BOOL "libmtmd")
set(MTMD_VIDEO OFF CACHE BOOL "no videos, for which libmtmd would start ffmpeg")
set(CMAKE_PROJECT_llama.cpp_INCLUDE "${CMAKE_CURRENT_LIST_DIR}/llama_only.cmake" CACHE FILEPATH "no common library")
