/* Events: each is returned once to each set that registered its GPU before the event was written. */

#include "fake.h"

#include <stdlib.h>
#include <string.h>

enum { POLL_MS = 10 };

struct registration {
    struct handle *handle;
    unsigned long long types;
    long long last; /* the last returned sequence number */
};

struct event_set {
    struct event_set *next;
    int freed; /* kept to detect use after free */
    struct registration registrations[MAX_GPUS];
    unsigned count;
};

static struct event_set *sets;

static int is_set(const struct event_set *set) {
    for (const struct event_set *known = sets; known; known = known->next)
        if (known == set) return !known->freed;
    return 0;
}

NVML nvmlEventSetCreate(struct event_set **set) {
    ENTER_ANY();
    struct event_set *made = calloc(1, sizeof *made);
    if (!made) LEAVE(MEMORY_ERROR);
    made->next = sets;
    *set = sets = made;
    LEAVE(SUCCESS);
}

NVML nvmlEventSetFree(struct event_set *set) {
    ENTER_ANY();
    if (!is_set(set)) LEAVE(INVALID_ARGUMENT);
    set->freed = 1;
    LEAVE(SUCCESS);
}

NVML nvmlDeviceRegisterEvents(struct handle *handle, unsigned long long types, struct event_set *set) {
    ENTER(handle);
    if (!is_set(set) || set->count == MAX_GPUS) LEAVE(INVALID_ARGUMENT);
    unsigned long long supported;
    int code = get_u64(visit.unit, V_event_types, &supported);
    if (code != SUCCESS) LEAVE(code);
    if (types & ~supported) LEAVE(NOT_SUPPORTED);
    struct registration *made = &set->registrations[set->count++];
    *made = (struct registration){handle, types, 0};
    for (size_t i = 0; i < scenario->event_count; i++)
        if (scenario->events[i].sequence > made->last) made->last = scenario->events[i].sequence;
    LEAVE(SUCCESS);
}

/* The oldest event that the set has not returned. */
static const struct event *next_event(const struct event_set *set, struct registration **of) {
    const struct event *next = NULL;
    for (size_t i = 0; i < scenario->event_count; i++) {
        const struct event *event = &scenario->events[i];
        for (unsigned j = 0; j < set->count; j++) {
            const struct registration *registration = &set->registrations[j];
            if (strcmp(event->uuid, registration->handle->uuid) || !(event->type & registration->types)) continue;
            if (event->sequence <= registration->last || (next && next->sequence <= event->sequence)) continue;
            next = event;
            *of = (struct registration *)registration;
        }
    }
    return next;
}

struct event_data {
    struct handle *handle;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance; /* not in the first version */
};

static int wait_for_event(struct visit *visit, struct event_set *set, struct event_data *data, unsigned ms, int both) {
    unsigned long long end = epoch_us() + ms * 1000ULL;
    for (;;) {
        if (scenario->broken) return scenario->broken;
        if (!is_set(set)) return INVALID_ARGUMENT;
        struct registration *of = NULL;
        const struct event *event = next_event(set, &of);
        if (event) {
            of->last = event->sequence;
            data->handle = of->handle;
            data->type = event->type;
            data->data = event->data;
            if (both) data->gpu_instance = event->gpu_instance, data->compute_instance = event->compute_instance;
            return SUCCESS;
        }
        if (epoch_us() >= end) return TIMEOUT;
        pause_ms(visit, POLL_MS, 0);
    }
}

NVML nvmlEventSetWait(struct event_set *set, struct event_data *data, unsigned ms) {
    ENTER_ANY();
    LEAVE(wait_for_event(&visit, set, data, ms, 0));
}

NVML nvmlEventSetWait_v2(struct event_set *set, struct event_data *data, unsigned ms) {
    ENTER_ANY();
    LEAVE(wait_for_event(&visit, set, data, ms, 1));
}
