/* GPUs with MIG instances. */

#include "fake.h"

static const struct unit *instance_in(const struct unit *gpu, unsigned slot) {
    int place = (int)(gpu - scenario->units);
    for (size_t i = 0; i < scenario->unit_count; i++)
        if (scenario->units[i].parent == place && scenario->units[i].slot == slot) return &scenario->units[i];
    return NULL;
}

NVML nvmlDeviceGetMigMode(struct handle *handle, unsigned *current, unsigned *pending) {
    ENTER(handle);
    int code = get_u32(visit.unit, V_mig_mode, current);
    if (code == SUCCESS) *pending = *current;
    LEAVE(code);
}

NVML nvmlDeviceGetMaxMigDeviceCount(struct handle *handle, unsigned *count) {
    ENTER(handle);
    LEAVE(get_u32(visit.unit, V_mig_max, count));
}

NVML nvmlDeviceGetMigDeviceHandleByIndex(struct handle *handle, unsigned index, struct handle **instance) {
    ENTER(handle);
    unsigned most;
    int code = get_u32(visit.unit, V_mig_max, &most);
    if (code != SUCCESS) LEAVE(code);
    if (index >= most || !instance) LEAVE(INVALID_ARGUMENT);
    const struct unit *found = instance_in(visit.unit, index);
    if (!found) LEAVE(NOT_FOUND);
    *instance = handle_of(found);
    LEAVE(SUCCESS);
}

NVML nvmlDeviceGetGpuInstanceId(struct handle *handle, unsigned *id) {
    ENTER(handle);
    LEAVE(get_u32(visit.unit, V_gpu_instance, id));
}
