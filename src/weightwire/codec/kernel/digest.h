/* The state digest, as in ../digest.py: two sums of terms of (index, word). */
#ifndef WW_DIGEST_H
#define WW_DIGEST_H

#include "units.h"

enum { BATCH = 256 }; /* words digested together */

typedef struct {
    uint64_t sum[2];
} Digest;

/* How a block is digested: over 8-byte words or over units. Each segment of so many units has a digest of its own, and
 * its first word has the index `start`. */
typedef struct {
    unsigned word;
    uint64_t start;
    size_t segment;
} Indexing;

/* A word is 8 bytes, or an element: one unit, or several if units are its bytes. Constant sizes avoid a call of memcpy. */
static inline uint64_t load_word(const uint8_t *p, uint64_t index, unsigned word, unsigned unit) {
    return word == 8 ? load(p + index * 8, 8) : word == unit ? load(p + index * unit, unit) : load(p + index * word, word);
}

/* The word of a unit. */
static inline size_t word_of(size_t at, unsigned word, unsigned unit) {
    return word == 8 ? at * unit / 8 : word == unit ? at : at * unit / word;
}

/* How far a unit is shifted in its word. */
static inline unsigned shift_in(size_t at, unsigned word, unsigned unit) {
    return word == unit ? 0 : 8 * (unsigned)(at * unit % word);
}

static inline uint64_t digest_a(uint64_t index, uint64_t word) {
    uint64_t a = word + (index + 1) * UINT64_C(0x9E3779B97F4A7C15);
    a ^= a >> 32;
    a *= UINT64_C(0xD6E8FEB86659FD93);
    a ^= a >> 32;
    a *= UINT64_C(0xD6E8FEB86659FD93);
    return a ^ a >> 32;
}

static inline uint64_t digest_b(uint64_t index, uint64_t word) {
    uint64_t b = (word ^ UINT64_C(0xC2B2AE3D27D4EB4F)) + (index + 1) * UINT64_C(0xA0761D6478BD642F);
    b ^= b >> 30;
    b *= UINT64_C(0xBF58476D1CE4E5B9);
    b ^= b >> 27;
    b *= UINT64_C(0x94D049BB133111EB);
    return b ^ b >> 31;
}

/* Changed words, digested in batches that the compiler can vectorize. */
typedef struct {
    size_t count;
    uint64_t index[BATCH], before[BATCH], after[BATCH];
} Rewritten;

/* Changes a unit of a run. Builds the new word in a register: loading it after a narrower store would stall. */
static inline void write_unit(
    uint8_t *target, size_t at, uint64_t was, uint64_t to, Indexing where, Rewritten *out, unsigned unit) {
    size_t word = word_of(at, where.word, unit), n = out->count++;
    unsigned shift = shift_in(at, where.word, unit);
    uint64_t before = load_word(target, word, where.word, unit);
    memcpy(target + at * unit, &to, unit);
    out->index[n] = where.start + word;
    out->before[n] = before;
    out->after[n] = before ^ (was ^ to) << shift;
}

#endif
