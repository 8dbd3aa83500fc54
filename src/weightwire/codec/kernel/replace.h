/* Replaces a target by its source and keeps the old units: `replace_block` of ../numpy_kernel.py. */
#ifndef WW_REPLACE_H
#define WW_REPLACE_H

#include "groups.h"
#include "scratch.h"

/* A replacement in progress: the differences so far, and the old units. */
typedef struct {
    uint32_t *position;
    uint8_t *value;
    size_t count, room;
    size_t reached; /* units of the target that are replaced */
} Replaced;

static int replaced_reserve(Replaced *t, size_t more, unsigned unit) {
    if (t->count + more <= t->room) return 1;
    size_t room = 2 * t->room + 2 * CHUNK;
    uint32_t *position = scratch_grow(t->position, room * sizeof *position);
    if (position) t->position = position;
    uint8_t *value = scratch_grow(t->value, room * unit);
    if (value) t->value = value;
    if (!position || !value) return 0;
    t->room = room;
    return 1;
}

static void replaced_free(Replaced *t) {
    scratch_free(t->position);
    scratch_free(t->value);
}

/* The largest number of changes to list. With more, all old units take less space than old units with positions. */
static size_t replaced_most(size_t count, unsigned unit) { return count * unit / (unit + sizeof(uint32_t)); }

/* Continues after too many changes to list: `values` gets all old units. */
static void replace_rest(
    const Replaced *t, uint8_t *target, const uint8_t *source, size_t count, unsigned unit, uint8_t *values) {
    enum { PIECE = 4096 }; /* bytes */
    size_t size = count * unit, begin = t->reached * unit;
    memcpy(values, target, begin);
    put_units(values, t->position, t->value, t->count, unit);
    for (size_t at = begin; at < size; at += PIECE) {
        size_t here = size - at < PIECE ? size - at : PIECE;
        memcpy(values + at, target + at, here);
        if (memcmp(target + at, source + at, here)) memcpy(target + at, source + at, here);
    }
}

#endif
