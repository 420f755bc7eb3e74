/* A stand-in for NVIDIA's management library: GPUs that are not there, for trying out and for tests.
 *
 * Without more it shows eight GPUs that train in step: load, power, temperature and clocks move, every four minutes
 * there is a pause as for a checkpoint. The file named by EAGLE_EYE_SIMULATED_GPUS says otherwise. It is read again
 * whenever it has changed; replace it (rename) rather than write into it. One word or more a line, GPU numbers from 0:
 *
 *   gpus N              how many there are
 *   init CODE           nvmlInit answers with this return code
 *   steady              values stand still, all at half load
 *   pre-hopper          no GPU measures its own activity; wide-counters: but PCIe counters have 64 bits
 *   links N             NVLinks that each GPU has; 0: none; per-link: errors without totals, as on Hopper and newer
 *   absent G            is not listed
 *   lost G              answers "GPU is lost"
 *   answers G CODE      answers with this return code; closed G CODE: when it is opened
 *   recovery G ACTION   has the driver ask for this recovery action; without, the driver tells none
 *   fabric G STATE CODE has this state and status in its NVLink fabric; without, it has no fabric
 *   hang G              does not answer until the line is gone
 *   slow G MS           takes this long to tell its power
 *   bare G              has no reading but the temperature
 *   denied G            does not let us read power and processes
 *   flaky G             fails to tell its temperature
 *   throttle G          is too hot, and slow
 *   waiting G           runs a kernel that does no work: its peers do not come to the collective
 *   ecc G N             has N uncorrected errors of memory, and a row that waits to be remapped
 *   down G N            has N NVLinks down, each with three errors
 *   xid G CODE SERIAL   has the driver tell an XID to whoever is registered; once for each larger SERIAL
 *   mig G N             is divided into N instances
 *   process G PID MIB   a process computes there; MIB -1: the driver does not say how much it holds
 *
 * Compiled with -DOLD_DRIVER it lacks what drivers before 525 lack. Layouts and numbers: NVML API Reference.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#define GPUS_MAX 16
#define LINKS_MAX 18
#define EVENTS_MAX 64
#define PROCESSES_MAX 64
#define MIG_PLACES 7
#define MIG_HANDLES 1000 /* handles from here on are instances: 1000 + 10 * GPU + instance */

enum {
    OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10,
    LOST = 15, UNKNOWN = 999
};

typedef long device; /* GPU + 1: a handle is never null */
typedef unsigned long long u64;

const int eagle_eye_simulated = 1;

static struct state {
    int gpus, init, steady, pre_hopper, wide_counters, links, per_link;
    int absent[GPUS_MAX], lost[GPUS_MAX], hang[GPUS_MAX], slow_ms[GPUS_MAX], bare[GPUS_MAX], denied[GPUS_MAX];
    int flaky[GPUS_MAX], throttle[GPUS_MAX], waiting[GPUS_MAX], ecc[GPUS_MAX], down[GPUS_MAX], mig[GPUS_MAX];
    int answers[GPUS_MAX], closed[GPUS_MAX], recovery[GPUS_MAX], fabric[GPUS_MAX], fabric_status[GPUS_MAX];
    int events, processes;
    struct { int gpu, code, serial; } event[EVENTS_MAX];
    struct { int gpu, pid, mib; } process[PROCESSES_MAX];
} now = {.gpus = 8, .links = LINKS_MAX};

