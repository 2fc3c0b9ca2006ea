/* Parses a scenario: one value per line, those of a GPU after the line of the GPU. */

#include "fake.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const value_names[] = {
#define X(name) #name,
    VALUES(X)
#undef X
};
static const char *const kind_names[] = {"field", "gpm"};

long long now_of(const struct number *number, double seconds) {
    return number->base + (long long)floor(number->fraction + number->rate * seconds);
}

double exactly_now_of(const struct number *number, double seconds) {
    return (double)number->base + number->fraction + number->rate * seconds;
}

const struct keyed *find_keyed(const struct unit *unit, enum kind kind, unsigned id, unsigned scope) {
    for (size_t i = 0; i < unit->keyed_count; i++) {
        const struct keyed *keyed = &unit->keyed[i];
        if (keyed->kind == kind && keyed->id == id && (keyed->scope == ALL || keyed->scope == scope)) return keyed;
    }
    return NULL;
}

int find_unit(const struct scenario *scenario, const char *uuid) {
    for (size_t i = 0; i < scenario->unit_count; i++)
        if (!strcmp(scenario->units[i].uuid, uuid)) return (int)i;
    return -1;
}

static void *more(void *list, size_t *count, size_t size) {
    char *grown = realloc(list, (*count + 1) * size);
    if (!grown) abort();
    memset(grown + *count * size, 0, size);
    ++*count;
    return grown;
}
#define APPEND(list, count) ((list) = more(list, &(count), sizeof *(list)), &(list)[(count)-1])

static char *word(char **rest) {
    char *found = *rest ? *rest + strspn(*rest, " ") : NULL;
    if (!found || !*found) return *rest = "";
    size_t length = strcspn(found, " ");
    *rest = found + length;
    if (**rest) *(*rest)++ = 0;
    return found;
}

static double decimal(char **rest) { return strtod(word(rest), NULL); }
static long long integer(char **rest) { return strtoll(word(rest), NULL, 10); }

static void keep(char *to, size_t size, const char *text) { snprintf(to, size, "%s", text); }

/* Integers keep all bits: they do not pass through a double. */
static struct number number(char **rest) {
    struct number number = {.known = 1};
    const char *text = word(rest);
    char *end;
    number.base = strtoll(text, &end, 10);
    if (*end) {
        double value = strtod(text, NULL);
        number.base = (long long)floor(value);
        number.fraction = value - floor(value);
    }
    number.rate = decimal(rest);
    return number;
}

static struct process process(char **rest) {
    struct process process = {0};
    const char *kind = word(rest);
    process.kind = !strcmp(kind, "graphics") ? GRAPHICS : !strcmp(kind, "mps") ? MPS : COMPUTE;
    process.pid = (unsigned)integer(rest);
    process.memory = (unsigned long long)integer(rest);
    process.sm = (unsigned)integer(rest);
    process.memory_util = (unsigned)integer(rest);
    process.age = decimal(rest);
    return process;
}

static int unit_line(struct unit *unit, const char *key, char *rest) {
    if (!strcmp(key, "name")) return keep(unit->name, sizeof unit->name, rest), 1;
    if (!strcmp(key, "pci")) return sscanf(rest, "%x:%x:%x", &unit->domain, &unit->bus, &unit->device) == 3;
    if (!strcmp(key, "state")) return unit->state = (int)integer(&rest), 1;
    if (!strcmp(key, "partition")) return unit->partition = (long)integer(&rest), 1;
    if (!strcmp(key, "process")) return *APPEND(unit->processes, unit->process_count) = process(&rest), 1;
    if (!strcmp(key, "sample")) return *APPEND(unit->samples, unit->sample_count) = process(&rest), 1;
    for (int i = 0; i < VALUE_COUNT; i++)
        if (!strcmp(key, value_names[i])) return unit->values[i] = number(&rest), 1;
    for (int i = 0; i < (int)(sizeof kind_names / sizeof *kind_names); i++)
        if (!strcmp(key, kind_names[i])) {
            struct keyed *keyed = APPEND(unit->keyed, unit->keyed_count);
            keyed->kind = (enum kind)i;
            keyed->id = (unsigned)integer(&rest);
            const char *scope = word(&rest);
            keyed->scope = *scope == '*' ? ALL : strtoll(scope, NULL, 10);
            keyed->type = (int)integer(&rest);
            keyed->code = (int)integer(&rest);
            keyed->number = number(&rest);
            return 1;
        }
    return 0;
}

