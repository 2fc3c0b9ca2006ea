/* Fields, violations, memory faults and link counters. */

#include "fake.h"

enum { PCIE_MS = 20 };

union field_number {
    double d;
    unsigned u;
    unsigned long long ull;
    int i;
    unsigned short us;
};

struct field_value {
    unsigned id, scope;
    long long timestamp, latency;
    unsigned type;
    int code;
    union field_number value;
};

static union field_number in_type(const struct keyed *keyed, double seconds) {
    union field_number value = {.ull = 0};
    long long now = now_of(&keyed->number, seconds);
    switch (keyed->type) {
    case 0: value.d = exactly_now_of(&keyed->number, seconds); break;
    case 1: value.u = (unsigned)now; break;
    case 5: value.i = (int)now; break;
    case 6: value.us = (unsigned short)now; break;
    default: value.ull = (unsigned long long)now;
    }
    return value;
}

NVML nvmlDeviceGetFieldValues(struct handle *handle, int count, struct field_value *values) {
    ENTER(handle);
    if (count < 1 || !values) LEAVE(INVALID_ARGUMENT);
    for (int i = 0; i < count; i++) {
        struct field_value *value = &values[i];
        const struct keyed *keyed = find_keyed(visit.unit, FIELD, value->id, value->scope);
        count_id("field", value->id);
        value->timestamp = (long long)epoch_us();
        value->latency = 0;
        int known = value->id && value->id < (unsigned)scenario->field_max;
        value->code = keyed ? keyed->code : known ? NOT_SUPPORTED : INVALID_ARGUMENT;
        if (value->code != SUCCESS) continue;
        value->type = (unsigned)keyed->type;
        value->value = in_type(keyed, seconds_of_scenario());
    }
    LEAVE(SUCCESS);
}

static int give_keyed(const struct visit *visit, enum kind kind, unsigned id, unsigned scope, unsigned long long *to) {
    const struct keyed *keyed = find_keyed(visit->unit, kind, id, scope);
    if (!keyed) return NOT_SUPPORTED;
    if (keyed->code == SUCCESS) *to = (unsigned long long)now_of(&keyed->number, seconds_of_scenario());
    return keyed->code;
}

struct violation {
    unsigned long long reference_us, violation_ns;
};

NVML nvmlDeviceGetViolationStatus(struct handle *handle, unsigned policy, struct violation *violation) {
    ENTER(handle);
    violation->reference_us = epoch_us();
    LEAVE(give_keyed(&visit, VIOLATION, policy, 0, &violation->violation_ns));
}

NVML nvmlDeviceGetTotalEccErrors(struct handle *handle, unsigned uncorrected, unsigned aggregate,
                                 unsigned long long *count) {
    ENTER(handle);
    if (uncorrected > 1 || aggregate > 1) LEAVE(INVALID_ARGUMENT);
    LEAVE(get_u64(visit.unit, (enum value_name)(V_ecc_corrected + uncorrected + 2 * aggregate), count));
}

NVML nvmlDeviceGetEccMode(struct handle *handle, unsigned *current, unsigned *pending) {
    ENTER(handle);
    int code = get_u32(visit.unit, V_ecc_mode, current);
    if (code == SUCCESS) *pending = *current;
    LEAVE(code);
}

NVML nvmlDeviceGetRemappedRows(struct handle *handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                               unsigned *failure) {
    ENTER(handle);
    unsigned *const to[] = {corrected, uncorrected, pending, failure};
    for (int i = 0; i < 4; i++) {
        int code = get_u32(visit.unit, (enum value_name)(V_rows_corrected + i), to[i]);
        if (code != SUCCESS) LEAVE(code);
    }
    LEAVE(SUCCESS);
}

/* Only the number of addresses matters. */
static int retired(const struct visit *visit, unsigned cause, unsigned *count, unsigned long long *addresses,
                   unsigned long long *times) {
    unsigned pages, room = *count;
    if (cause > 1) return INVALID_ARGUMENT;
    int code = get_u32(visit->unit, (enum value_name)(V_pages_single_bit + cause), &pages);
    if (code != SUCCESS) return code;
    *count = pages;
    if (!pages) return SUCCESS;
    if (room < pages || !addresses) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < pages; i++) {
        addresses[i] = 0x1000ULL * (i + 1);
        if (times) times[i] = epoch_us();
    }
    return SUCCESS;
}

NVML nvmlDeviceGetRetiredPages(struct handle *handle, unsigned cause, unsigned *count, unsigned long long *addresses) {
    ENTER(handle);
    LEAVE(retired(&visit, cause, count, addresses, NULL));
}

NVML nvmlDeviceGetRetiredPages_v2(struct handle *handle, unsigned cause, unsigned *count,
                                  unsigned long long *addresses, unsigned long long *times) {
    ENTER(handle);
    LEAVE(retired(&visit, cause, count, addresses, times));
}

NVML nvmlDeviceGetPcieThroughput(struct handle *handle, unsigned counter, unsigned *kib_per_s) {
    ENTER(handle);
    if (counter > 1) LEAVE(INVALID_ARGUMENT);
    pause_ms(&visit, PCIE_MS, 1); /* the driver measures for this time */
    if (visit.code != GO_ON) LEAVE(visit.code);
    LEAVE(get_u32(visit.unit, (enum value_name)(V_pcie_tx_kib_s + counter), kib_per_s));
}

NVML nvmlDeviceGetNvLinkState(struct handle *handle, unsigned link, unsigned *active) {
    ENTER(handle);
    unsigned long long state = 0;
    int code = give_keyed(&visit, NVLINK_STATE, link, 0, &state);
    *active = (unsigned)state;
    LEAVE(code);
}

NVML nvmlDeviceGetNvLinkErrorCounter(struct handle *handle, unsigned link, unsigned counter,
                                     unsigned long long *count) {
    ENTER(handle);
    LEAVE(give_keyed(&visit, NVLINK_ERROR, counter, link, count));
}
