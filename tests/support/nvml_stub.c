/* A stand-in for NVIDIA's libnvidia-ml.so.1.

   It has the functions that tunerd/machine/gpu.py calls and answers from the text file `nvml-state`
   that lies in the same folder as the library, read afresh at every call, so that a test can change
   memory, processes or health of a GPU under a running reader. tests/support/nvml_stub.py writes
   that file and describes its lines.

   No file: the driver is not loaded. A value `-`: this GPU does not support the question. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    ARGUMENT_VERSION_MISMATCH = 25,
};
enum { MAX_GPUS = 16, MAX_PROCESSES = 256, MAX_LINE = 512, HANDLE_BASE = 0x1000 };

typedef unsigned long long bytes;
typedef void *device;

struct memory_v1 { bytes total, free, used; };
struct memory_v2 { unsigned version; bytes total, reserved, free, used; };
struct bar1_memory { bytes total, free, used; };
struct temperature { unsigned version, sensor; int degrees; };
struct utilisation { unsigned gpu, memory; };
struct process { unsigned pid; bytes used; unsigned gpu_instance, compute_instance; };

struct gpu {
    char name[256], uuid[96];
    bytes total, reserved, used;
    int has_memory, used_includes_reserved, is_mig_device;
    /* Numbers as text, so that `-` can stand for "not supported". */
    char mig[16], bar1[32], pstate[16], throttle[32], energy[32], least_power[16], power_step[16], now[5][16], power[4][16], pcie[4][16], capability[2][16];
    struct { char list; struct process row; } processes[MAX_PROCESSES];
    unsigned n_processes;
    /* Processes with this in their command line compute on it, and draw between `idle` and the limit [mW]. */
    struct { char path[128]; unsigned idle, step_ms; bytes held; } servers;
};

static struct {
    char driver[96], cuda[16], limits[256];
    int session, n_gpus;
    struct gpu gpus[MAX_GPUS];
} state;

static int opened_session = -1;

static const char *state_path(void)
{
    static char path[4096];
    Dl_info self;
    char *slash;
    if (!dladdr((void *)state_path, &self) || strlen(self.dli_fname) > sizeof path - 16)
        return "nvml-state";
    strcpy(path, self.dli_fname);
    slash = strrchr(path, '/');
    strcpy(slash ? slash + 1 : path, "nvml-state");
    return path;
}

static void read_gpu_line(struct gpu *gpu, const char *line)
{
    char word[16], amount[32];
    unsigned pid, instance = ~0u;
    /* Whole words first: a space in a scanf format also matches nothing at all. */
    if (!strcmp(line, "used_includes_reserved\n")) { gpu->used_includes_reserved = 1; return; }
    if (!strcmp(line, "mig_device\n")) { gpu->is_mig_device = 1; return; }
    if (sscanf(line, "name %255[^\n]", gpu->name) == 1) return;
    if (sscanf(line, "uuid %95s", gpu->uuid) == 1) return;
    if (sscanf(line, "memory %llu %llu %llu", &gpu->total, &gpu->reserved, &gpu->used) == 3) {
        gpu->has_memory = 1;
        return;
    }
    if (sscanf(line, "mig %15s", gpu->mig) == 1) return;
    if (sscanf(line, "bar1 %31s", gpu->bar1) == 1) return;
    if (sscanf(line, "pstate %15s", gpu->pstate) == 1) return;
    if (sscanf(line, "throttle %31s", gpu->throttle) == 1) return;
    if (sscanf(line, "energy %31s", gpu->energy) == 1) return;
    if (sscanf(line, "least_power %15s", gpu->least_power) == 1) return;
    if (sscanf(line, "power_step %15s", gpu->power_step) == 1) return;
    if (sscanf(line, "power %15s %15s %15s %15s", gpu->power[0], gpu->power[1], gpu->power[2],
               gpu->power[3]) == 4) return;
    if (sscanf(line, "now %15s %15s %15s %15s %15s", gpu->now[0], gpu->now[1], gpu->now[2],
               gpu->now[3], gpu->now[4]) == 5) return;
    if (sscanf(line, "pcie %15s %15s %15s %15s", gpu->pcie[0], gpu->pcie[1], gpu->pcie[2],
               gpu->pcie[3]) == 4) return;
    if (sscanf(line, "capability %15s %15s", gpu->capability[0], gpu->capability[1]) == 2) return;
    if (sscanf(line, "servers %127s %llu %u %u", gpu->servers.path, &gpu->servers.held, &gpu->servers.idle,
               &gpu->servers.step_ms) == 4) return;
    if (sscanf(line, "process %15s %u %31s %u", word, &pid, amount, &instance) >= 3
        && gpu->n_processes < MAX_PROCESSES) {
        gpu->processes[gpu->n_processes].list = word[0];
        gpu->processes[gpu->n_processes++].row = (struct process){
            pid, strcmp(amount, "-") ? strtoull(amount, 0, 10) : ~0ull, instance, instance};
    }
}