static double clock_s(clockid_t which) {
    struct timespec t;
    clock_gettime(which, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void sleep_ms(int ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&t, NULL);
}

static void parse_line(struct state *s, const char *line) {
    char word[32] = "";
    int a = 0, b = 0, c = 0, words = sscanf(line, "%31s %d %d %d", word, &a, &b, &c), g = a;
    if (words < 1) return;
    if (!strcmp(word, "gpus")) s->gpus = a < 0 ? 0 : a > GPUS_MAX ? GPUS_MAX : a;
    else if (!strcmp(word, "init")) s->init = a;
    else if (!strcmp(word, "steady")) s->steady = 1;
    else if (!strcmp(word, "pre-hopper")) s->pre_hopper = 1;
    else if (!strcmp(word, "wide-counters")) s->wide_counters = 1;
    else if (!strcmp(word, "per-link")) s->per_link = 1;
    else if (!strcmp(word, "links")) s->links = a < 0 ? 0 : a > LINKS_MAX ? LINKS_MAX : a;
    else if (words < 2 || g < 0 || g >= GPUS_MAX) fprintf(stderr, "simulated GPUs: not understood: %s", line);
    else if (!strcmp(word, "absent")) s->absent[g] = 1;
    else if (!strcmp(word, "lost")) s->lost[g] = 1;
    else if (!strcmp(word, "answers")) s->answers[g] = b;
    else if (!strcmp(word, "closed")) s->closed[g] = b;
    else if (!strcmp(word, "recovery")) s->recovery[g] = b + 1; /* 0: not told */
    else if (!strcmp(word, "fabric")) s->fabric[g] = b + 1, s->fabric_status[g] = c;
    else if (!strcmp(word, "hang")) s->hang[g] = 1;
    else if (!strcmp(word, "slow")) s->slow_ms[g] = b;
    else if (!strcmp(word, "bare")) s->bare[g] = 1;
    else if (!strcmp(word, "denied")) s->denied[g] = 1;
    else if (!strcmp(word, "flaky")) s->flaky[g] = 1;
    else if (!strcmp(word, "throttle")) s->throttle[g] = 1;
    else if (!strcmp(word, "waiting")) s->waiting[g] = 1;
    else if (!strcmp(word, "ecc")) s->ecc[g] = b;
    else if (!strcmp(word, "down")) s->down[g] = b;
    else if (!strcmp(word, "mig")) s->mig[g] = b > MIG_PLACES - 1 ? MIG_PLACES - 1 : b;
    else if (!strcmp(word, "xid") && s->events < EVENTS_MAX) {
        s->event[s->events].gpu = g, s->event[s->events].code = b, s->event[s->events++].serial = c;
    } else if (!strcmp(word, "process") && s->processes < PROCESSES_MAX) {
        s->process[s->processes].gpu = g, s->process[s->processes].pid = b, s->process[s->processes++].mib = c;
    } else fprintf(stderr, "simulated GPUs: not understood: %s", line);
}

/* Seconds of full load until t. Its differences over a time are the mean load in it, without anything to remember. */
static double loaded_s(int g, double t) {
    const double period = 240.0, pause = 6.0, swing = 6.2832 / 97.0;
    double in_period = fmod(t, period);
    double paused = floor(t / period) * pause + (in_period < pause ? in_period : pause);
    if (now.steady) return 0.5 * t;
    return 0.05 * t + 0.88 * (t - paused) - 0.03 / swing * cos(swing * t + g);
}

static double here_s(void) { return clock_s(CLOCK_REALTIME) - 1.7e9; }
/* Seconds of full load in which data moved: those in which the GPU was seen to wait are left out. */
static double stood_s[GPUS_MAX], stands_since_s[GPUS_MAX];
#define MOVED_S(g) ((now.waiting[g] ? stands_since_s[g] : loaded_s(g, here_s())) - stood_s[g])

/* Read the file again if it has changed. Threads that come at the same time see the state before or after it. */
static void refresh(void) {
    static volatile int reading;
    static struct stat seen;
    const char *path = getenv("EAGLE_EYE_SIMULATED_GPUS");
    struct stat found;
    struct state before, next = {.gpus = 8, .links = LINKS_MAX};
    if (!path || __sync_lock_test_and_set(&reading, 1)) return;
    memset(&found, 0, sizeof found);
    if (stat(path, &found) == 0 && (found.st_ino != seen.st_ino || found.st_mtim.tv_nsec != seen.st_mtim.tv_nsec
                                    || found.st_mtim.tv_sec != seen.st_mtim.tv_sec || found.st_size != seen.st_size)) {
        char line[256];
        FILE *file = fopen(path, "r");
        if (file) {
            while (fgets(line, sizeof line, file)) parse_line(&next, line);
            fclose(file);
            before = now;
            now = next;
            for (int g = 0; g < GPUS_MAX; g++) {
                if (now.waiting[g] && !before.waiting[g]) stands_since_s[g] = loaded_s(g, here_s());
                if (!now.waiting[g] && before.waiting[g]) stood_s[g] += loaded_s(g, here_s()) - stands_since_s[g];
            }
            seen = found;
        }
    }
    __sync_lock_release(&reading);
}

static double load(int g, double over_s) { return (loaded_s(g, here_s()) - loaded_s(g, here_s() - over_s)) / over_s; }
static double worked(int g, double mean_load) { return now.waiting[g] ? 0.0 : mean_load; }
/* Watts and degrees are those of a kernel that spins. */
static double warmed(int g, double mean_load) { return now.waiting[g] ? 0.1 * mean_load : mean_load; }

static int gpu_of(device d) { return d >= MIG_HANDLES ? (int)(d - MIG_HANDLES) / 10 : (int)d - 1; }

/* What a GPU answers to a reading that it has; it may take until its trouble is over. */
static int answer(device d) {
    static double looked_s;
    int g = gpu_of(d);
    double time_s = clock_s(CLOCK_MONOTONIC_COARSE);
    if (time_s != looked_s) {
        looked_s = time_s;
        refresh();
    }
    while (now.hang[g]) {
        sleep_ms(5);
        refresh();
    }
    if (now.answers[g]) return now.answers[g];
    return now.lost[g] ? LOST : now.bare[g] ? NOT_SUPPORTED : OK;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    refresh();
    return now.init;
}
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { (void)code; return "some other trouble"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "simulated"); return OK; }

