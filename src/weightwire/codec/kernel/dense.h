/* The units of a block as symbols of the `dense` encoding, as dense_loop.h finds and reads them. */
#ifndef WW_DENSE_H
#define WW_DENSE_H

#include "digest.h"
#include "groups.h"
#include "scratch.h"
#include "step_tables.h"

enum { APART = 4 }; /* neighbours often have the same symbol: counting them apart keeps additions from waiting */

/* How often each class has each symbol. 0: unchanged, else that of the step + 1. */
typedef struct {
    uint32_t of[APART][CLASSES][SYMBOLS];
} SymbolCounts;

typedef struct {
    uint8_t *symbol, *class;       /* of each unit */
    SymbolCounts *counts;          /* of the units in lines with a change, or of all without lines */
    uint32_t still[CLASSES];       /* the units of each class in the other lines */
    uint32_t *line;                /* lines with a change */
    size_t lines;
    Bytes raw;                     /* raw bits of all steps, */
    uint64_t held;                 /* the last of them, */
    unsigned held_bits;            /* and how many these are: below 8 */
    Digest *digests;               /* of each segment: the change of the digest, */
    uint32_t *changed;             /* and the changed units */
} DenseScan;

static int dense_new(DenseScan *s, size_t count, size_t lines) {
    s->symbol = scratch_new(count);
    s->class = scratch_new(count);
    s->counts = scratch_new(sizeof *s->counts);
    s->line = scratch_new((lines + 1) * sizeof *s->line);
    if (s->counts) memset(s->counts, 0, sizeof *s->counts);
    return s->symbol && s->class && s->counts && s->line;
}

static void dense_free(DenseScan *s) {
    scratch_free(s->symbol);
    scratch_free(s->class);
    scratch_free(s->counts);
    scratch_free(s->line);
    scratch_free(s->raw.data);
}

/* Appends at most 56 bits. The caller has reserved the bytes. */
static inline void raw_put(DenseScan *s, uint64_t value, unsigned width) {
    s->held |= low_bits(value, width) << s->held_bits;
    s->held_bits += width;
    memcpy(s->raw.data + s->raw.size, &s->held, 8);
    s->raw.size += s->held_bits / 8;
    s->held >>= s->held_bits & ~7u;
    s->held_bits &= 7;
}

/* What a symbol of a dense block stands for: the least magnitude of its step, and the raw bits to add. */
typedef struct {
    uint64_t least[SYMBOLS];
    uint8_t width[SYMBOLS];
} SymbolSteps;

static void symbol_steps(const Classing *k, SymbolSteps *out) {
    memset(out, 0, sizeof *out);
    for (unsigned s = 1; s < SYMBOLS && s <= 2 * tokens_of(k); s++) {
        unsigned raw;
        out->least[s] = least_of((s - 1) / 2, !k->exponent, &raw);
        out->width[s] = (uint8_t)raw;
    }
}

#endif