/* Reads the state; returns what `function` must answer for GPU `index` (-1: no GPU in question). */
static int answer(const char *function, int index)
{
    char line[MAX_LINE], failing[128];
    int code, only, result = SUCCESS, n;
    FILE *file = fopen(state_path(), "r");
    if (!file) return DRIVER_NOT_LOADED;
    memset(&state, 0, sizeof state);
    while (fgets(line, sizeof line, file)) {
        if (!strcmp(line, "gpu\n") && state.n_gpus < MAX_GPUS) { state.n_gpus++; continue; }
        if (state.n_gpus) { read_gpu_line(&state.gpus[state.n_gpus - 1], line); continue; }
        if (sscanf(line, "driver %95s", state.driver) == 1) continue;
        if (sscanf(line, "cuda %15s", state.cuda) == 1) continue;
        if (sscanf(line, "limits %255s", state.limits) == 1) continue;
        if (sscanf(line, "session %d", &state.session) == 1) continue;
        n = sscanf(line, "fail %127s %d %d", failing, &code, &only);
        if (n >= 2 && (n == 2 || only == index)
            && (!strcmp(failing, function) || (!strcmp(failing, "*") && index >= 0)))
            result = code;
    }
    fclose(file);
    if (strcmp(function, "nvmlInitWithFlags") && opened_session != state.session)
        return UNINITIALIZED;
    return result;
}

static int index_of(device handle) { return (int)((char *)handle - (char *)HANDLE_BASE); }

#define SYSTEM_ANSWER                              \
    do {                                           \
        int code_ = answer(__func__, -1);          \
        if (code_) return code_;                   \
    } while (0)

#define GPU_ANSWER                                                              \
    struct gpu *gpu;                                                            \
    do {                                                                        \
        int code_ = answer(__func__, index_of(handle));                         \
        if (code_) return code_;                                                \
        if (index_of(handle) < 0 || index_of(handle) >= state.n_gpus)           \
            return INVALID_ARGUMENT;                                            \
        gpu = &state.gpus[index_of(handle)];                                    \
    } while (0)

static int number(const char *text, unsigned *out)
{
    if (!*text || !strcmp(text, "-")) return NOT_SUPPORTED;
    *out = (unsigned)strtoul(text, 0, 10);
    return SUCCESS;
}

static int words(const char *text, char *out, unsigned size)
{
    if (!*text || !strcmp(text, "-")) return NOT_SUPPORTED;
    if (strlen(text) >= size) return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}

static FILE *of_process(unsigned pid, const char *name)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/%s", pid, name);
    return fopen(path, "r");
}

