/* Decodes a block in two steps. The caller allocates the results between them, because only then their size is known. */
#ifndef WW_DECODING_H
#define WW_DECODING_H

#include "dense_encoding.h"
#include "full_encoding.h"
#include "swap.h"
#include "ulp_encoding.h"

static inline int is_ulp(const uint8_t *data) { return (data[0] & 3) == ULP; }

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
