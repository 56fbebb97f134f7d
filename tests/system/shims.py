"""A library that shifts a process's clock and slows its writes, both while it runs, by numbers in a file.

It is preloaded, so it holds for all programs that a process starts with its environment. The kernel keeps its clock:
times of files do not jump, as on a file server whose clock differs.
"""

from __future__ import annotations

import mmap
import struct
import subprocess
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
/* Nanoseconds that CLOCK_REALTIME is ahead; microseconds of a write; the device whose files are slow. */
static volatile int64_t *numbers;
__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("MEGARL_TEST_SHIM");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *found = mmap(0, 24, PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) numbers = found;
    close(file);
}
#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
static int64_t ahead(void) { return numbers ? numbers[0] : 0; }
static void add(struct timespec *time, int64_t nanoseconds) {
    int64_t rest = time->tv_nsec + nanoseconds % 1000000000;
    time->tv_sec += nanoseconds / 1000000000;
    if (rest < 0) rest += 1000000000, time->tv_sec--;
    if (rest >= 1000000000) rest -= 1000000000, time->tv_sec++;
    time->tv_nsec = rest;
}
int clock_gettime(clockid_t clock, struct timespec *time) {
    REAL(clock_gettime);
    int status = real(clock, time);
    if (!status && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) add(time, ahead());
    return status;
}
time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *time, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (time) time->tv_sec = now.tv_sec, time->tv_usec = now.tv_nsec / 1000;
    return 0;
}
/* Waits until a time of day: the kernel's clock has not jumped. Times of CLOCK_MONOTONIC are small numbers. */
static const struct timespec *of_kernel(const struct timespec *until, struct timespec *room) {
    if (!until || !ahead() || until->tv_sec < 1000000000) return until;
    *room = *until;
    add(room, -ahead());
    return room;
}
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec room;
    if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real) real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    return real(condition, mutex, of_kernel(until, &room));
}
int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock,
                           const struct timespec *until) {
    REAL(pthread_cond_clockwait);
    struct timespec room;
    return real(condition, mutex, clock, of_kernel(until, &room));
}
int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    REAL(sem_timedwait);
    struct timespec room;
    return real(semaphore, of_kernel(until, &room));
}
int sem_clockwait(sem_t *semaphore, clockid_t clock, const struct timespec *until) {
    REAL(sem_clockwait);
    struct timespec room;
    return real(semaphore, clock, of_kernel(until, &room));
}
int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *until) {
    REAL(pthread_mutex_timedlock);
    struct timespec room;
    return real(mutex, of_kernel(until, &room));
}
static void slow(int file) {
    struct stat found;
    if (numbers && numbers[1] && !fstat(file, &found) && (int64_t)found.st_dev == numbers[2]) usleep(numbers[1]);
}
ssize_t write(int file, const void *bytes, size_t count) {
    REAL(write);
    slow(file);
    return real(file, bytes, count);
}
int fsync(int file) {
    REAL(fsync);
    slow(file);
    return real(file);
}
int fdatasync(int file) {
    REAL(fdatasync);
    slow(file);
    return real(file);
}
"""


class Shim:
    """The library, and the numbers of one machine whose processes have its ``environment``."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        library, path = folder / "shim.so", folder / f"shim_{name}.numbers"
        if not library.is_file():
            source = folder / "shim.c"
            source.write_text(SOURCE)
            subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        path.write_bytes(bytes(24))
        with path.open("r+b") as file:
            self._numbers = mmap.mmap(file.fileno(), 24)
        self.environment = {"LD_PRELOAD": str(library), "MEGARL_TEST_SHIM": str(path)}

    def jump(self, seconds: float) -> None:
        """Set the clock to the machine's time and ``seconds``."""
        self._put(0, round(seconds * 1e9))

    def slow(self, milliseconds: float, folder: Path) -> None:
        """Make each write and each sync of a file on ``folder``'s disk last so much longer."""
        self._put(2, folder.stat().st_dev)
        self._put(1, round(milliseconds * 1e3))

    def _put(self, place: int, number: int) -> None:
        self._numbers[8 * place : 8 * place + 8] = struct.pack("<q", number)
