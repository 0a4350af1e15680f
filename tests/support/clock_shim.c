// Preloaded into a process, moves its wall clock by as many microseconds as a file says.
//
// The monotonic clock is left alone: a wall clock that jumps does not make time pass. Raw system
// calls, because looking up the functions that are replaced allocates, and an allocator that asks
// for the time while it starts would come back here without an end.

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset_us;

// Mapped, not read: the offset may change while the process runs.
__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("CLOCK_SHIM_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) {
        return;
    }
    void *mapped = mmap(NULL, sizeof *offset_us, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) {
        offset_us = mapped;
    }
}

static int64_t offset(void) { return offset_us ? *offset_us : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (failed || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE)) {
        return failed;
    }
    int64_t nanos = now->tv_nsec + offset() % 1000000 * 1000;
    now->tv_sec += offset() / 1000000;
    if (nanos < 0) {
        nanos += 1000000000;
        now->tv_sec -= 1;
    } else if (nanos >= 1000000000) {
        nanos -= 1000000000;
        now->tv_sec += 1;
    }
    now->tv_nsec = nanos;
    return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec precise;
    int failed = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *now) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (now) {
        *now = precise.tv_sec;
    }
    return precise.tv_sec;
}
