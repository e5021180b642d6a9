/* A few threads that share the parts of one job.

   The caller works as well; parts are taken one at a time, so a late or busy thread costs little. One job runs at a
   time: a second caller, from another thread, does its parts alone.

   The threads are torch's own where its OpenMP runtime is known (`pool_team`). They wait for work by spinning, and
   other threads would have to compete with them for the processors. A forked child has no such threads and uses a pool
   of its own, which is empty at first. */
#ifndef LASTLAYER_POOL_H
#define LASTLAYER_POOL_H

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>

#define POOL_MAX 256
#define POOL_SPINS 4000 /* some tens of microseconds: the pause between the passes over one long row */

#define POOL_GRAIN 1024 /* scores that a thread takes at a time, at the least */
#define SERIAL_BELOW (pool_team ? 8192 : 32768) /* scores; less is not worth a second thread */

/* Work on part `part`; `slot` is the same for all parts of a thread, and less than the number of threads. */
typedef void (*pool_work)(void *job, int64_t part, int slot);

/* GOMP_parallel, the entry of a parallel region in the OpenMP runtimes of GNU, LLVM and Intel; 0 where there is none. */
typedef void (*team_entry)(void (*member)(void *), void *data, unsigned threads, unsigned flags);
__attribute__((weak)) team_entry pool_team; /* one for all files of a library */

static struct {
    pthread_mutex_t owner, lock; /* owner: held for the whole of a job */
    pthread_cond_t wake, done;
    int started;
    atomic_int wanted; /* threads that may still join */
    atomic_int inside; /* threads at work, without the caller */
    atomic_int slots;
    atomic_llong next;
    int64_t parts;
    pool_work work;
    void *job;
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER,
          0, 0, 0, 0, 0, 0, 0, 0};

static void pool_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static void pool_share(pool_work work, void *job, int64_t parts, int slot) {
    for (int64_t part; (part = atomic_fetch_add(&pool.next, 1)) < parts;) work(job, part, slot);
}

static void *pool_thread(void *unused) {
    (void)unused;
    for (;;) {
        for (int i = 0; i < POOL_SPINS && atomic_load_explicit(&pool.wanted, memory_order_relaxed) <= 0; i++)
            pool_pause();
        pthread_mutex_lock(&pool.lock);
        while (pool.wanted <= 0) pthread_cond_wait(&pool.wake, &pool.lock);
        pool.wanted--;
        pool.inside++;
        int slot = atomic_fetch_add(&pool.slots, 1);
        pool_work work = pool.work;
        void *job = pool.job;
        int64_t parts = pool.parts;
        pthread_mutex_unlock(&pool.lock);
        pool_share(work, job, parts, slot);
        pthread_mutex_lock(&pool.lock);
        if (--pool.inside == 0) pthread_cond_signal(&pool.done);
        pthread_mutex_unlock(&pool.lock);
    }
    return 0;
}

/* The threads of the parent do not exist in a child, and its locks may be held by one of them. */
static void pool_after_fork(void) {
    pool_team = 0;
    pthread_mutex_init(&pool.owner, 0);
    pthread_mutex_init(&pool.lock, 0);
    pthread_cond_init(&pool.wake, 0);
    pthread_cond_init(&pool.done, 0);
    pool.started = 0;
    pool.wanted = pool.inside = 0;
}

static void pool_start(int threads) {
    sigset_t all, before; /* signals are for the interpreter's own threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.started < threads) {
        pthread_t thread;
        if (pthread_create(&thread, 0, pool_thread, 0)) break; /* the caller does what is left */
        pthread_detach(thread);
        pool.started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

__attribute__((constructor)) static void pool_at_load(void) { pthread_atfork(0, 0, pool_after_fork); }

/* A job of torch's threads. */
struct team_job {
    pool_work work;
    void *job;
    int64_t parts;
    int threads;
    atomic_int slots;
    atomic_llong next;
};

static void team_member(void *data) {
    struct team_job *team = data;
    int slot = atomic_fetch_add(&team->slots, 1);
    if (slot >= team->threads) return;
    for (int64_t part; (part = atomic_fetch_add(&team->next, 1)) < team->parts;) team->work(team->job, part, slot);
}

/* The runtime ends the threads of a team that the next, smaller one has no use for. So the team always has the size
   that torch gives it. */
static void pool_run(pool_work work, void *job, int64_t parts, int threads) {
    if (threads > POOL_MAX) threads = POOL_MAX;
    if (threads > parts) threads = (int)parts;
    if (threads > 1 && pool_team && !pthread_mutex_trylock(&pool.owner)) {
        struct team_job team = {work, job, parts, threads, 0, 0};
        pool_team(team_member, &team, 0, 0);
        pthread_mutex_unlock(&pool.owner);
        return;
    }
    if (threads < 2 || pthread_mutex_trylock(&pool.owner)) {
        for (int64_t part = 0; part < parts; part++) work(job, part, 0);
        return;
    }
    pool_start(threads - 1);
    pthread_mutex_lock(&pool.lock);
    pool.work = work;
    pool.job = job;
    pool.parts = parts;
    pool.next = 0;
    pool.slots = 1;
    pool.wanted = threads - 1;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    pool_share(work, job, parts, 0);
    pthread_mutex_lock(&pool.lock);
    pool.wanted = 0; /* who has not joined by now is not needed */
    pthread_mutex_unlock(&pool.lock);
    for (int i = 0; i < POOL_SPINS && atomic_load_explicit(&pool.inside, memory_order_relaxed) > 0; i++) pool_pause();
    pthread_mutex_lock(&pool.lock);
    while (pool.inside > 0) pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.owner);
}

#endif
