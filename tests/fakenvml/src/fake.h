/* A fake of the NVIDIA driver library with values from a scenario file. Declares only what is needed,
 * with the layouts of the Python binding. */

#ifndef FAKE_H
#define FAKE_H

#include <stddef.h>

#define NVML __attribute__((visibility("default"))) int

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10,
    GPU_IS_LOST = 15,
    MEMORY_ERROR = 20,
    VERSION_MISMATCH = 25,
    UNKNOWN = 999,
    GO_ON = -1, /* not a driver code: the call may proceed */
};

enum { UUID_SIZE = 96, MAX_GPUS = 64, ALL = -1 };

/* A number that may change with time: base + fraction + rate * seconds since the start of the scenario. */
struct number {
    int known;
    long long base;
    double fraction, rate;
};

/* Names of plain values in the scenario. A missing value is not supported. */
#define VALUES(X)                                                                                                      \
    X(pci_device_id) X(memory_total) X(memory_used) X(memory_reserved) X(utilization) X(memory_utilization)            \
    X(temperature_c) X(clock_graphics_mhz) X(clock_sm_mhz) X(clock_memory_mhz) X(clock_video_mhz) X(power_mw)          \
    X(power_limit_mw) X(energy_mj) X(event_reasons) X(ecc_corrected) X(ecc_uncorrected) X(rows_corrected)              \
    X(rows_uncorrected) X(rows_pending) X(rows_failure) X(pages_single_bit) X(pages_double_bit) X(pages_pending)       \
    X(pcie_replays) X(pcie_generation) X(pcie_generation_max) X(pcie_width) X(pcie_width_max) X(pcie_tx_kib_s)         \
    X(pcie_rx_kib_s) X(fan_percent) X(persistence) X(mig_mode) X(mig_max) X(event_types) X(gpu_instance)               \
    X(compute_instance) X(compute_capability)

enum value_name {
#define X(name) V_##name,
    VALUES(X)
#undef X
    VALUE_COUNT
};

/* Numbers with an id. */
enum kind { FIELD, GPM };

struct keyed {
    enum kind kind;
    unsigned id;
    long long scope; /* ALL: any scope */
    int type;        /* of a field: nvmlValueType_t */
    int code;        /* returned instead of the number when not 0 */
    struct number number;
};

enum process_kind { COMPUTE, GRAPHICS, MPS };

struct process {
    enum process_kind kind;
    unsigned pid;
    unsigned long long memory; /* all bits set: not available */
    unsigned sm, memory_util;
    unsigned gpu_instance, compute_instance;
    double age; /* of a sample that is always returned; 0 for ordinary ones */
};

/* One GPU, or one MIG instance of it. */
struct unit {
    char uuid[UUID_SIZE], name[UUID_SIZE];
    unsigned domain, bus, device;
    int parent; /* index of the GPU of an instance among the units; -1 for a GPU */
    unsigned slot;
    long partition; /* a change makes earlier instance handles stale */
    int state;      /* 0, or the result of every call about it */
    struct number values[VALUE_COUNT];
    struct keyed *keyed;
    size_t keyed_count;
    struct process *processes, *samples;
    size_t process_count, sample_count;
};

/* Behaviour of a function for one GPU ("*": for all, and for calls without a GPU). */
struct fault {
    char function[64], uuid[UUID_SIZE];
    int has_code, code, slow_ms, hang, race;
};

struct event {
    long long sequence;
    char uuid[UUID_SIZE];
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};

struct scenario {
    char driver[80];
    int cuda, init, broken, global_lock, field_max;
    double start, sample_period;
    struct unit *units;
    size_t unit_count;
    int visible[MAX_GPUS]; /* indices of visible GPUs among the units, in the order of their numbers */
    unsigned visible_count;
    struct fault *faults;
    size_t fault_count;
    struct event *events;
    size_t event_count;
};

/* Scenarios: scenario.c */
const char *setting(const char *name, char *text, size_t size);
struct scenario *parse_scenario(const char *text);
void free_scenario(struct scenario *scenario);
long long now_of(const struct number *number, double seconds);
double exactly_now_of(const struct number *number, double seconds);
const struct keyed *find_keyed(const struct unit *unit, enum kind kind, unsigned id, unsigned scope);
int find_unit(const struct scenario *scenario, const char *uuid);

/* Start and end of each call: call.c */
struct handle {
    char uuid[UUID_SIZE];
    int mig;
    long partition;
};

struct call;
struct visit {
    struct call *call;
    struct handle *handle;
    struct unit *unit; /* the unit of the call, or NULL; invalid after pause() */
    int code, has_driver;
    unsigned long long began;
};

struct call {
    const char *name;
    char *line;
    int counted; /* for which file */
};

extern struct scenario *scenario; /* the current scenario during a visit */
extern int users;                 /* nvmlInit calls without their nvmlShutdown */

struct visit enter(struct call *call, const char *name);
int about(struct visit *visit, struct handle *handle); /* GO_ON, or the result */
void pause_ms(struct visit *visit, int ms, int keep_driver);
int leave(struct visit *visit, int code);
struct handle *handle_of(const struct unit *unit);
int race(struct visit *visit);
double seconds_of_scenario(void);
unsigned long long epoch_us(void);
int put_text(char *buffer, unsigned length, const char *text);

/* Functions without a GPU, and functions about one. */
#define ENTER_ANY()                                                                                                    \
    static struct call self;                                                                                           \
    struct visit visit = enter(&self, __func__);                                                                       \
    if (visit.code == GO_ON) visit.code = about(&visit, NULL);                                                         \
    if (visit.code != GO_ON) return leave(&visit, visit.code)

#define ENTER(handle)                                                                                                  \
    static struct call self;                                                                                           \
    struct visit visit = enter(&self, __func__);                                                                       \
    if (visit.code == GO_ON && !(handle)) visit.code = INVALID_ARGUMENT;                                               \
    if (visit.code == GO_ON) visit.code = about(&visit, handle);                                                       \
    if (visit.code != GO_ON) return leave(&visit, visit.code)

#define LEAVE(code) return leave(&visit, code)

int get_u32(const struct unit *unit, enum value_name name, unsigned *to);
int get_u64(const struct unit *unit, enum value_name name, unsigned long long *to);

/* Number of calls of each function, for tests: count.c */
void open_counts(void);
void count_call(struct call *call);
void count_time(const struct call *call, unsigned long long ns);
void count_id(const char *what, unsigned id);

/* Processes: process.c */
size_t folder_processes_of(const struct unit *unit, struct process **found); /* the caller frees them */
void free_processes(struct process *list);

#endif
