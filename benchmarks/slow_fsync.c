/* Makes fsync and fdatasync take SLOW_FSYNC_US microseconds longer, as on a slower disk. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>

typedef int (*sync_fn)(int);

static int slowly(const char *name, sync_fn *real, int fd) {
    const char *setting = getenv("SLOW_FSYNC_US");
    long us = setting ? strtol(setting, NULL, 10) : 0;
    struct timespec pause = {us / 1000000, (us % 1000000) * 1000};
    if (!*real) *real = (sync_fn)dlsym(RTLD_NEXT, name);
    nanosleep(&pause, NULL);
    return (*real)(fd);
}

int fsync(int fd) { static sync_fn real; return slowly("fsync", &real, fd); }
int fdatasync(int fd) { static sync_fn real; return slowly("fdatasync", &real, fd); }
