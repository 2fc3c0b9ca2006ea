/* Processes on a GPU: those of the scenario, and running ones with a file in the directory FAKENVML_PROCESSES. */

#include "fake.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void append(struct process **list, size_t *count, struct process process) {
    struct process *grown = realloc(*list, (*count + 1) * sizeof *grown);
    if (!grown) abort();
    grown[(*count)++] = process;
    *list = grown;
}

void free_processes(struct process *list) { free(list); }

/* Lines of the file of a process: UUID, bytes, percentage of multiprocessor time. */
static void read_lines(const char *path, unsigned pid, const char *uuid, struct process **list, size_t *count) {
    FILE *file = fopen(path, "re");
    if (!file) return;
    char line[256], found[UUID_SIZE];
    unsigned long long bytes;
    unsigned percent;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "%95s %llu %u", found, &bytes, &percent) == 3 && !strcmp(found, uuid))
            append(list, count, (struct process){.kind = COMPUTE, .pid = pid, .memory = bytes, .sm = percent});
    fclose(file);
}

/* A zombie is no longer on a GPU. */
static int lives(long pid) {
    char path[64], text[512];
    if (kill((pid_t)pid, 0) && errno == ESRCH) return 0;
    snprintf(path, sizeof path, "/proc/%ld/stat", pid);
    FILE *file = fopen(path, "re");
    if (!file) return 1;
    size_t size = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[size] = 0;
    const char *state = strrchr(text, ')');
    return !state || !state[1] || (state[2] != 'Z' && state[2] != 'X');
}

size_t folder_processes_of(const struct unit *unit, struct process **found) {
    size_t count = 0;
    *found = NULL;
    char place[4096];
    const char *folder = setting("FAKENVML_PROCESSES", place, sizeof place);
    DIR *open = folder ? opendir(folder) : NULL;
    if (!open) return 0;
    for (struct dirent *entry; (entry = readdir(open));) {
        char *end, path[sizeof place + sizeof entry->d_name];
        long pid = strtol(entry->d_name, &end, 10);
        if (*end || pid <= 0 || !lives(pid)) continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        read_lines(path, (unsigned)pid, unit->uuid, found, &count);
    }
    closedir(open);
    return count;
}

/* All processes of a unit. For a MIG GPU, also those of its instances. */
static size_t everything_on(const struct unit *unit, struct process **found) {
    size_t count = folder_processes_of(unit, found);
    for (size_t i = 0; i < unit->process_count; i++) append(found, &count, unit->processes[i]);
    unsigned long long gpu_instance = UINT32_MAX, compute_instance = UINT32_MAX;
    get_u64(unit, V_gpu_instance, &gpu_instance);
    get_u64(unit, V_compute_instance, &compute_instance);
    for (size_t i = 0; i < count; i++) {
        (*found)[i].gpu_instance = (unsigned)gpu_instance;
        (*found)[i].compute_instance = (unsigned)compute_instance;
    }
    int place = (int)(unit - scenario->units);
    for (size_t i = 0; i < scenario->unit_count; i++) {
        if (scenario->units[i].parent != place) continue;
        struct process *inner;
        size_t inner_count = everything_on(&scenario->units[i], &inner);
        for (size_t j = 0; j < inner_count; j++) append(found, &count, inner[j]);
        free(inner);
    }
    return count;
}

struct process_info {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
};

/* The record of functions without a version suffix. A caller that expects the longer record reads garbage. */
struct process_info_v1 {
    unsigned pid;
    unsigned long long memory;
};

static int running(struct visit *visit, enum process_kind kind, unsigned *count, void *infos, int version) {
    if (!count || (*count && !infos)) return INVALID_ARGUMENT;
    struct process *found;
    size_t all = everything_on(visit->unit, &found);
    unsigned room = *count, wanted = 0;
    for (size_t i = 0; i < all; i++) {
        if (found[i].kind != kind) continue;
        if (wanted++ >= room) continue;
        if (version == 1)
            ((struct process_info_v1 *)infos)[wanted - 1] = (struct process_info_v1){found[i].pid, found[i].memory};
        else
            ((struct process_info *)infos)[wanted - 1] = (struct process_info){
                found[i].pid, found[i].memory, found[i].gpu_instance, found[i].compute_instance,
            };
    }
    free(found);
    *count = wanted;
    return wanted > room || (room && race(visit)) ? INSUFFICIENT_SIZE : SUCCESS;
}

#define RUNNING(function, kind, version)                                                                               \
    NVML function(struct handle *handle, unsigned *count, void *infos) {                                               \
        ENTER(handle);                                                                                                 \
        LEAVE(running(&visit, kind, count, infos, version));                                                           \
    }

RUNNING(nvmlDeviceGetComputeRunningProcesses, COMPUTE, 1)
RUNNING(nvmlDeviceGetComputeRunningProcesses_v2, COMPUTE, 2)
RUNNING(nvmlDeviceGetComputeRunningProcesses_v3, COMPUTE, 3)
RUNNING(nvmlDeviceGetGraphicsRunningProcesses, GRAPHICS, 1)
RUNNING(nvmlDeviceGetGraphicsRunningProcesses_v2, GRAPHICS, 2)
RUNNING(nvmlDeviceGetGraphicsRunningProcesses_v3, GRAPHICS, 3)
RUNNING(nvmlDeviceGetMPSComputeRunningProcesses, MPS, 1)
RUNNING(nvmlDeviceGetMPSComputeRunningProcesses_v2, MPS, 2)
RUNNING(nvmlDeviceGetMPSComputeRunningProcesses_v3, MPS, 3)

/* One sample of each busy process, if taken after the given time, and all stale samples. */
static size_t samples_since(const struct unit *unit, unsigned long long since, struct process **found,
                            unsigned long long *time) {
    double period = scenario->sample_period, now = (double)epoch_us() / 1e6;
    *time = (unsigned long long)((double)(long long)(now / period) * period * 1e6);
    struct process *all;
    size_t all_count = everything_on(unit, &all), count = 0;
    *found = NULL;
    for (size_t i = 0; i < all_count; i++)
        if (all[i].sm && *time > since) append(found, &count, all[i]);
    free(all);
    for (size_t i = 0; i < unit->sample_count; i++) append(found, &count, unit->samples[i]);
    return count;
}

static unsigned long long time_of(const struct process *sample, unsigned long long time) {
    return sample->age > 0 ? time - (unsigned long long)(sample->age * 1e6) : time;
}

struct sample {
    unsigned pid;
    unsigned long long time;
    unsigned sm, memory, encoder, decoder;
};

NVML nvmlDeviceGetProcessUtilization(struct handle *handle, struct sample *samples, unsigned *count,
                                     unsigned long long since) {
    ENTER(handle);
    if (!count) LEAVE(INVALID_ARGUMENT);
    if (!visit.unit->values[V_utilization].known) LEAVE(NOT_SUPPORTED); /* MIG instances have none */
    struct process *found;
    unsigned long long time;
    unsigned all = (unsigned)samples_since(visit.unit, since, &found, &time), room = samples ? *count : 0;
    int code = !all ? NOT_FOUND : all > room || race(&visit) ? INSUFFICIENT_SIZE : SUCCESS;
    for (unsigned i = 0; code == SUCCESS && i < all; i++)
        samples[i] = (struct sample){found[i].pid, time_of(&found[i], time), found[i].sm, found[i].memory_util, 0, 0};
    *count = all;
    free(found);
    LEAVE(code);
}
