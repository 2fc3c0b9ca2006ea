/* GPM: metrics over the time between two samples, at least 100 ms apart. */

#include "fake.h"

#include <stdlib.h>
#include <string.h>

enum { METRIC_IDS = 512, LEAST_US = 100000 };

struct gpm_sample {
    char uuid[UUID_SIZE]; /* empty before the first sample */
    unsigned long long time_us;
    int known[METRIC_IDS];
    double values[METRIC_IDS];
};

struct gpm_metric {
    unsigned id;
    int code;
    double value;
    const char *short_name, *long_name, *unit;
};

struct gpm_get {
    unsigned version, count;
    struct gpm_sample *first, *second;
    struct gpm_metric metrics[];
};

struct gpm_support {
    unsigned version, supported;
};

static int has_gpm(const struct unit *unit) {
    for (size_t i = 0; i < unit->keyed_count; i++)
        if (unit->keyed[i].kind == GPM) return 1;
    return 0;
}

NVML nvmlGpmQueryDeviceSupport(struct handle *handle, struct gpm_support *support) {
    ENTER(handle);
    if (support->version != 1) LEAVE(VERSION_MISMATCH);
    support->supported = (unsigned)has_gpm(visit.unit);
    LEAVE(SUCCESS);
}

NVML nvmlGpmSampleAlloc(struct gpm_sample **sample) {
    ENTER_ANY();
    *sample = calloc(1, sizeof **sample);
    LEAVE(*sample ? SUCCESS : MEMORY_ERROR);
}

NVML nvmlGpmSampleFree(struct gpm_sample *sample) {
    ENTER_ANY();
    free(sample);
    LEAVE(SUCCESS);
}

static int take(const struct unit *unit, struct gpm_sample *sample) {
    if (!sample) return INVALID_ARGUMENT;
    if (!has_gpm(unit)) return NOT_SUPPORTED;
    memset(sample, 0, sizeof *sample);
    memcpy(sample->uuid, unit->uuid, sizeof sample->uuid);
    sample->time_us = epoch_us();
    for (size_t i = 0; i < unit->keyed_count; i++) {
        const struct keyed *keyed = &unit->keyed[i];
        if (keyed->kind != GPM || keyed->id >= METRIC_IDS || keyed->code) continue;
        sample->known[keyed->id] = 1;
        sample->values[keyed->id] = exactly_now_of(&keyed->number, seconds_of_scenario());
    }
    return SUCCESS;
}

NVML nvmlGpmSampleGet(struct handle *handle, struct gpm_sample *sample) {
    ENTER(handle);
    LEAVE(take(visit.unit, sample));
}

NVML nvmlGpmMigSampleGet(struct handle *handle, unsigned gpu_instance, struct gpm_sample *sample) {
    ENTER(handle);
    int place = (int)(visit.unit - scenario->units);
    for (size_t i = 0; i < scenario->unit_count; i++) {
        unsigned id;
        if (scenario->units[i].parent == place && get_u32(&scenario->units[i], V_gpu_instance, &id) == SUCCESS &&
            id == gpu_instance)
            LEAVE(take(&scenario->units[i], sample));
    }
    LEAVE(INVALID_ARGUMENT);
}

/* The mean of both samples, which is exact for linear changes. */
NVML nvmlGpmMetricsGet(struct gpm_get *get) {
    ENTER_ANY();
    if (get->version != 1) LEAVE(VERSION_MISMATCH);
    const struct gpm_sample *first = get->first, *second = get->second;
    if (!first || !second || !*first->uuid || strcmp(first->uuid, second->uuid)) LEAVE(INVALID_ARGUMENT);
    if (second->time_us < first->time_us + LEAST_US) LEAVE(INVALID_ARGUMENT);
    for (unsigned i = 0; i < get->count; i++) {
        struct gpm_metric *metric = &get->metrics[i];
        count_id("gpm", metric->id);
        int known = metric->id < METRIC_IDS && first->known[metric->id] && second->known[metric->id];
        metric->code = known ? SUCCESS : NOT_SUPPORTED;
        if (known) metric->value = (first->values[metric->id] + second->values[metric->id]) / 2;
    }
    LEAVE(SUCCESS);
}
