# Read by CMake right after llama.cpp's own project() call (CMAKE_PROJECT_<name>_INCLUDE).
#
# llama-cpp-python forces LLAMA_BUILD_COMMON on in the cache, though its wheel contains neither the
# common library nor anything that links to it: libmtmd may not. option() yields to a normal
# variable of the same name (policy CMP0077), so this one wins over the forced cache entry and
# shortens the build.
set(LLAMA_BUILD_COMMON OFF)
