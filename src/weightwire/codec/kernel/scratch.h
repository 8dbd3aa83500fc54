/* Scratch memory that is kept for the next block: new pages from the system cost more than the work itself.
 *
 * Sizes are rounded up to powers of two. Up to KEPT_MOST bytes are kept, for all threads.
 */
#ifndef WW_SCRATCH_H
#define WW_SCRATCH_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __SANITIZE_ADDRESS__ /* must see every allocation */

#define scratch_new malloc
#define scratch_grow realloc
#define scratch_free free
#define scratch_trim() ((void)0)

#else

#include <stdatomic.h>
#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#endif

#define KEPT_MOST (UINT64_C(48) << 20)
enum { SMALLEST = 12, LARGEST = 40 }; /* powers of two */

/* The header of every piece. As large as a cache line, to keep the memory after it aligned. */
typedef union Piece {
    struct {
        unsigned power;
        union Piece *next;
    } is;
    char room[64];
} Piece;

static struct {
    Piece *kept[LARGEST + 1];
    uint64_t bytes;
    atomic_flag busy;
} scratch = {.busy = ATOMIC_FLAG_INIT};

/* Returns 0 if another thread holds the lock for long, or held it during a fork: then kept memory is not used. */
static inline int scratch_lock(void) {
    for (int tries = 0; tries < 100; tries++)
        if (!atomic_flag_test_and_set_explicit(&scratch.busy, memory_order_acquire)) return 1;
    return 0;
}

static inline void scratch_unlock(void) { atomic_flag_clear_explicit(&scratch.busy, memory_order_release); }

/* Large pieces come from the system: malloc would keep them after they are freed. */
enum { MAPPED = 20 };

static Piece *piece_new(unsigned power) {
#if defined(__unix__) || defined(__APPLE__)
    if (power >= MAPPED) {
        void *mapped =
            mmap(NULL, (size_t)1 << power, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
        return mapped == MAP_FAILED ? NULL : mapped;
    }
#endif
    return malloc((size_t)1 << power);
}

static void piece_free(Piece *piece) {
#if defined(__unix__) || defined(__APPLE__)
    if (piece->is.power >= MAPPED) {
        munmap(piece, (size_t)1 << piece->is.power);
        return;
    }
#endif
    free(piece);
}

static void *scratch_new(size_t size) {
    unsigned power = SMALLEST;
    while (power < LARGEST && (UINT64_C(1) << power) < size + sizeof(Piece)) power++;
    if (power == LARGEST) return NULL;
    Piece *piece = NULL;
    if (scratch_lock()) {
        piece = scratch.kept[power];
        if (piece) {
            scratch.kept[power] = piece->is.next;
            scratch.bytes -= UINT64_C(1) << power;
        }
        scratch_unlock();
    }
    if (!piece) piece = piece_new(power);
    if (!piece) return NULL;
    piece->is.power = power;
    return piece + 1;
}

static void scratch_free(void *data) {
    if (!data) return;
    Piece *piece = (Piece *)data - 1;
    uint64_t size = UINT64_C(1) << piece->is.power;
    int kept = 0;
    if (scratch_lock()) {
        kept = scratch.bytes + size <= KEPT_MOST;
        if (kept) {
            piece->is.next = scratch.kept[piece->is.power];
            scratch.kept[piece->is.power] = piece;
            scratch.bytes += size;
        }
        scratch_unlock();
    }
    if (!kept) piece_free(piece);
}

/* Frees what is kept. */
static void scratch_trim(void) {
    Piece *kept[LARGEST + 1] = {NULL};
    if (!scratch_lock()) return;
    memcpy(kept, scratch.kept, sizeof kept);
    memset(scratch.kept, 0, sizeof scratch.kept);
    scratch.bytes = 0;
    scratch_unlock();
    for (unsigned power = 0; power <= LARGEST; power++) {
        for (Piece *piece = kept[power], *next; piece; piece = next) {
            next = piece->is.next;
            piece_free(piece);
        }
    }
}

static void *scratch_grow(void *data, size_t size) {
    if (!data) return scratch_new(size);
    size_t room = ((size_t)1 << ((Piece *)data - 1)->is.power) - sizeof(Piece);
    if (size <= room) return data;
    void *larger = scratch_new(size);
    if (!larger) return NULL;
    memcpy(larger, data, room);
    scratch_free(data);
    return larger;
}

#endif

#endif
