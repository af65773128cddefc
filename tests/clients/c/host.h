/* What the hosts that open a library with dlopen share: its functions by name, threads, a partner. */
#ifndef HOST_H
#define HOST_H

#include "check.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

enum { THREADS = 4 };

/* The library that LIBRARY names. */
static inline void *open_with(int mode) {
    void *library = dlopen(getenv("LIBRARY"), mode);
    if (!library)
        fprintf(stderr, "%s\n", dlerror());
    CHECK(library);
    return library;
}

static inline void look_up(void *library, const char *name, void *function) {
    void *found = dlsym(library, name);
    CHECK(found);
    memcpy(function, &found, sizeof found);
}

/* Look up the function of the field `name` of `api`. */
#define LOOK_UP(library, name) look_up(library, #name, &api.name)

/* Run threads, each with a pointer to its number. */
static inline void run_threads(void *(*run)(void *)) {
    pthread_t threads[THREADS];
    int numbers[THREADS];
    for (int i = 0; i < THREADS; i++) {
        numbers[i] = i;
        CHECK(!pthread_create(&threads[i], NULL, run, &numbers[i]));
    }
    for (int i = 0; i < THREADS; i++)
        CHECK(!pthread_join(threads[i], NULL));
}

/* Print a line, and wait until the tests have done their part. */
static inline void wait_for_partner(void) {
    char line[8];
    puts("now");
    fflush(stdout);
    CHECK(fgets(line, sizeof line, stdin));
}

#endif
