/* Swaps values with units of a block, and computes the change of the digest. */
#ifndef WW_SWAP_H
#define WW_SWAP_H

#include "hot.h"

enum { SOON = 32 }; /* changes to prefetch: they are too far apart for the hardware prefetcher */

/* Exchanges values and units of the target. Each change adds its part to the digest, so positions may be in any order. */
static inline __attribute__((always_inline)) void swap_at(
    uint8_t *target, const uint32_t *positions, uint8_t *values, size_t changes, Indexing where, Digest *digest,
    const unsigned unit) {
    Rewritten words;
    words.count = 0;
    for (size_t i = 0; i < changes; i++) {
        if (positions && i + SOON < changes) __builtin_prefetch(target + positions[i + SOON] * (size_t)unit, 1);
        size_t at = positions ? positions[i] : i;
        uint64_t was = load(target + at * unit, unit), to = load(values + i * unit, unit);
        write_unit(target, at, was, to, where, &words, unit);
        memcpy(values + i * unit, &was, unit);
        if (words.count == BATCH) HOT(digest_all, &words, digest);
    }
    HOT(digest_all, &words, digest);
}

static void swap_block(
    uint8_t *target, const uint32_t *positions, uint8_t *values, size_t changes, unsigned unit, Indexing where,
    Digest *digest) {
    switch (unit) {
        case 1: swap_at(target, positions, values, changes, where, digest, 1); break;
        case 2: swap_at(target, positions, values, changes, where, digest, 2); break;
        case 4: swap_at(target, positions, values, changes, where, digest, 4); break;
        default: swap_at(target, positions, values, changes, where, digest, 8); break;
    }
}

/* The change of the digest by a swap, without writing. Positions must ascend: changes of one word are then neighbours. */
static inline __attribute__((always_inline)) void look_at_changes(
    const uint8_t *old, const uint32_t *positions, const uint8_t *values, size_t changes, Indexing where,
    Digest *digest, const unsigned unit) {
    Rewritten words;
    uint64_t last = UINT64_MAX, after = 0;
    words.count = 0;
    for (size_t i = 0; i < changes; i++) {
        if (i + SOON < changes) __builtin_prefetch(old + positions[i + SOON] * (size_t)unit);
        size_t at = positions[i], word = where.word == 8 ? at * unit / 8 : at;
        unsigned shift = where.word == 8 ? 8 * (unsigned)(at * unit % 8) : 0;
        if (word != last) {
            if (words.count == BATCH) HOT(digest_all, &words, digest);
            last = word;
            after = load_word(old, word, where.word, unit);
            words.index[words.count] = where.start + word;
            words.before[words.count++] = after;
        }
        after ^= (load(old + at * unit, unit) ^ load(values + i * unit, unit)) << shift;
        words.after[words.count - 1] = after;
    }
    HOT(digest_all, &words, digest);
}

/* For any unit width. Without positions, all units of a block are swapped. */
static void digest_change(
    const uint8_t *old, const uint32_t *positions, const uint8_t *values, size_t changes, unsigned unit, Indexing where,
    Digest *digest) {
    if (!positions) {
        Digest before;
        HOT(digest, old, changes * unit / where.word, where, &before);
        HOT(digest, values, changes * unit / where.word, where, digest);
        digest->sum[0] -= before.sum[0];
        digest->sum[1] -= before.sum[1];
        return;
    }
    switch (unit) {
        case 1: look_at_changes(old, positions, values, changes, where, digest, 1); break;
        case 2: look_at_changes(old, positions, values, changes, where, digest, 2); break;
        case 4: look_at_changes(old, positions, values, changes, where, digest, 4); break;
        default: look_at_changes(old, positions, values, changes, where, digest, 8); break;
    }
}

#endif
