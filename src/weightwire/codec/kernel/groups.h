/* A chunk of weights in groups of 64, as groups_loop.h fills it. */
#ifndef WW_GROUPS_H
#define WW_GROUPS_H

#include "exponent_classes.h"

enum { GROUPS = 64, CHUNK = 64 * GROUPS };

#define AHEAD 1024 /* bytes to fetch ahead: the machine does so by itself, but not across pages */

/* Per group of 64 weights and class, which of them belong to it, and how many of the chunk come before the group. */
typedef struct {
    unsigned groups;
    _Alignas(64) uint64_t members[GROUPS][CLASSES];
    _Alignas(64) uint16_t before[GROUPS + 1][CLASSES]; /* of groups that are not there: more than any rank */
    _Alignas(16) uint16_t eighths[CLASSES][8]; /* rows 0, 8, 16 ... of `before`, where vectors search them */
} Chunk;

#endif
