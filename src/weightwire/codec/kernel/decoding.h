/* Decodes a block in two steps. The caller allocates the results between them, because only then their size is known. */
#ifndef WW_DECODING_H
#define WW_DECODING_H

#include "dense_encoding.h"
#include "full_encoding.h"
#include "swap.h"
#include "ulp_encoding.h"

static inline int is_ulp(const uint8_t *data) { return (data[0] & 3) == ULP; }

static inline int is_full(const uint8_t *data) { return (data[0] & 3) == FULL; }

/* The number of units that hold these bytes. Positions ascend. */
static size_t count_joined(const uint32_t *position, size_t changes, unsigned unit) {
    size_t count = 0;
    for (size_t i = 0; i < changes; i++) count += !i || position[i] / unit != position[i - 1] / unit;
    return count;
}

/* Changed bytes -> changed units: those of a block, with these bytes in place of theirs. */
static void join_bytes(
    const Pieces *units, const uint32_t *position, const uint8_t *value, size_t changes, unsigned unit, uint32_t *to,
    uint8_t *out) {
    size_t count = 0;
    for (size_t i = 0; i < changes; i++) {
        uint32_t at = position[i] / unit;
        if (!count || to[count - 1] != at) {
            size_t byte = (size_t)at * unit, segment = byte / units->size;
            memcpy(out + count * unit, piece_of(units, segment) + (byte - segment * units->size), unit);
            to[count++] = at;
        }
        out[(count - 1) * unit + position[i] % unit] = value[i];
    }
}

/* The first step. `old` is NULL without a base. Returns the reason to reject the block, or NULL and how many units it
 * changes. `g` must be zero, and be freed in both cases. */
static const char *decode_start(
    const uint8_t *data, size_t size, const Pieces *old, size_t count, size_t line, Classing *k, Reading *g,
    size_t *changes) {
    unsigned kind = data[0] & 3;
    if (data[0] >> 4 > (kind != FULL) || !kind || (data[0] >> 2 & 3) == 3) return "it has an unknown encoding";
    if (kind != FULL && !old) return "it needs a base";
    const char *why = kind == ULP ? read_ulp(data, size, count, line, k, g) : NULL;
    *changes = kind == ULP ? g->steps : count;
    return why;
}

/* The second step: against the base, or into it if there is a target. After an error the target is unchanged. */
static const char *decode_finish(
    const uint8_t *data, size_t size, const Pieces *old, size_t count, size_t line, Classing *k, Reading *g,
    Landed *landed) {
    if (is_ulp(data)) return land_marks(g, old, count, line, k, landed);
    const char *why = (data[0] & 3) == DENSE ? decode_dense(data, size, old, count, line, k, landed->value)
                                             : decode_full(data, size, count, k, landed->value);
    if (!why && landed->target)
        swap_block(landed->target, NULL, landed->value, count, k->unit, landed->where, landed->digests);
    return why;
}

#endif
