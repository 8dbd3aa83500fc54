/* The changes of a block, by rank among the weights of their class, as scan_loop.h finds them. */
#ifndef WW_SCAN_H
#define WW_SCAN_H

#include "digest.h"
#include "groups.h"
#include "scratch.h"

/* A scan in progress: the members of each class so far, and those in lines without a change. */
typedef struct {
    uint64_t seen[CLASSES];
    uint64_t skipped[CLASSES];
    uint64_t last_word;
    Rewritten words;
    const uint8_t *old, *new; /* the segment that is scanned, and its digest */
    Digest *digest;
} Progress;

typedef struct {
    uint64_t step;
    uint32_t rank, rank_inside; /* among the members of its class: of the block, of its lines with any change */
} Change;

typedef struct {
    Change *change;
    uint8_t *class;
    size_t count, room;
    uint32_t *line; /* lines with a change */
    size_t lines, line_room;
    uint32_t members[CLASSES], inside[CLASSES];
    Digest *digests;   /* of each segment: the change of the digest, */
    uint32_t *changed; /* and the changed units */
} Scan;

static int scan_reserve(Scan *s, size_t more) {
    if (s->count + more <= s->room) return 1;
    size_t room = 2 * s->room + 2 * CHUNK;
    Change *change = scratch_grow(s->change, room * sizeof *change);
    if (change) s->change = change;
    uint8_t *class = scratch_grow(s->class, room);
    if (class) s->class = class;
    if (!change || !class) return 0;
    s->room = room;
    return 1;
}

static int scan_add_line(Scan *s, uint32_t line) {
    if (s->lines == s->line_room) {
        size_t room = 2 * s->line_room + 256;
        uint32_t *lines = scratch_grow(s->line, room * sizeof *lines);
        if (!lines) return 0;
        s->line = lines;
        s->line_room = room;
    }
    s->line[s->lines++] = line;
    return 1;
}

static void scan_free(Scan *s) {
    scratch_free(s->change);
    scratch_free(s->class);
    scratch_free(s->line);
}

#endif
