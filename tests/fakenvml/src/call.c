/* Start and end of each function: the lock, the current scenario and its faults. */

#include "fake.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { POLL_MS = 10, MOST_HANDLES = 1024 };
/* A file that changed so recently may change again with the same modification time, so it is read again. */
static const double SETTLED_S = 0.05;

static pthread_mutex_t state_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t driver_lock = PTHREAD_MUTEX_INITIALIZER; /* held during whole calls with a global lock */

struct scenario *scenario;
int users;
static char *scenario_text;
static struct stat scenario_stat;
static int settled;

static struct handle handles[MOST_HANDLES];
static int handle_count;

static double epoch(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static unsigned long long cpu_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (unsigned long long)now.tv_sec * 1000000000ULL + (unsigned long long)now.tv_nsec;
}

unsigned long long epoch_us(void) { return (unsigned long long)(epoch() * 1e6); }
double seconds_of_scenario(void) { return epoch() - scenario->start; }

static char *read_file(const char *path, struct stat *found) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return NULL;
    char *text = NULL;
    if (!fstat(file, found) && (text = malloc((size_t)found->st_size + 1))) {
        ssize_t size = read(file, text, (size_t)found->st_size);
        text[size > 0 ? size : 0] = 0;
    }
    close(file);
    return text;
}

/* Loads the current scenario. Without a file, the old one stays. */
static void refresh(void) {
    char place[4096];
    const char *path = setting("FAKENVML_SCENARIO", place, sizeof place);
    struct stat found;
    if (!path || stat(path, &found)) {
        if (!scenario) scenario = parse_scenario("init 9\n"); /* no driver without a scenario */
        return;
    }
    if (settled && scenario && found.st_ino == scenario_stat.st_ino && found.st_size == scenario_stat.st_size &&
        !memcmp(&found.st_mtim, &scenario_stat.st_mtim, sizeof found.st_mtim))
        return;
    char *text = read_file(path, &found);
    if (!text) return;
    scenario_stat = found;
    settled = epoch() - ((double)found.st_mtim.tv_sec + (double)found.st_mtim.tv_nsec / 1e9) > SETTLED_S;
    if (scenario_text && !strcmp(text, scenario_text)) {
        free(text);
        return;
    }
    if (scenario) free_scenario(scenario);
    free(scenario_text);
    scenario_text = text;
    scenario = parse_scenario(text);
}

struct handle *handle_of(const struct unit *unit) {
    for (int i = 0; i < handle_count; i++)
        if (handles[i].partition == unit->partition && !strcmp(handles[i].uuid, unit->uuid)) return &handles[i];
    if (handle_count == MOST_HANDLES) abort();
    struct handle *handle = &handles[handle_count++];
    memcpy(handle->uuid, unit->uuid, sizeof handle->uuid);
    handle->mig = unit->parent >= 0;
    handle->partition = unit->partition;
    return handle;
}

static int is_visible(const struct unit *unit) {
    int gpu = unit->parent >= 0 ? unit->parent : (int)(unit - scenario->units);
    for (unsigned i = 0; i < scenario->visible_count; i++)
        if (scenario->visible[i] == gpu) return 1;
    return 0;
}

/* Finds the unit of a handle in the current scenario. */
static int resolve(struct visit *visit) {
    struct handle *handle = visit->handle;
    visit->unit = NULL;
    if (!handle) return GO_ON;
    if (handle < handles || handle >= handles + handle_count) return INVALID_ARGUMENT;
    int place = find_unit(scenario, handle->uuid);
    if (place < 0 || !is_visible(&scenario->units[place])) return handle->mig ? INVALID_ARGUMENT : GPU_IS_LOST;
    struct unit *unit = &scenario->units[place];
    if (handle->mig && handle->partition != unit->partition) return INVALID_ARGUMENT;
    int state = unit->parent >= 0 ? scenario->units[unit->parent].state : unit->state;
    if (state) return state;
    visit->unit = unit;
    return GO_ON;
}

