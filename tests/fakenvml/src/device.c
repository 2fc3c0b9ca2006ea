/* The library itself, the list of GPUs, and their plain values. */

#include "fake.h"

#include <stdio.h>
#include <string.h>

static int begin_use(struct visit *visit) {
    int code = visit->code;
    if (code == GO_ON) code = about(visit, NULL);
    if (code == GO_ON) code = scenario->init;
    if (code == SUCCESS) users++;
    return leave(visit, code);
}

NVML nvmlInit_v2(void) {
    static struct call self;
    struct visit visit = enter(&self, __func__);
    return begin_use(&visit);
}

NVML nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    static struct call self;
    struct visit visit = enter(&self, __func__);
    return begin_use(&visit);
}

NVML nvmlShutdown(void) {
    ENTER_ANY();
    users--;
    LEAVE(SUCCESS);
}

#define WORDS __attribute__((visibility("default"))) const char *

WORDS nvmlErrorString(int code) {
    static const char *const words[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded",
        "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found",
        "Corrupted infoROM", "GPU is lost", "GPU requires reset",
        "The operating system has blocked the request.", "RM has detected an NVML/RM version mismatch.",
        "In use by another client", "Insufficient Memory", "No data",
    };
    return code >= 0 && code < (int)(sizeof words / sizeof *words) ? words[code] : "Unknown Error";
}

NVML nvmlSystemGetDriverVersion(char *version, unsigned length) {
    ENTER_ANY();
    LEAVE(put_text(version, length, scenario->driver));
}

NVML nvmlSystemGetCudaDriverVersion_v2(int *version) {
    ENTER_ANY();
    *version = scenario->cuda;
    LEAVE(SUCCESS);
}

NVML nvmlDeviceGetCount_v2(unsigned *count) {
    ENTER_ANY();
    *count = scenario->visible_count;
    LEAVE(SUCCESS);
}

static const struct unit *visible(unsigned i) { return &scenario->units[scenario->visible[i]]; }

NVML nvmlDeviceGetHandleByIndex_v2(unsigned index, struct handle **handle) {
    static struct call self;
    struct visit visit = enter(&self, __func__);
    if (visit.code != GO_ON) return leave(&visit, visit.code);
    if (index >= scenario->visible_count || !handle) LEAVE(INVALID_ARGUMENT);
    struct handle *found = handle_of(visible(index));
    int code = about(&visit, found);
    if (code != GO_ON) LEAVE(code);
    *handle = found;
    LEAVE(SUCCESS);
}

NVML nvmlDeviceGetName(struct handle *handle, char *name, unsigned length) {
    ENTER(handle);
    LEAVE(put_text(name, length, visit.unit->name));
}

NVML nvmlDeviceGetUUID(struct handle *handle, char *uuid, unsigned length) {
    ENTER(handle);
    LEAVE(put_text(uuid, length, visit.unit->uuid));
}

static const struct unit *gpu_of(const struct unit *unit) {
    return unit->parent >= 0 ? &scenario->units[unit->parent] : unit;
}

