// A clock that is an hour ahead, for a process that is started with this library before libc (LD_PRELOAD).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>

int clock_gettime(clockid_t id, struct timespec *time) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, time);
    if (result == 0 && id == CLOCK_REALTIME) time->tv_sec += 3600;
    return result;
}
