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
    const Replaced *t, const Pieces *target, const Pieces *source, size_t count, unsigned unit, uint8_t *values) {
    enum { PIECE = 4096 }; /* bytes */
    size_t reached = t->reached * unit;
    for (size_t at = 0; at < count * unit; at += target->size) {
        uint8_t *to = piece_of(target, at / target->size);
        const uint8_t *from = piece_of(source, at / target->size);
        for (size_t i = 0, here; i < target->size; i += here) {
            here = target->size - i < PIECE ? target->size - i : PIECE;
            if (at + i < reached && reached - at - i < here) here = reached - at - i;
            memcpy(values + at + i, to + i, here);
            if (at + i >= reached && memcmp(to + i, from + i, here)) memcpy(to + i, from + i, here);
        }
    }
    put_units(values, t->position, t->value, t->count, unit);
}

/* Restores the units that were replaced. */
static void put_back_replaced(const Replaced *t, const Pieces *target, unsigned unit) {
    size_t segment = target->size / unit;
    for (size_t i = 0; i < t->count; i++) {
        size_t which = t->position[i] / segment, at = t->position[i] - which * segment;
        memcpy(piece_of(target, which) + at * unit, t->value + i * unit, unit);
    }
}

#endif