struct pci_info {
    char old_bus_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

NVML nvmlDeviceGetPciInfo_v3(struct handle *handle, struct pci_info *info) {
    ENTER(handle);
    const struct unit *gpu = gpu_of(visit.unit);
    memset(info, 0, sizeof *info);
    info->domain = gpu->domain;
    info->bus = gpu->bus;
    info->device = gpu->device;
    get_u32(gpu, V_pci_device_id, &info->device_id);
    snprintf(info->old_bus_id, sizeof info->old_bus_id, "%04X:%02X:%02X.0", gpu->domain & 0xffff, gpu->bus & 0xff,
             gpu->device & 0xff);
    snprintf(info->bus_id, sizeof info->bus_id, "%08X:%02X:%02X.0", gpu->domain, gpu->bus, gpu->device);
    LEAVE(SUCCESS);
}

/* Processes with a file add memory and time to the values of the scenario. */
static unsigned long long processes_memory(const struct unit *unit) {
    struct process *found;
    unsigned long long sum = 0;
    size_t count = folder_processes_of(unit, &found);
    for (size_t i = 0; i < count; i++) sum += found[i].memory;
    free_processes(found);
    return sum;
}

static unsigned processes_percent(const struct unit *unit) {
    struct process *found;
    unsigned sum = 0;
    size_t count = folder_processes_of(unit, &found);
    for (size_t i = 0; i < count; i++) sum += found[i].sm;
    free_processes(found);
    return sum;
}

struct memory {
    unsigned long long total, free, used;
};

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

/* The first version counts reserved memory as used. */
static int memory_of(const struct unit *unit, struct memory_v2 *memory) {
    int code = get_u64(unit, V_memory_total, &memory->total);
    if (code == SUCCESS) code = get_u64(unit, V_memory_used, &memory->used);
    if (code != SUCCESS) return code;
    if (get_u64(unit, V_memory_reserved, &memory->reserved) != SUCCESS) memory->reserved = 0;
    memory->used += processes_memory(unit);
    unsigned long long most = memory->total > memory->reserved ? memory->total - memory->reserved : 0;
    if (memory->used > most) memory->used = most;
    memory->free = most - memory->used;
    return SUCCESS;
}

NVML nvmlDeviceGetMemoryInfo(struct handle *handle, struct memory *memory) {
    ENTER(handle);
    struct memory_v2 now;
    int code = memory_of(visit.unit, &now);
    if (code == SUCCESS) *memory = (struct memory){now.total, now.free, now.total - now.free};
    LEAVE(code);
}

NVML nvmlDeviceGetMemoryInfo_v2(struct handle *handle, struct memory_v2 *memory) {
    ENTER(handle);
    if (memory->version != (sizeof *memory | 2 << 24)) LEAVE(VERSION_MISMATCH);
    LEAVE(memory_of(visit.unit, memory));
}

struct utilization {
    unsigned gpu, memory;
};

NVML nvmlDeviceGetUtilizationRates(struct handle *handle, struct utilization *rates) {
    ENTER(handle);
    int code = get_u32(visit.unit, V_utilization, &rates->gpu);
    if (code == SUCCESS && get_u32(visit.unit, V_memory_utilization, &rates->memory) != SUCCESS) rates->memory = 0;
    if (code == SUCCESS) rates->gpu += processes_percent(visit.unit);
    if (code == SUCCESS && rates->gpu > 100) rates->gpu = 100;
    LEAVE(code);
}

NVML nvmlDeviceGetTemperature(struct handle *handle, unsigned sensor, unsigned *temperature) {
    ENTER(handle);
    if (sensor) LEAVE(INVALID_ARGUMENT);
    LEAVE(get_u32(visit.unit, V_temperature_c, temperature));
}

struct temperature {
    unsigned version, sensor;
    int temperature;
};

NVML nvmlDeviceGetTemperatureV(struct handle *handle, struct temperature *temperature) {
    ENTER(handle);
    if (temperature->version != (sizeof *temperature | 1 << 24)) LEAVE(VERSION_MISMATCH);
    if (temperature->sensor) LEAVE(INVALID_ARGUMENT);
    LEAVE(get_u32(visit.unit, V_temperature_c, (unsigned *)&temperature->temperature));
}

NVML nvmlDeviceGetClockInfo(struct handle *handle, unsigned clock, unsigned *mhz) {
    ENTER(handle);
    if (clock > 3) LEAVE(INVALID_ARGUMENT);
    LEAVE(get_u32(visit.unit, (enum value_name)(V_clock_graphics_mhz + clock), mhz));
}

NVML nvmlDeviceGetCudaComputeCapability(struct handle *handle, int *major, int *minor) {
    ENTER(handle);
    unsigned both;
    int code = get_u32(visit.unit, V_compute_capability, &both);
    if (code == SUCCESS) *major = (int)both / 10, *minor = (int)both % 10;
    LEAVE(code);
}

/* Functions that return one number. */
#define GIVES(function, type, get, value)                                                                              \
    NVML function(struct handle *handle, type *to) {                                                                   \
        ENTER(handle);                                                                                                 \
        LEAVE(get(visit.unit, V_##value, to));                                                                         \
    }
#define GIVES_U32(function, value) GIVES(function, unsigned, get_u32, value)
#define GIVES_U64(function, value) GIVES(function, unsigned long long, get_u64, value)

GIVES_U32(nvmlDeviceGetPowerUsage, power_mw)
GIVES_U32(nvmlDeviceGetEnforcedPowerLimit, power_limit_mw)
GIVES_U64(nvmlDeviceGetTotalEnergyConsumption, energy_mj)
GIVES_U64(nvmlDeviceGetCurrentClocksEventReasons, event_reasons)
GIVES_U64(nvmlDeviceGetCurrentClocksThrottleReasons, event_reasons)
GIVES_U64(nvmlDeviceGetSupportedEventTypes, event_types)
GIVES_U32(nvmlDeviceGetFanSpeed, fan_percent)
GIVES_U32(nvmlDeviceGetPersistenceMode, persistence)
GIVES_U32(nvmlDeviceGetRetiredPagesPendingStatus, pages_pending)
GIVES_U32(nvmlDeviceGetPcieReplayCounter, pcie_replays)
GIVES_U32(nvmlDeviceGetCurrPcieLinkGeneration, pcie_generation)
GIVES_U32(nvmlDeviceGetMaxPcieLinkGeneration, pcie_generation_max)
GIVES_U32(nvmlDeviceGetCurrPcieLinkWidth, pcie_width)
GIVES_U32(nvmlDeviceGetMaxPcieLinkWidth, pcie_width_max)
