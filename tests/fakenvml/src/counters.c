/* Fields, memory faults and PCIe throughput. */

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

NVML nvmlDeviceGetTotalEccErrors(struct handle *handle, unsigned uncorrected, unsigned aggregate,
                                 unsigned long long *count) {
    ENTER(handle);
    if (uncorrected > 1 || aggregate) LEAVE(INVALID_ARGUMENT);
    LEAVE(get_u64(visit.unit, (enum value_name)(V_ecc_corrected + uncorrected), count));
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
NVML nvmlDeviceGetRetiredPages(struct handle *handle, unsigned cause, unsigned *count, unsigned long long *addresses) {
    ENTER(handle);
    unsigned pages, room = *count;
    if (cause > 1) LEAVE(INVALID_ARGUMENT);
    int code = get_u32(visit.unit, (enum value_name)(V_pages_single_bit + cause), &pages);
    if (code != SUCCESS) LEAVE(code);
    *count = pages;
    if (pages && (room < pages || !addresses)) LEAVE(INSUFFICIENT_SIZE);
    for (unsigned i = 0; i < pages; i++) addresses[i] = 0x1000ULL * (i + 1);
    LEAVE(SUCCESS);
}

NVML nvmlDeviceGetPcieThroughput(struct handle *handle, unsigned counter, unsigned *kib_per_s) {
    ENTER(handle);
    if (counter > 1) LEAVE(INVALID_ARGUMENT);
    pause_ms(&visit, PCIE_MS, 1); /* the driver measures for this time */
    if (visit.code != GO_ON) LEAVE(visit.code);
    LEAVE(get_u32(visit.unit, (enum value_name)(V_pcie_tx_kib_s + counter), kib_per_s));
}