int nvmlDeviceGetCount_v2(unsigned *n) {
    *n = 0;
    for (int g = 0; g < now.gpus; g++) *n += !now.absent[g];
    return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned place, device *d) {
    for (int g = 0; g < now.gpus; g++)
        if (!now.absent[g] && !place--) {
            *d = g + 1;
            return now.closed[g];
        }
    return INVALID;
}
int nvmlDeviceGetName(device d, char *text, unsigned size) {
    (void)d;
    snprintf(text, size, "Simulated H100 80GB HBM3");
    return OK;
}
int nvmlDeviceGetUUID(device d, char *text, unsigned size) {
    int instance = d >= MIG_HANDLES ? (int)(d - MIG_HANDLES) % 10 + 1 : 0;
    snprintf(text, size, "%s-51000000-0000-4000-8000-%04d%08d", instance ? "MIG" : "GPU", instance, gpu_of(d));
    return OK;
}
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(device d, struct pci *p) {
    memset(p, 0, sizeof *p);
    snprintf(p->bus_id, sizeof p->bus_id, "00000000:%02X:00.0", 0x10 + gpu_of(d));
    return OK;
}

struct utilization { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(device d, struct utilization *u) {
    refresh();
    if (answer(d) == OK && now.mig[gpu_of(d)]) return NOT_SUPPORTED;
    u->gpu = now.waiting[gpu_of(d)] ? 100 : (unsigned)lround(100.0 * load(gpu_of(d), 1.0));
    u->memory = (unsigned)lround(50.0 * worked(gpu_of(d), load(gpu_of(d), 1.0)));
    return answer(d);
}
struct memory { u64 total, available, used; };
int nvmlDeviceGetMemoryInfo(device d, struct memory *m) {
    m->total = 80ULL << 30;
    m->used = (61ULL << 30) + ((u64)gpu_of(d) << 24);
    m->available = m->total - m->used;
    return answer(d);
}
int nvmlDeviceGetPowerUsage(device d, unsigned *mw) {
    int g = gpu_of(d), code = answer(d);
    if (now.slow_ms[g]) sleep_ms(now.slow_ms[g]);
    *mw = (unsigned)(1e3 * (now.throttle[g] ? 250.0 : 90.0 + 590.0 * warmed(g, load(g, 1.0))));
    return now.denied[g] ? NO_PERMISSION : code;
}
int nvmlDeviceGetEnforcedPowerLimit(device d, unsigned *mw) { *mw = 700000; return answer(d); }
static double temperature(int g) { return now.throttle[g] ? 89.0 : 30.0 + 0.6 * g + 36.0 * warmed(g, load(g, 30.0)); }
int nvmlDeviceGetTemperature(device d, int sensor, unsigned *c) {
    int code = answer(d);
    (void)sensor;
    *c = (unsigned)lround(temperature(gpu_of(d)));
    return now.flaky[gpu_of(d)] ? UNKNOWN : code == LOST ? LOST : OK;
}
int nvmlDeviceGetClockInfo(device d, int clock, unsigned *mhz) {
    int g = gpu_of(d);
    *mhz = clock == 2 ? 2619 : now.throttle[g] ? 1200 : 1980 - 15 * (unsigned)(5.0 * load(g, 1.0));
    return answer(d);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(device d, u64 *mask) {
    *mask = now.throttle[gpu_of(d)] ? 0x48 : load(gpu_of(d), 1.0) < 0.2 ? 0x1 : 0x0;
    return answer(d);
}
int nvmlDeviceGetTotalEccErrors(device d, int kind, int since, u64 *n) {
    (void)since;
    *n = kind == 1 ? (u64)now.ecc[gpu_of(d)] : 0;
    return answer(d);
}
int nvmlDeviceGetCurrPcieLinkWidth(device d, unsigned *lanes) { *lanes = 16; return answer(d); }
int nvmlDeviceGetCurrPcieLinkGeneration(device d, unsigned *generation) { *generation = 5; return answer(d); }
int nvmlDeviceGetPcieReplayCounter(device d, unsigned *n) { *n = 0; return answer(d); }

/* Bytes a second at full load; over NVLink as many are sent as received. */
#define PCIE_SENT 2e9
#define PCIE_RECEIVED 4e9
#define NVLINK 2e11
#define COUNTED(gpu, bytes_a_second) ((u64)(MOVED_S(gpu) * (bytes_a_second)))

int nvmlDeviceGetPcieThroughput(device d, int direction, unsigned *kb) {
    sleep_ms(20);
    *kb = (unsigned)((direction ? PCIE_RECEIVED : PCIE_SENT) / 1e3 * worked(gpu_of(d), load(gpu_of(d), 1.0)));
    return answer(d);
}
int nvmlDeviceGetNvLinkState(device d, unsigned link, unsigned *active) {
    if (answer(d) == OK && link >= (unsigned)now.links) return NOT_SUPPORTED;
    *active = link >= (unsigned)now.down[gpu_of(d)];
    return answer(d);
}

struct field {
    unsigned id, scope;
    long long timestamp, latency;
    unsigned type, code;
    union { double real; unsigned small; u64 large; } value;
};
enum { UNSIGNED = 1, WIDE = 3 };

static void tell(struct field *f, unsigned type, u64 value) {
    f->code = OK;
    f->type = type;
    f->value.large = 0xa5a5a5a5a5a5a5a5; /* what the type leaves of the union is nobody's business */
    if (type == UNSIGNED) f->value.small = (unsigned)value;
    else f->value.large = value;
}
static void tell_field(int g, struct field *f) {
    int totals = now.links && !now.per_link;
    f->code = NOT_SUPPORTED;
    switch (f->id) {
    case 3: tell(f, WIDE, 0); break;
    case 4: tell(f, WIDE, (u64)now.ecc[g]); break;
    case 38: case 52: if (totals) tell(f, WIDE, 0); break;
    case 59: if (totals) tell(f, WIDE, 3 * (u64)now.down[g]); break;
    case 82: tell(f, UNSIGNED, (u64)lround(temperature(g)) + 9); break;
    case 94: tell(f, UNSIGNED, 0); break;
#ifndef OLD_DRIVER
    case 138: case 139: if (now.links) tell(f, WIDE, COUNTED(g, NVLINK / 1024.0)); break;
    case 142: case 143: tell(f, UNSIGNED, 0); break;
    case 144: tell(f, UNSIGNED, now.ecc[g] > 0); break;
    case 161: case 162: case 163:
        if (!now.per_link || f->scope >= (unsigned)now.links) break;
        tell(f, WIDE, f->id == 162 && f->scope < (unsigned)now.down[g] ? 3 : 0);
        break;
    case 197: tell(f, now.wide_counters ? WIDE : UNSIGNED, COUNTED(g, PCIE_SENT)); break;
    case 198: tell(f, now.wide_counters ? WIDE : UNSIGNED, COUNTED(g, PCIE_RECEIVED)); break;
#endif
    case 230: if (now.recovery[g]) tell(f, UNSIGNED, (u64)now.recovery[g] - 1); break;
    default: if (f->id > 307) f->code = INVALID;
    }
}
int nvmlDeviceGetFieldValues(device d, int n, struct field *fields) {
    int code = answer(d);
    if (code == NOT_SUPPORTED) code = OK; /* a GPU without readings has the call itself */
    for (int i = 0; i < n && code == OK; i++) {
        if (now.bare[gpu_of(d)]) fields[i].code = NOT_SUPPORTED;
        else tell_field(gpu_of(d), &fields[i]);
    }
    return code;
}

struct fabric { unsigned version; unsigned char cluster[16]; unsigned status, clique, state, health; };
int nvmlDeviceGetGpuFabricInfoV(device d, struct fabric *f) {
    int g = gpu_of(d), code = answer(d);
    if (code != OK || !now.fabric[g]) return code != OK ? code : NOT_SUPPORTED;
    f->state = (unsigned)now.fabric[g] - 1;
    f->status = (unsigned)now.fabric_status[g];
    f->health = 0;
    return OK;
}

struct process { unsigned pid; u64 bytes; unsigned gpu_instance, compute_instance; };
int nvmlDeviceGetComputeRunningProcesses_v2(device d, unsigned *n, struct process *found) {
    unsigned room = *n, g = (unsigned)gpu_of(d);
    int code = answer(d);
    if (code != OK || now.denied[g]) return code != OK ? code : NO_PERMISSION;
    *n = 0;
    for (int i = 0; i < now.processes; i++) {
        if (now.process[i].gpu != (int)g) continue;
        if (*n < room) {
            found[*n].pid = (unsigned)now.process[i].pid;
            found[*n].bytes = now.process[i].mib < 0 ? ~0ULL : (u64)now.process[i].mib << 20;
            found[*n].gpu_instance = found[*n].compute_instance = ~0U;
        }
        ++*n;
    }
    return *n > room ? INSUFFICIENT_SIZE : OK;
}

struct event { device d; u64 type, data; unsigned gpu_instance, compute_instance; };
static int told; /* the largest serial number of an XID that was told, or was there before anybody registered */

int nvmlEventSetCreate(void **set) {
    refresh();
    for (int i = 0; i < now.events; i++) told = now.event[i].serial > told ? now.event[i].serial : told;
    *set = &told;
    return OK;
}
int nvmlEventSetFree(void *set) { (void)set; return OK; }
int nvmlDeviceRegisterEvents(device d, u64 types, void *set) { (void)d; (void)types; (void)set; return OK; }
int nvmlEventSetWait_v2(void *set, struct event *event, unsigned ms) {
    int next = -1;
    (void)set;
    refresh();
    for (int i = 0; i < now.events; i++)
        if (now.event[i].serial > told && (next < 0 || now.event[i].serial < now.event[next].serial)) next = i;
    if (next < 0) {
        sleep_ms((int)ms);
        return TIMEOUT;
    }
    told = now.event[next].serial;
    event->d = now.event[next].gpu + 1;
    event->type = 8; /* an XID */
    event->data = (u64)now.event[next].code;
    event->gpu_instance = event->compute_instance = ~0U;
    return OK;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetCurrentClocksEventReasons(device d, u64 *mask) {
    return nvmlDeviceGetCurrentClocksThrottleReasons(d, mask);
}
int nvmlDeviceGetComputeRunningProcesses_v3(device d, unsigned *n, struct process *found) {
    return nvmlDeviceGetComputeRunningProcesses_v2(d, n, found);
}

int nvmlDeviceGetMigMode(device d, unsigned *current, unsigned *pending) {
    *current = *pending = now.mig[gpu_of(d)] > 0;
    return answer(d);
}
int nvmlDeviceGetMaxMigDeviceCount(device d, unsigned *n) { *n = MIG_PLACES; return answer(d); }
int nvmlDeviceGetMigDeviceHandleByIndex(device d, unsigned place, device *instance) {
    if (!place || place > (unsigned)now.mig[gpu_of(d)]) return NOT_FOUND; /* place 0 is free */
    *instance = MIG_HANDLES + 10 * gpu_of(d) + (int)place - 1;
    return OK;
}

struct support { unsigned version, supported; };
int nvmlGpmQueryDeviceSupport(device d, struct support *s) { s->supported = !now.pre_hopper; return answer(d); }
int nvmlGpmSampleAlloc(double **sample) { *sample = calloc(1, sizeof **sample); return OK; }
int nvmlGpmSampleFree(double *sample) { free(sample); return OK; }
int nvmlGpmSampleGet(device d, double *sample) {
    if (answer(d) == OK && now.mig[gpu_of(d)]) return NOT_SUPPORTED;
    *sample = here_s() + 1e11 * gpu_of(d); /* a sample knows its GPU */
    return answer(d);
}
struct metric { unsigned id, code; double value; const char *names[3]; };
struct metrics { unsigned version, n; double *first, *second; struct metric metric[]; };
int nvmlGpmMetricsGet(struct metrics *m) {
    int g = (int)(*m->first / 1e11);
    double from = *m->first - 1e11 * g, to = *m->second - 1e11 * g, mean;
    if (m->version != 1 || to <= from) return INVALID;
    mean = worked(g, (loaded_s(g, to) - loaded_s(g, from)) / (to - from));
    for (unsigned i = 0; i < m->n; i++) {
        struct metric *x = &m->metric[i];
        x->code = OK;
        switch (x->id) {
        case 2: x->value = 100.0 * 0.90 * mean; break;
        case 5: x->value = 100.0 * 0.55 * mean; break;
        case 10: x->value = 100.0 * 0.60 * mean; break;
        case 20: x->value = PCIE_SENT * mean / 1048576.0; break;
        case 21: x->value = PCIE_RECEIVED * mean / 1048576.0; break;
        case 60: case 61:
            x->value = NVLINK * mean / 1048576.0;
            if (!now.links) x->code = NOT_SUPPORTED;
            break;
        default: x->code = NOT_SUPPORTED;
        }
    }
    return OK;
}
#endif
