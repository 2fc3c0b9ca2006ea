/* Maps a text file with a line for each function: its name, calls, and nanoseconds of CPU time.
 * FAKENVML_CALLS is its directory. Its name is the pid. */

#include "fake.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { NAME = 48, CALLS = 12, TIME = 18, LINE = NAME + CALLS + TIME + 1, LINES = 1024, IDS = 512 };

static char *page, path[4096];
static int lines, generation = 1;
static struct {
    char *line[IDS];
} of_ids[2];

void open_counts(void) {
    const char *folder = getenv("FAKENVML_CALLS");
    char wanted[sizeof path];
    snprintf(wanted, sizeof wanted, "%s/%d", folder ? folder : "", (int)getpid());
    if (!strcmp(path, wanted)) return;
    if (page) munmap(page, LINE * LINES);
    page = NULL;
    lines = 0;
    generation++;
    memset(of_ids, 0, sizeof of_ids);
    memcpy(path, wanted, sizeof path);
    if (!folder) return;
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (file < 0) return;
    void *mapped = MAP_FAILED;
    if (!ftruncate(file, LINE * LINES))
        mapped = mmap(NULL, LINE * LINES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) page = mapped;
}

static char *line_of(const char *name) {
    for (char *line = page; line < page + lines * LINE; line += LINE)
        if (!strncmp(line, name, strlen(name)) && line[strlen(name)] == ' ') return line;
    if (lines == LINES) abort();
    char text[LINE + 1];
    snprintf(text, sizeof text, "%-*s%*d%*d\n", NAME, name, CALLS, 0, TIME, 0);
    return memcpy(page + lines++ * LINE, text, LINE);
}

/* Adds to the decimal text in place, from the last digit. */
static void add(char *last, unsigned long long what) {
    while (what) {
        unsigned long long digit = (*last == ' ' ? 0 : (unsigned long long)(*last - '0')) + what % 10;
        *last-- = (char)('0' + digit % 10);
        what = what / 10 + digit / 10;
    }
}

void count_call(struct call *call) {
    if (!page) return;
    if (call->counted != generation) call->line = line_of(call->name);
    call->counted = generation;
    add(call->line + NAME + CALLS - 1, 1);
}

void count_time(const struct call *call, unsigned long long ns) {
    if (page && call->counted == generation) add(call->line + NAME + CALLS + TIME - 1, ns);
}

void count_id(const char *what, unsigned id) {
    if (!page || id >= IDS) return;
    char **line = &of_ids[*what == 'g'].line[id], name[32];
    if (!*line) {
        snprintf(name, sizeof name, "%s[%u]", what, id);
        *line = line_of(name);
    }
    add(*line + NAME + CALLS - 1, 1);
}