/* Adds the programs that run now to the card's processes; returns their processor time [ticks]. */
static unsigned long long find_servers(struct gpu *gpu)
{
    unsigned long long ticks = 0, user, kernel;
    struct dirent *one;
    DIR *all = *gpu->servers.path ? opendir("/proc") : 0;
    while (all && (one = readdir(all))) {
        char words[1024];
        size_t n;
        unsigned pid = (unsigned)strtoul(one->d_name, 0, 10);
        FILE *file = pid ? of_process(pid, "cmdline") : 0;
        if (!file) continue;
        n = fread(words, 1, sizeof words, file);
        fclose(file);
        if (!memmem(words, n, gpu->servers.path, strlen(gpu->servers.path))
            || gpu->n_processes == MAX_PROCESSES || !(file = of_process(pid, "stat")))
            continue;
        if (fscanf(file, "%*d %*s %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu", &user, &kernel) == 2)
            ticks += user + kernel;
        fclose(file);
        gpu->processes[gpu->n_processes].list = 'c';
        gpu->processes[gpu->n_processes++].row = (struct process){pid, gpu->servers.held, ~0u, ~0u};
    }
    if (all) closedir(all);
    return ticks;
}

static int list(struct gpu *gpu, char which, unsigned *n, struct process *out)
{
    unsigned i, k = 0;
    find_servers(gpu);
    for (i = 0; i < gpu->n_processes; i++) k += gpu->processes[i].list == which;
    if (k == 0) { *n = 0; return SUCCESS; }
    if (!out || *n < k) { *n = k; return INSUFFICIENT_SIZE; }
    for (i = k = 0; i < gpu->n_processes; i++)
        if (gpu->processes[i].list == which) out[k++] = gpu->processes[i].row;
    *n = k;
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    SYSTEM_ANSWER;
    opened_session = state.session;
    return SUCCESS;
}

int nvmlShutdown(void)
{
    SYSTEM_ANSWER;
    opened_session = -1;
    return SUCCESS;
}

const char *nvmlErrorString(int code)
{
    static char text[64];
    snprintf(text, sizeof text, "stub error %d", code);
    return text;
}

int nvmlSystemGetDriverVersion(char *out, unsigned size)
{
    SYSTEM_ANSWER;
    return words(state.driver, out, size);
}

int nvmlSystemGetCudaDriverVersion(int *out) { SYSTEM_ANSWER; return number(state.cuda, (unsigned *)out); }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { SYSTEM_ANSWER; return number(state.cuda, (unsigned *)out); }

int nvmlDeviceGetCount_v2(unsigned *out)
{
    SYSTEM_ANSWER;
    *out = (unsigned)state.n_gpus;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device *out)
{
    int code = answer(__func__, (int)index);
    if (code) return code;
    if ((int)index >= state.n_gpus) return INVALID_ARGUMENT;
    *out = (char *)HANDLE_BASE + index;
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device *out)
{
    int index, code = answer(__func__, -1);
    if (code) return code;
    for (index = 0; index < state.n_gpus; index++)
        if (!strcmp(state.gpus[index].uuid, uuid)) {
            *out = (char *)HANDLE_BASE + index;
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceIsMigDeviceHandle(device handle, unsigned *out)
{
    GPU_ANSWER;
    *out = (unsigned)gpu->is_mig_device;
    return SUCCESS;
}

int nvmlDeviceGetName(device handle, char *out, unsigned size) { GPU_ANSWER; return words(gpu->name, out, size); }
int nvmlDeviceGetUUID(device handle, char *out, unsigned size) { GPU_ANSWER; return words(gpu->uuid, out, size); }

int nvmlDeviceGetMemoryInfo(device handle, struct memory_v1 *out)
{
    GPU_ANSWER;
    if (!gpu->has_memory) return NOT_SUPPORTED;
    out->total = gpu->total;
    out->used = gpu->used + gpu->reserved;
    out->free = out->total - out->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(device handle, struct memory_v2 *out)
{
    GPU_ANSWER;
    if (out->version != (2u << 24 | sizeof *out)) return ARGUMENT_VERSION_MISMATCH;
    if (!gpu->has_memory) return NOT_SUPPORTED;
    out->total = gpu->total;
    out->reserved = gpu->reserved;
    out->used = gpu->used + (gpu->used_includes_reserved ? gpu->reserved : 0);
    out->free = gpu->total - gpu->used - gpu->reserved;
    return SUCCESS;
}

int nvmlDeviceGetBAR1MemoryInfo(device handle, struct bar1_memory *out)
{
    GPU_ANSWER;
    if (!*gpu->bar1 || !strcmp(gpu->bar1, "-")) return NOT_SUPPORTED;
    out->total = out->free = strtoull(gpu->bar1, 0, 10);
    out->used = 0;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(device handle, unsigned long long *out)
{
    GPU_ANSWER;
    if (!*gpu->throttle || !strcmp(gpu->throttle, "-")) return NOT_SUPPORTED;
    *out = strtoull(gpu->throttle, 0, 10);
    return SUCCESS;
}

#define PROCESS_LIST(NAME, WHICH) \
    int NAME(device handle, unsigned *n, struct process *out) { GPU_ANSWER; return list(gpu, WHICH, n, out); }
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, 'c')
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, 'c')
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, 'g')
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, 'g')

