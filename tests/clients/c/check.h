/* Assertions and the table of scenarios of the C programs of these tests. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition)                                                             \
    do {                                                                             \
        if (!(condition)) {                                                          \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                                 \
        }                                                                            \
    } while (0)

#define CHECK_EQUAL(got, expected)                                                              \
    do {                                                                                        \
        long long got_ = (long long)(got), expected_ = (long long)(expected);                   \
        if (got_ != expected_) {                                                                \
            fprintf(stderr, "%s:%d: %s is %lld, not %lld\n", __FILE__, __LINE__, #got, got_,    \
                    expected_);                                                                 \
            exit(1);                                                                            \
        }                                                                                       \
    } while (0)

#define CHECK_TEXT(got, expected)                                                              \
    do {                                                                                       \
        const char *got_ = (got);                                                              \
        if (strcmp(got_, (expected))) {                                                        \
            fprintf(stderr, "%s:%d: %s is \"%s\", not \"%s\"\n", __FILE__, __LINE__, #got,     \
                    got_, (expected));                                                         \
            exit(1);                                                                           \
        }                                                                                      \
    } while (0)

/* Run a function in a child process, and wait until it has returned there. */
static inline void run_in_child(void (*run)(void)) {
    int status = 0;
    pid_t child = fork();
    if (!child) {
        run();
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && !status);
}

/* Define a scenario; the Python tests find it in the source by this word. */
#define SCENARIO(name) static void name(void)

typedef struct scenario {
    const char *name;
    void (*run)(void);
} scenario;

/* Run the scenario that the first argument names. */
static inline int run_scenario(const scenario *table, size_t count, int argc, char **argv) {
    for (size_t i = 0; i < count; i++)
        if (argc > 1 && !strcmp(argv[1], table[i].name)) {
            table[i].run();
            return 0;
        }
    fprintf(stderr, "no such scenario\n");
    return 2;
}

#endif