static int global_line(struct scenario *scenario, const char *key, char *rest) {
    if (!strcmp(key, "driver")) return keep(scenario->driver, sizeof scenario->driver, rest), 1;
    if (!strcmp(key, "cuda")) return scenario->cuda = (int)integer(&rest), 1;
    if (!strcmp(key, "init")) return scenario->init = (int)integer(&rest), 1;
    if (!strcmp(key, "broken")) return scenario->broken = (int)integer(&rest), 1;
    if (!strcmp(key, "global_lock")) return scenario->global_lock = (int)integer(&rest), 1;
    if (!strcmp(key, "field_max")) return scenario->field_max = (int)integer(&rest), 1;
    if (!strcmp(key, "start")) return scenario->start = decimal(&rest), 1;
    if (!strcmp(key, "sample_period")) return scenario->sample_period = decimal(&rest), 1;
    if (!strcmp(key, "fault")) {
        struct fault *fault = APPEND(scenario->faults, scenario->fault_count);
        keep(fault->function, sizeof fault->function, word(&rest));
        keep(fault->uuid, sizeof fault->uuid, word(&rest));
        const char *code = word(&rest);
        fault->has_code = *code != '-';
        fault->code = atoi(code);
        fault->slow_ms = (int)integer(&rest);
        fault->hang = (int)integer(&rest);
        fault->race = (int)integer(&rest);
        return 1;
    }
    if (!strcmp(key, "event")) {
        struct event *event = APPEND(scenario->events, scenario->event_count);
        event->sequence = integer(&rest);
        keep(event->uuid, sizeof event->uuid, word(&rest));
        event->type = (unsigned long long)integer(&rest);
        event->data = (unsigned long long)integer(&rest);
        event->gpu_instance = (unsigned)integer(&rest);
        event->compute_instance = (unsigned)integer(&rest);
        return 1;
    }
    return 0;
}

/* GPU numbers in Slurm notation, "0,2-3". Missing GPUs are skipped. */
static void show_only(struct scenario *scenario, const char *list) {
    int all[MAX_GPUS];
    unsigned count = scenario->visible_count;
    memcpy(all, scenario->visible, sizeof all);
    scenario->visible_count = 0;
    while (*list) {
        char *end;
        unsigned long first = strtoul(list, &end, 10), last = first;
        if (end == list) break;
        if (*end == '-') last = strtoul(end + 1, &end, 10);
        for (unsigned long i = first; i <= last && i < count; i++)
            if (scenario->visible_count < MAX_GPUS) scenario->visible[scenario->visible_count++] = all[i];
        list = end + strspn(end, ", ");
    }
}

/* Keeps GPUs whose device file can be opened, like the driver: a device cgroup answers EPERM. */
static void show_permitted(struct scenario *scenario, const char *folder) {
    unsigned kept = 0;
    for (unsigned i = 0; i < scenario->visible_count; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/nvidia%u", folder, i);
        int file = open(path, O_RDWR | O_CLOEXEC);
        if (file >= 0) close(file);
        if (file >= 0 || errno != EPERM) scenario->visible[kept++] = scenario->visible[i];
    }
    scenario->visible_count = kept;
}

/* A variable with %h replaced by the host name, for hosts that share all files. NULL if unset. */
const char *setting(const char *name, char *text, size_t size) {
    const char *value = getenv(name), *mark = value ? strstr(value, "%h") : NULL;
    if (!mark) return value;
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    snprintf(text, size, "%.*s%s%s", (int)(mark - value), value, host, mark + 2);
    return text;
}

static void choose_visible(struct scenario *scenario, const char *list) {
    for (size_t i = 0; i < scenario->unit_count; i++)
        if (scenario->units[i].parent < 0 && scenario->visible_count < MAX_GPUS)
            scenario->visible[scenario->visible_count++] = (int)i;
    if (list) show_only(scenario, list);
    const char *how = getenv("FAKENVML_VISIBLE");
    if (how) show_permitted(scenario, how);
}

struct scenario *parse_scenario(const char *text) {
    struct scenario *scenario = calloc(1, sizeof *scenario);
    char *copy = strdup(text), *after, *visible = NULL;
    if (!scenario || !copy) abort();
    scenario->sample_period = 1;
    int gpu = -1;
    for (char *line = strtok_r(copy, "\n", &after); line; line = strtok_r(NULL, "\n", &after)) {
        char *rest = line, *key = word(&rest);
        if (!*key || *key == '#') continue;
        if (!strcmp(key, "gpu") || !strcmp(key, "mig")) {
            struct unit *unit = APPEND(scenario->units, scenario->unit_count);
            int mig = *key == 'm';
            unit->parent = mig ? gpu : -1;
            if (!mig) gpu = (int)scenario->unit_count - 1;
            keep(unit->uuid, sizeof unit->uuid, word(&rest));
            unit->slot = (unsigned)integer(&rest);
        } else if (!strcmp(key, "visible")) {
            visible = rest;
        } else if (!global_line(scenario, key, rest) &&
                   !(scenario->unit_count && unit_line(&scenario->units[scenario->unit_count - 1], key, rest))) {
            fprintf(stderr, "fakenvml: the scenario has a line that means nothing: %s %s\n", key, rest);
            scenario->broken = UNKNOWN;
        }
    }
    choose_visible(scenario, visible);
    free(copy);
    return scenario;
}

void free_scenario(struct scenario *scenario) {
    for (size_t i = 0; i < scenario->unit_count; i++) {
        free(scenario->units[i].keyed);
        free(scenario->units[i].processes);
        free(scenario->units[i].samples);
    }
    free(scenario->units);
    free(scenario->faults);
    free(scenario->events);
    free(scenario);
}