#define NUMBER(NAME, FIELD) \
    int NAME(device handle, unsigned *out) { GPU_ANSWER; return number(gpu->FIELD, out); }
NUMBER(nvmlDeviceGetPerformanceState, pstate)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, power[2])
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, pcie[0])
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, pcie[1])
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, pcie[2])
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, pcie[3])

int nvmlDeviceGetUtilizationRates(device handle, struct utilisation *out)
{
    GPU_ANSWER;
    out->memory = 0;
    return number(gpu->now[0], &out->gpu);
}

int nvmlDeviceGetClockInfo(device handle, unsigned type, unsigned *out)
{
    GPU_ANSWER;
    if (type != 1 && type != 2) return NOT_SUPPORTED;
    return number(gpu->now[1 + type], out);
}

int nvmlDeviceGetTemperature(device handle, unsigned sensor, unsigned *out)
{
    GPU_ANSWER;
    return sensor ? INVALID_ARGUMENT : number(gpu->now[4], out);
}

int nvmlDeviceGetTemperatureV(device handle, struct temperature *out)
{
    GPU_ANSWER;
    if (out->version != (1u << 24 | sizeof *out)) return ARGUMENT_VERSION_MISMATCH;
    return out->sensor ? INVALID_ARGUMENT : number(gpu->now[4], (unsigned *)&out->degrees);
}

int nvmlDeviceGetPowerManagementLimitConstraints(device handle, unsigned *min, unsigned *max)
{
    GPU_ANSWER;
    int code = number(gpu->power[3], max);
    *min = 1000;
    number(gpu->least_power, min);
    return code;
}

/* The file that holds what was set, or was taken, in place of the state's. */
static const char *kept_path(device handle, const char *what)
{
    static char path[4200];
    const char *own = state_path();
    if (*state.limits)
        snprintf(path, sizeof path, "%s/nvml-%s-%d", state.limits, what, index_of(handle));
    else
        snprintf(path, sizeof path, "%.*s-%s-%d", (int)(strlen(own) - strlen("-state")), own, what,
                 index_of(handle));
    return path;
}

static const char *limit_path(device handle) { return kept_path(handle, "limit"); }

static int limit(device handle, const char *shown, unsigned *out)
{
    char line[16] = "";
    FILE *file = fopen(limit_path(handle), "r");
    if (!file) return number(shown, out);
    if (!fgets(line, sizeof line, file)) *line = 0;
    fclose(file);
    return number(line, out);
}

int nvmlDeviceGetPowerManagementLimit(device handle, unsigned *out)
{
    GPU_ANSWER;
    return limit(handle, gpu->power[0], out);
}

int nvmlDeviceGetEnforcedPowerLimit(device handle, unsigned *out)
{
    GPU_ANSWER;
    return limit(handle, gpu->power[1], out);
}

