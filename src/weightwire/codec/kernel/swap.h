/* Swaps values with units of a block, and computes the change of the digest. */
#ifndef WW_SWAP_H
#define WW_SWAP_H

#include "hot.h"

enum { SOON = 32 }; /* changes to prefetch: they are too far apart for the hardware prefetcher */

/* Exchanges all units of the target with values. */
static void swap_all(const Pieces *target, uint8_t *values, size_t size, Indexing where, Digest *digests) {
    enum { PIECE = 4096 }; /* bytes: a multiple of all words */
    uint8_t held[PIECE];
    for (size_t start = 0; start < size; start += target->size) {
        uint8_t *segment = piece_of(target, start / target->size);
        Digest before = {{0}}, *after = &digests[start / target->size];
        for (size_t at = 0, here; at < target->size; at += here, values += here) {
            here = target->size - at < PIECE ? target->size - at : PIECE;
            HOT(digest, segment + at, here, where.word, where.start + at / where.word, &before);
            HOT(digest, values, here, where.word, where.start + at / where.word, after);
            memcpy(held, segment + at, here);
            memcpy(segment + at, values, here);
            memcpy(values, held, here);
        }
        for (unsigned i = 0; i < 2; i++) after->sum[i] -= before.sum[i];
    }
}

/* Exchanges values and units of the target at their positions. Each change adds its part to the digest, so positions may be in any order. */
static inline __attribute__((always_inline)) void swap_at(
    const Pieces *target, const uint32_t *positions, uint8_t *values, size_t changes, Indexing where, Digest *digests,
    const unsigned unit) {
    Rewritten words;
    size_t origin = 0;
    Digest *digest = digests;
    uint8_t *piece = changes ? piece_of(target, 0) : NULL;
    words.count = 0;
    for (size_t i = 0; i < changes; i++) {
        if (i + SOON < changes) {
            size_t soon = positions[i + SOON] - origin;
            if (soon < where.segment) __builtin_prefetch(piece + soon * unit, 1);
        }
        size_t at = positions[i];
        if (at - origin >= where.segment) { /* positions of a segment are mostly neighbours */
            HOT(digest_all, &words, digest);
            digest = digests + at / where.segment;
            origin = at - at % where.segment;
            piece = piece_of(target, at / where.segment);
        }
        uint64_t was = load(piece + (at - origin) * unit, unit), to = load(values + i * unit, unit);
        write_unit(piece, at - origin, was, to, where, &words, unit);
        memcpy(values + i * unit, &was, unit);
        if (words.count == BATCH) HOT(digest_all, &words, digest);
    }
    HOT(digest_all, &words, digest);
}

static void swap_block(
    const Pieces *target, const uint32_t *positions, uint8_t *values, size_t changes, unsigned unit, Indexing where,
    Digest *digests) {
    if (!positions) {
        swap_all(target, values, changes * unit, where, digests);
        return;
    }
    switch (unit) {
        case 1: swap_at(target, positions, values, changes, where, digests, 1); break;
        case 2: swap_at(target, positions, values, changes, where, digests, 2); break;
        case 4: swap_at(target, positions, values, changes, where, digests, 4); break;
        default: swap_at(target, positions, values, changes, where, digests, 8); break;
    }
}

/* The change of the digests by a swap, without writing. Positions must ascend: changes of one word are then neighbours. */
static inline __attribute__((always_inline)) void look_at_changes(
    const Pieces *old, const uint32_t *positions, const uint8_t *values, size_t changes, Indexing where,
    Digest *digest, const unsigned unit) {
    Rewritten words;
    uint64_t last = UINT64_MAX, after = 0;
    size_t origin = 0;
    const uint8_t *piece = changes ? piece_of(old, 0) : NULL;
    words.count = 0;
    for (size_t i = 0; i < changes; i++) {
        size_t soon = i + SOON < changes ? positions[i + SOON] - origin : where.segment;
        if (soon < where.segment) __builtin_prefetch(piece + soon * unit);
        size_t at = positions[i];
        if (at - origin >= where.segment) {
            HOT(digest_all, &words, digest);
            digest += at / where.segment - origin / where.segment;
            origin = at - at % where.segment;
            piece = piece_of(old, at / where.segment);
            last = UINT64_MAX;
        }
        size_t in_segment = at - origin, word = word_of(in_segment, where.word, unit);
        unsigned shift = shift_in(in_segment, where.word, unit);
        if (word != last) {
            if (words.count == BATCH) HOT(digest_all, &words, digest);
            last = word;
            after = load_word(piece, word, where.word, unit);
            words.index[words.count] = where.start + word;
            words.before[words.count++] = after;
        }
        after ^= (load(piece + in_segment * unit, unit) ^ load(values + i * unit, unit)) << shift;
        words.after[words.count - 1] = after;
    }
    HOT(digest_all, &words, digest);
}

/* Adds the digest of each segment of a block. */
static void digest_segments(const Pieces *p, size_t segments, Indexing where, Digest *digests) {
    for (size_t i = 0; i < segments; i++) HOT(digest, piece_of(p, i), p->size, where.word, where.start, &digests[i]);
}

/* For any unit width. Without positions, all units of a block are swapped. The digests must be zero. */
static void digest_change(
    const Pieces *old, const uint32_t *positions, const uint8_t *values, size_t changes, unsigned unit, Indexing where,
    Digest *digests) {
    if (!positions) {
        Pieces after = {(uint8_t *)(uintptr_t)values, NULL, old->size};
        size_t segments = changes / where.segment;
        digest_segments(old, segments, where, digests);
        for (size_t i = 0; i < segments; i++)
            digests[i] = (Digest){{0 - digests[i].sum[0], 0 - digests[i].sum[1]}};
        digest_segments(&after, segments, where, digests);
        return;
    }
    switch (unit) {
        case 1: look_at_changes(old, positions, values, changes, where, digests, 1); break;
        case 2: look_at_changes(old, positions, values, changes, where, digests, 2); break;
        case 4: look_at_changes(old, positions, values, changes, where, digests, 4); break;
        default: look_at_changes(old, positions, values, changes, where, digests, 8); break;
    }
}

#endif