static struct fault *fault_of(const struct visit *visit, int what(const struct fault *)) {
    for (size_t i = 0; i < scenario->fault_count; i++) {
        struct fault *fault = &scenario->faults[i];
        if (!what(fault) || (strcmp(fault->function, "*") && strcmp(fault->function, visit->call->name))) continue;
        if (!strcmp(fault->uuid, "*") || (visit->handle && !strcmp(fault->uuid, visit->handle->uuid))) return fault;
    }
    return NULL;
}

static int hangs(const struct fault *fault) { return fault->hang; }
static int is_slow(const struct fault *fault) { return fault->slow_ms > 0; }
static int has_code(const struct fault *fault) { return fault->has_code; }
static int has_race(const struct fault *fault) { return fault->race > 0; }

/* Waits without the lock. The unit of the visit may have changed afterwards. */
void pause_ms(struct visit *visit, int ms, int keep_driver) {
    struct timespec time = {ms / 1000, ms % 1000 * 1000000L};
    pthread_mutex_unlock(&state_lock);
    if (!keep_driver && visit->has_driver) pthread_mutex_unlock(&driver_lock);
    nanosleep(&time, NULL);
    if (!keep_driver && visit->has_driver) pthread_mutex_lock(&driver_lock);
    pthread_mutex_lock(&state_lock);
    refresh();
    visit->code = resolve(visit);
}

struct visit enter(struct call *call, const char *name) {
    struct visit visit = {.call = call, .code = GO_ON, .began = cpu_ns()};
    pthread_mutex_lock(&state_lock);
    call->name = name;
    refresh();
    if (scenario->global_lock) {
        pthread_mutex_unlock(&state_lock);
        pthread_mutex_lock(&driver_lock);
        visit.has_driver = 1;
        pthread_mutex_lock(&state_lock);
        refresh();
    }
    if (!users && !strncmp(name, "nvmlInit", 8)) open_counts();
    count_call(call);
    if (scenario->broken)
        visit.code = scenario->broken;
    else if (!users && strncmp(name, "nvmlInit", 8))
        visit.code = UNINITIALIZED;
    return visit;
}

int about(struct visit *visit, struct handle *handle) {
    struct fault *fault;
    visit->handle = handle;
    resolve(visit);
    if ((fault = fault_of(visit, is_slow))) pause_ms(visit, fault->slow_ms, 1);
    while (fault_of(visit, hangs)) pause_ms(visit, POLL_MS, 1);
    if (scenario->broken) return scenario->broken;
    int code = resolve(visit);
    if (code == GO_ON && (fault = fault_of(visit, has_code))) return fault->code;
    return code;
}

int leave(struct visit *visit, int code) {
    count_time(visit->call, cpu_ns() - visit->began);
    pthread_mutex_unlock(&state_lock);
    if (visit->has_driver) pthread_mutex_unlock(&driver_lock);
    return code;
}

/* Whether the buffer is too small, which happens as often as the scenario says. */
int race(struct visit *visit) {
    struct fault *fault = fault_of(visit, has_race);
    return fault ? fault->race-- : 0;
}

int put_text(char *buffer, unsigned length, const char *text) {
    if (!buffer) return INVALID_ARGUMENT;
    if (strlen(text) >= length) return INSUFFICIENT_SIZE;
    memcpy(buffer, text, strlen(text) + 1);
    return SUCCESS;
}

int get_u64(const struct unit *unit, enum value_name name, unsigned long long *to) {
    if (!to) return INVALID_ARGUMENT;
    if (!unit->values[name].known) return NOT_SUPPORTED;
    *to = (unsigned long long)now_of(&unit->values[name], seconds_of_scenario());
    return SUCCESS;
}

int get_u32(const struct unit *unit, enum value_name name, unsigned *to) {
    unsigned long long value = 0;
    int code = to ? get_u64(unit, name, &value) : INVALID_ARGUMENT;
    if (code == SUCCESS) *to = (unsigned)value;
    return code;
}
