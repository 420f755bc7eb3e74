/* A stand-in for NVIDIA's management library: as many GPUs as FAKE_NVML_GPUS says, with fixed readings.
 *
 * FAKE_NVML_LOST=i: GPU i answers "GPU is lost". FAKE_NVML_BARE=i: GPU i supports its temperature only.
 * FAKE_NVML_INIT=n: nvmlInit answers n. Compiled with -DOLD the library lacks the newer of two names.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef long device; /* index + 1: a handle is never null */
enum { OK = 0, NOT_SUPPORTED = 3, LOST = 15 };

static int setting(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

static int answer(device d) {
    if (d - 1 == setting("FAKE_NVML_LOST", -1)) return LOST;
    if (d - 1 == setting("FAKE_NVML_BARE", -1)) return NOT_SUPPORTED;
    return OK;
}

int nvmlInitWithFlags(unsigned flags) { return setting("FAKE_NVML_INIT", OK); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : "some other trouble"; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = setting("FAKE_NVML_GPUS", 2); return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, device *d) { *d = (device)i + 1; return OK; }
int nvmlDeviceGetUUID(device d, char *text, unsigned size) { snprintf(text, size, "GPU-%ld", d - 1); return OK; }

struct pci { char legacy[16]; unsigned domain, bus, dev, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(device d, struct pci *p) {
    memset(p, 0, sizeof *p);
    snprintf(p->bus_id, sizeof p->bus_id, "00000000:%02lX:00.0", d);
    return OK;
}

struct pair { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(device d, struct pair *u) { u->gpu = 50; u->memory = 20; return answer(d); }
struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(device d, struct memory *m) { m->total = 80; m->free = 50; m->used = 30; return answer(d); }
int nvmlDeviceGetPowerUsage(device d, unsigned *mw) { *mw = 350500; return answer(d); }
int nvmlDeviceGetEnforcedPowerLimit(device d, unsigned *mw) { *mw = 700000; return answer(d); }
int nvmlDeviceGetTemperature(device d, int sensor, unsigned *c) {
    *c = 60 + d;
    return answer(d) == LOST ? LOST : OK;
}
int nvmlDeviceGetClockInfo(device d, int clock, unsigned *mhz) { *mhz = clock == 1 ? 1980 : 2619; return answer(d); }
#ifndef OLD
int nvmlDeviceGetCurrentClocksEventReasons(device d, unsigned long long *mask) { *mask = 0x48; return answer(d); }
#endif
int nvmlDeviceGetCurrentClocksThrottleReasons(device d, unsigned long long *mask) { *mask = 0x8; return answer(d); }
int nvmlDeviceGetTotalEccErrors(device d, int kind, int counter, unsigned long long *n) {
    *n = kind == 0 ? 5 : 1;
    return answer(d);
}
int nvmlDeviceGetRemappedRows(device d, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    *corrected = 2; *uncorrected = 1; *pending = 1; *failed = 0;
    return answer(d);
}
int nvmlDeviceGetCurrPcieLinkWidth(device d, unsigned *lanes) { *lanes = 16; return answer(d); }
int nvmlDeviceGetCurrPcieLinkGeneration(device d, unsigned *generation) { *generation = 5; return answer(d); }
int nvmlDeviceGetPcieReplayCounter(device d, unsigned *n) { *n = 9; return answer(d); }
int nvmlDeviceGetPcieThroughput(device d, int direction, unsigned *kb) { *kb = direction == 0 ? 1000 : 2000; return answer(d); }
int nvmlDeviceGetNvLinkState(device d, unsigned link, unsigned *active) {
    if (link >= 6) return NOT_SUPPORTED;
    *active = link != 4;
    return answer(d);
}
