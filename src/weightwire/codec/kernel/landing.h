/* The changes to apply to a block, and the changes applied so far, for landing_loop.h. */
#ifndef WW_LANDING_H
#define WW_LANDING_H

#include "bit_stream.h"
#include "digest.h"
#include "groups.h"

#define FAR (UINT32_C(1) << 31) /* larger than any distance in a block */

typedef struct {
    const uint32_t *listed; /* NULL: all */
    size_t count, length;
} Lines;

typedef struct {
    uint8_t class;
    int complement;
    const uint32_t *distance; /* members before the first mark, then from mark to mark, then FAR */
    uint64_t left;            /* members before the next mark */
    const uint64_t *step, *step_end;
} Cursor;

/* The applied changes. With a target, they are written into it, and `value` holds the old units. */
typedef struct {
    uint32_t *position;
    uint8_t *value;
    size_t count;
    const Pieces *target;
    Indexing where;
    Digest *digests; /* of each segment: the change of the digest */
} Landed;

/* Restores the old units. Positions of a segment are neighbours. */
static void put_back(const Landed *landed, unsigned unit) {
    size_t origin = 0, segment = landed->where.segment, which = 0;
    for (size_t i = 0; landed->target && i < landed->count; i++) {
        size_t at = landed->position[i];
        if (at - origin >= segment) {
            which = at / segment;
            origin = which * segment;
        }
        memcpy(piece_of(landed->target, which) + (at - origin) * unit, landed->value + i * unit, unit);
    }
}

#endif
