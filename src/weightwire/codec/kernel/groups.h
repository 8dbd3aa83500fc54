/* A chunk of weights in groups of 64, as groups_loop.h fills it. */
#ifndef WW_GROUPS_H
#define WW_GROUPS_H

#include "exponent_classes.h"

enum { GROUPS = 64, CHUNK = 64 * GROUPS };

#define AHEAD 1024 /* bytes to prefetch: the hardware prefetcher does not cross pages */

/* For each group of 64 weights and each class: the members, and the number of members before the group. */
typedef struct {
    unsigned groups;
    _Alignas(64) uint64_t members[GROUPS][CLASSES];
    _Alignas(64) uint16_t before[GROUPS + 1][CLASSES]; /* for missing groups: more than any rank */
    _Alignas(16) uint16_t eighths[CLASSES][8]; /* rows 0, 8, 16 ... of `before`, for vector search */
} Chunk;

#endif