int nvmlDeviceSetPowerManagementLimit(device handle, unsigned milliwatts)
{
    GPU_ANSWER;
    unsigned least = 1000, most, step = 1;
    char fresh[4300];
    FILE *file;
    if (number(gpu->power[3], &most)) return NOT_SUPPORTED;
    number(gpu->least_power, &least);
    if (milliwatts < least || milliwatts > most) return INVALID_ARGUMENT;
    if (*gpu->power_step && !number(gpu->power_step, &step)) milliwatts -= milliwatts % step;
    snprintf(fresh, sizeof fresh, "%s.%d", limit_path(handle), (int)getpid());
    if (!(file = fopen(fresh, "w"))) return NO_PERMISSION;
    fprintf(file, "%u", milliwatts);
    fclose(file);
    return rename(fresh, limit_path(handle)) ? NO_PERMISSION : SUCCESS;
}

/* What the card has taken and draws now: its programs' share of one processor, up to the limit.

   As drivers do it moves in steps, of `step_ms`. An account that may not write moves nothing on. */
static int drawn(device handle, struct gpu *gpu, double *millijoules, unsigned *milliwatts)
{
    unsigned most = 0;
    double at_s = 0, now_s, share, taken = strtod(gpu->energy, 0);
    unsigned long long ticks = 0, now = find_servers(gpu);
    struct timespec clock;
    FILE *file;
    int kept = open(kept_path(handle, "energy"), O_RDWR | O_CREAT, 0644), moves = kept >= 0;
    if (kept < 0) kept = open(kept_path(handle, "energy"), O_RDONLY);
    *milliwatts = gpu->servers.idle;
    *millijoules = taken;
    if (kept < 0 || !(file = fdopen(kept, moves ? "r+" : "r"))) return SUCCESS;
    flock(kept, LOCK_EX);
    clock_gettime(CLOCK_BOOTTIME, &clock);
    now_s = clock.tv_sec + clock.tv_nsec / 1000000 / gpu->servers.step_ms * gpu->servers.step_ms / 1e3;
    if (fscanf(file, "%lf %llu %lf %u", &at_s, &ticks, &taken, milliwatts) != 4) at_s = 0;
    if (moves && now_s > at_s) {
        limit(handle, gpu->power[1], &most);
        share = at_s && now > ticks ? (now - ticks) / (double)sysconf(_SC_CLK_TCK) / (now_s - at_s) : 0;
        *milliwatts = gpu->servers.idle + (share > 1 ? 1 : share) * (most - gpu->servers.idle);
        if (at_s) taken += *milliwatts * (now_s - at_s);
        rewind(file);
        fprintf(file, "%f %llu %f %u\n", now_s, now, taken, *milliwatts);
    }
    fclose(file);
    *millijoules = taken;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(device handle, unsigned *out)
{
    double taken;
    GPU_ANSWER;
    return *gpu->servers.path ? drawn(handle, gpu, &taken, out) : number(gpu->now[1], out);
}

int nvmlDeviceGetTotalEnergyConsumption(device handle, unsigned long long *out)
{
    double taken;
    unsigned power;
    GPU_ANSWER;
    if (!*gpu->energy || !strcmp(gpu->energy, "-")) return NOT_SUPPORTED;
    *out = strtoull(gpu->energy, 0, 10);
    if (!*gpu->servers.path) return SUCCESS;
    drawn(handle, gpu, &taken, &power);
    *out = (unsigned long long)taken;
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(device handle, int *major, int *minor)
{
    GPU_ANSWER;
    int code = number(gpu->capability[0], (unsigned *)major);
    return code ? code : number(gpu->capability[1], (unsigned *)minor);
}

int nvmlDeviceGetMigMode(device handle, unsigned *current, unsigned *pending)
{
    GPU_ANSWER;
    int code = number(gpu->mig, current);
    *pending = *current;
    return code;
}
