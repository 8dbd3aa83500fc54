/* Units of 1, 2, 4 or 8 bytes, anywhere in memory. */
#ifndef WW_UNITS_H
#define WW_UNITS_H

#include <stdint.h>
#include <string.h>

static inline uint64_t load(const uint8_t *p, unsigned bytes) {
    uint64_t value = 0;
    memcpy(&value, p, bytes);
    return value;
}

/* The units of a block: one behind the other, or each segment elsewhere. */
typedef struct {
    uint8_t *all;
    uint8_t *const *each; /* NULL: one behind the other */
    size_t size;          /* of a segment, in bytes */
} Pieces;

static inline uint8_t *piece_of(const Pieces *p, size_t segment) {
    return p->each ? p->each[segment] : p->all + segment * p->size;
}

static inline __attribute__((always_inline)) void put_each(
    uint8_t *target, const uint32_t *positions, const uint8_t *values, size_t count, const unsigned unit) {
    for (size_t i = 0; i < count; i++) memcpy(target + (size_t)positions[i] * unit, values + i * unit, unit);
}

/* Writes values to their positions. */
static void put_units(
    uint8_t *target, const uint32_t *positions, const uint8_t *values, size_t count, unsigned unit) {
    switch (unit) {
        case 1: put_each(target, positions, values, count, 1); break;
        case 2: put_each(target, positions, values, count, 2); break;
        case 4: put_each(target, positions, values, count, 4); break;
        default: put_each(target, positions, values, count, 8); break;
    }
}

#endif
