/* A training program without Python: it fits a line, and keeps its checkpoints by the command line.

       cc -O2 -o train train.c
       export HOLDFAST_REGISTRY=registry
       holdfast init && holdfast run create RUN --monitor loss:min
       ./train RUN STEPS EVERY

   It may be killed at any moment. Started again, it continues from its newest checkpoint, and ends
   with the same bits. docs/guides/any-language.md explains each command. */
#define _DEFAULT_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WIDTH = 64, BATCH = 8, NOTHING_YET = 4, STORE_FAILED = 7 };

/* All that the next step depends on. */
static struct state {
    double weights[WIDTH], momentum[WIDTH];
    uint64_t random, step;
} now = {.random = 0x9e3779b97f4a7c15};

static const struct tensor {
    const char *name, *dtype;
    int length;
    void *data;
} TENSORS[] = {
    {"momentum", "F64", WIDTH, now.momentum},
    {"random", "U64", 1, &now.random},
    {"step", "U64", 1, &now.step},
    {"weights", "F64", WIDTH, now.weights},
};
enum { COUNT = sizeof TENSORS / sizeof *TENSORS };

static volatile sig_atomic_t stop; /* the signal that asks for the end */

static void on_signal(int number) { stop = number; }

static void fail(int status, const char *format, ...) {
    va_list given;
    va_start(given, format);
    vfprintf(stderr, format, given);
    va_end(given);
    fputc('\n', stderr);
    exit(status);
}

/* Run `holdfast` with some words, up to NULL; return its exit status. */
static int holdfast(const char *first, ...) {
    const char *words[32] = {getenv("HOLDFAST"), first};
    int count = 2;
    va_list given;
    if (!words[0]) words[0] = "holdfast";
    va_start(given, first);
    do words[count] = va_arg(given, const char *);
    while (words[count++]);
    va_end(given);
    pid_t child = fork();
    if (child == 0) {
        /* A signal to the whole job must not end a save that is under way. */
        signal(SIGTERM, SIG_IGN);
        signal(SIGINT, SIG_IGN);
        execvp(words[0], (char *const *)words);
        _exit(127);
    }
    int status = 0;
    if (child < 0) fail(1, "cannot start %s: %s", words[0], strerror(errno));
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR) fail(1, "cannot wait for %s: %s", words[0], strerror(errno));
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static FILE *opened(const char *path, const char *mode) {
    FILE *file = fopen(path, mode);
    if (!file) fail(1, "%s: %s", path, strerror(errno));
    return file;
}

/* Write the state as safetensors: the length of the header, the header as JSON, the tensors. */
static void write_state(const char *path) {
    char header[1024] = "{", *end = header + 1;
    int begin = 0;
    for (const struct tensor *one = TENSORS; one < TENSORS + COUNT; one++) {
        int next = begin + 8 * one->length;
        end += sprintf(end, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%d],\"data_offsets\":[%d,%d]}",
                       begin ? "," : "", one->name, one->dtype, one->length, begin, next);
        begin = next;
    }
    uint64_t length = end + sprintf(end, "}") - header;
    while (length % 8) header[length++] = ' ';
    FILE *file = opened(path, "wb");
    fwrite(&length, 8, 1, file);
    fwrite(header, 1, length, file);
    for (const struct tensor *one = TENSORS; one < TENSORS + COUNT; one++)
        fwrite(one->data, 8, one->length, file);
    int failed = ferror(file);
    if (fclose(file) || failed) fail(1, "%s: cannot be written", path);
}

/* Read a state; other programs may order its tensors in another way. */
static void read_state(const char *path) {
    char header[4096], wanted[64], *found;
    uint64_t length = 0;
    long begin, end;
    FILE *file = opened(path, "rb");
    if (fread(&length, 8, 1, file) != 1 || length >= sizeof header ||
        fread(header, 1, length, file) != length)
        fail(1, "%s: no header of safetensors", path);
    header[length] = 0;
    for (const struct tensor *one = TENSORS; one < TENSORS + COUNT; one++) {
        snprintf(wanted, sizeof wanted, "\"%s\":{\"dtype\":\"%s\",", one->name, one->dtype);
        found = strstr(header, wanted);
        found = found ? strstr(found, "\"data_offsets\":[") : NULL;
        if (!found || sscanf(found + 16, "%ld,%ld", &begin, &end) != 2 ||
            end - begin != 8 * one->length || fseek(file, 8 + (long)length + begin, SEEK_SET) ||
            fread(one->data, 8, one->length, file) != (size_t)one->length)
            fail(1, "%s: no tensor %s of this program", path, one->name);
    }
    fclose(file);
}

