/* A target that becomes its source, and what it was before: what ../numpy_kernel.py says of `replace_block`. */
#ifndef WW_REPLACE_H
#define WW_REPLACE_H

#include "hot.h"

/* So many changes are listed: with more, all units take less room than some of them and their positions. */
static size_t replaced_most(size_t count, unsigned unit) { return count * unit / (unit + sizeof(uint32_t)); }

static inline __attribute__((always_inline)) void put_units(const Replaced *t, uint8_t *target, const unsigned unit) {
    for (size_t i = 0; i < t->count; i++)
        memcpy(target + (size_t)t->position[i] * unit, t->value + i * unit, unit);
}

/* Writes what has been replaced into a copy of where it was replaced from, or back. */
static void put_replaced(const Replaced *t, uint8_t *target, unsigned unit) {
    switch (unit) {
        case 1: put_units(t, target, 1); break;
        case 2: put_units(t, target, 2); break;
        case 4: put_units(t, target, 4); break;
        default: put_units(t, target, 8); break;
    }
}

/* Goes on where there were too many changes to list: `values` get all units that the target had. */
static void replace_rest(
    const Replaced *t, uint8_t *target, const uint8_t *source, size_t count, unsigned unit, uint8_t *values) {
    enum { PIECE = 4096 }; /* bytes */
    size_t size = count * unit, begin = t->reached * unit;
    memcpy(values, target, begin);
    put_replaced(t, values, unit);
    for (size_t at = begin; at < size; at += PIECE) {
        size_t here = size - at < PIECE ? size - at : PIECE;
        memcpy(values + at, target + at, here);
        if (memcmp(target + at, source + at, here)) memcpy(target + at, source + at, here);
    }
}

#endif
