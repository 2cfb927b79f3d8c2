/* A wall clock that can be set for one run: preloaded into all its processes. The number of seconds by which it
   is wrong stands in the file $RAYLIGHT_CHAOS_CLOCK. Monotonic clocks are the machine's. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, #name)

static volatile long none, *wrong = &none;

__attribute__((constructor)) static void map_clock(void) {
    const char *path = getenv("RAYLIGHT_CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *page = file < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) wrong = page;
    if (file >= 0) close(file);
}

/* A deadline of this clock as the machine's; one of a monotonic clock is far smaller, and stays. */
static const struct timespec *true_deadline(const struct timespec *deadline, struct timespec *room) {
    if (!deadline || deadline->tv_sec < 1000000000) return deadline;
    *room = *deadline;
    room->tv_sec -= *wrong;
    return room;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    REAL(clock_gettime);
    int code = real(id, now);
    if (!code && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *wrong;
    return code;
}

int gettimeofday(struct timeval *now, void *zone) {
    REAL(gettimeofday);
    int code = real(now, zone);
    if (!code) now->tv_sec += *wrong;
    return code;
}

time_t time(time_t *place) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (place) *place = now.tv_sec;
    return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *deadline) {
    REAL(pthread_cond_timedwait);
    struct timespec room;
    return real(cond, mutex, true_deadline(deadline, &room));
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *deadline) {
    REAL(pthread_mutex_timedlock);
    struct timespec room;
    return real(mutex, true_deadline(deadline, &room));
}

int sem_timedwait(sem_t *semaphore, const struct timespec *deadline) {
    REAL(sem_timedwait);
    struct timespec room;
    return real(semaphore, true_deadline(deadline, &room));
}

long syscall(long number, ...) { /* Abseil, and so Ray, waits by futex */
    REAL(syscall);
    long a[6];
    struct timespec room;
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_futex && a[1] & FUTEX_CLOCK_REALTIME) a[3] = (long)true_deadline((void *)a[3], &room);
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