static double uniform(void) {
    now.random ^= now.random << 13;
    now.random ^= now.random >> 7;
    now.random ^= now.random << 17;
    return (double)(now.random >> 11) / 9007199254740992.0 - 0.5;
}

/* One step of descent with momentum, on a batch of random points of a line; return the loss. */
static double train_step(void) {
    double gradient[WIDTH] = {0}, loss = 0;
    for (int point = 0; point < BATCH; point++) {
        double at[WIDTH], error = 0;
        for (int i = 0; i < WIDTH; i++) {
            at[i] = uniform();
            error += at[i] * (now.weights[i] - (i + 1.0) / WIDTH);
        }
        for (int i = 0; i < WIDTH; i++) gradient[i] += error * at[i] / BATCH;
        loss += error * error / BATCH;
    }
    for (int i = 0; i < WIDTH; i++) {
        now.momentum[i] = 0.9 * now.momentum[i] + gradient[i];
        now.weights[i] -= 0.1 * now.momentum[i];
    }
    now.step++;
    return loss;
}

int main(int count, char **given) {
    if (count != 4) fail(2, "usage: train RUN STEPS EVERY");
    const char *run = given[1];
    uint64_t steps = strtoull(given[2], NULL, 10), every = strtoull(given[3], NULL, 10);
    char state[256], entries[256], lock[256], stream[300], step[32], after[32] = "none", metric[64];
    if (!getenv("HOLDFAST_REGISTRY")) fail(2, "HOLDFAST_REGISTRY is not set: name the registry");
    if (steps == 0 || every == 0) fail(2, "STEPS and EVERY are whole numbers from 1");
    snprintf(state, sizeof state, "%s.safetensors", run);
    snprintf(entries, sizeof entries, "%s.jsonl", run);
    snprintf(lock, sizeof lock, "%s.lock", run);
    snprintf(stream, sizeof stream, "loss=%s", entries);
    /* The commands inherit the lock: a save that outlives a killed program is waited for. */
    int held = open(lock, O_RDWR | O_CREAT, 0666);
    if (held < 0 || flock(held, LOCK_EX)) fail(1, "%s: %s", lock, strerror(errno));
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);

    int status = holdfast("pull", run, "--to", state, "--force", NULL);
    /* No checkpoint yet, or a wrong name? Only a run that exists is trained. */
    if (status == NOTHING_YET && holdfast("run", "show", run, NULL)) return status;
    if (status == 0) {
        read_state(state);
        snprintf(after, sizeof after, "%" PRIu64, now.step);
    } else if (status != NOTHING_YET)
        return status;

    FILE *lines = opened(entries, "w"); /* the losses since the newest checkpoint */
    while (now.step < steps && !(stop && status == 0)) {
        double loss = train_step();
        fprintf(lines, "{\"step\": %" PRIu64 ", \"loss\": %.17g}\n", now.step, loss);
        if (now.step % every && now.step < steps && !stop) continue;
        if (fflush(lines)) fail(1, "%s: cannot be written", entries);
        write_state(state);
        snprintf(step, sizeof step, "%" PRIu64, now.step);
        snprintf(metric, sizeof metric, "loss=%.17g", loss);
        status = holdfast("push", state, run, "--step", step, "--after", after,
                          "--stream", stream, "--metric", metric, NULL);
        if (status == STORE_FAILED && now.step < steps && !stop)
            continue; /* the next save has these losses too */
        if (status) return status;
        strcpy(after, step);
        lines = freopen(entries, "w", lines);
        if (!lines) fail(1, "%s: %s", entries, strerror(errno));
    }
    const char *how = now.step < steps ? "interrupted" : "completed";
    status = holdfast("run", "set", run, "--status", how, NULL);
    return status ? status : now.step < steps ? 128 + stop : 0;
}
