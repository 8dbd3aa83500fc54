/* A weight's class and its place on the ordered integer line, as in ../exponent_classes.py; and what the hot loops share. */
#ifndef WW_EXPONENT_CLASSES_H
#define WW_EXPONENT_CLASSES_H

#include "digest.h"
#include "tables.h"

enum { CLASSES = 16, ZERO_CLASS = 15, GROUPS = 64, CHUNK = 64 * GROUPS };
enum { STRETCH = 1024, STRETCHES = 64, ENOUGH = 256, RARE = 128 };

typedef struct {
    unsigned unit, exponent, mantissa; /* bytes, bits, bits; no exponent: not a float */
    unsigned top, width;               /* the window */
} Classing;

static inline uint8_t class_of(uint64_t bits, const Classing *k) {
    int exponent = (int)(bits >> k->mantissa & ((UINT64_C(1) << k->exponent) - 1));
    int below = (int)k->top - exponent, last = (int)k->width - 1;
    return exponent ? (uint8_t)(below < 0 ? 0 : below > last ? last : below) : ZERO_CLASS;
}

/* Without a branch: signs are as good as random, and half of all guesses would be wrong. */
static inline uint64_t ordered(uint64_t bits, unsigned exponent, unsigned unit) {
    unsigned top = 8 * unit - 1;
    return exponent ? bits ^ ((0 - (bits >> top)) | UINT64_C(1) << top) : bits;
}

/* The step from old to new, sign-extended from the width of a unit. */
static inline uint64_t step_between(uint64_t old, uint64_t new, unsigned exponent, unsigned unit) {
    unsigned spare = 64 - 8 * unit;
    uint64_t difference = ordered(new, exponent, unit) - ordered(old, exponent, unit);
    return (uint64_t)((int64_t)(difference << spare) >> spare);
}

/* The unit that a step leads to; only its low bytes count. */
static inline uint64_t step_from(uint64_t old, uint64_t step, unsigned exponent, unsigned unit) {
    unsigned top = 8 * unit - 1;
    uint64_t there = ordered(old, exponent, unit) + step;
    return exponent ? there ^ (((there >> top & 1) - 1) | UINT64_C(1) << top) : there;
}

static void count_changed(
    const uint8_t *old, const uint8_t *new, size_t count, const Classing *k, uint32_t *exponents) {
    uint64_t field = (UINT64_C(1) << k->exponent) - 1;
    unsigned unit = k->unit;
    size_t at = 0, step = 8 / unit;
    while (at < count) {
        if (count - at >= step && load(old + at * unit, 8) == load(new + at * unit, 8)) {
            at += step;
            continue;
        }
        for (size_t end = count - at < step ? count : at + step; at < end; at++) {
            uint64_t bits = load(old + at * unit, unit);
            if (bits != load(new + at * unit, unit)) exponents[bits >> k->mantissa & field]++;
        }
    }
}

static void choose_window(const uint8_t *old, const uint8_t *new, size_t count, Classing *k) {
    uint32_t found[1 << 11] = {0};
    unsigned exponents = 1u << k->exponent;
    size_t starts = 1, length = count;
    if (count > STRETCH * STRETCHES) {
        starts = STRETCHES;
        length = STRETCH;
    }
    for (size_t i = 0; i < starts; i++) {
        size_t start = starts > 1 ? i * (count - length) / (starts - 1) : 0;
        count_changed(old + start * k->unit, new + start * k->unit, length, k, found);
    }
    uint64_t seen = length * starts, total = 0, above = 0, below = 0;
    for (unsigned e = 0; e < exponents; e++) total += found[e];
    if (total < ENOUGH && seen < count) {
        memset(found, 0, sizeof found);
        count_changed(old, new, count, k, found);
        seen = count;
        total = 0;
        for (unsigned e = 0; e < exponents; e++) total += found[e];
    }
    total -= found[0];
    k->top = 0;
    k->width = 1;
    if (!total) return;
    unsigned high = exponents - 1, low = 1;
    while ((above + found[high]) * ENOUGH <= total) above += found[high--];
    while (low < high && (below + found[low]) * count < RARE * seen && 16 * (below + found[low]) < total)
        below += found[low++];
    k->top = high + 1 < exponents ? high + 1 : exponents - 1;
    k->width = k->top - low + 1 < CLASSES - 1 ? k->top - low + 1 : CLASSES - 1;
}

/* --- what the hot loops fill and read --- */

/* Per group of 64 weights and class, which of them belong to it, and how many of the chunk come before the group. */
typedef struct {
    unsigned groups;
    _Alignas(64) uint64_t members[GROUPS][CLASSES];
    _Alignas(64) uint16_t before[GROUPS + 1][CLASSES]; /* of groups that are not there: more than any rank */
    _Alignas(16) uint16_t eighths[CLASSES][8]; /* rows 0, 8, 16 ... of `before`, where vectors search them */
} Chunk;

/* A scan under way: the members of each class seen so far, and those of them in lines without a change. */
typedef struct {
    uint64_t seen[CLASSES];
    uint64_t skipped[CLASSES];
    uint64_t last_word;
    Rewritten words;
} Progress;

typedef struct {
    uint64_t step;
    uint32_t rank, rank_inside; /* among the members of its class: of the block, of its lines with any change */
} Change;

typedef struct {
    Change *change;
    uint8_t *class;
    size_t count, room;
    uint32_t *line; /* those with any change */
    size_t lines, line_room;
    uint32_t members[CLASSES], inside[CLASSES];
    Digest digest; /* what the changes add to it */
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

/* A target that becomes its source: what differed so far, and what was there before. */
typedef struct {
    uint32_t *position;
    uint8_t *value;
    size_t count, room;
    size_t reached; /* units of the target that are those of the source */
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

#define AHEAD 1024 /* bytes to fetch ahead: the machine does so by itself, but not across pages */

#define FAR (UINT32_C(1) << 31) /* more than a block has weights */

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

/* What has landed where. With a target, the changes are written into it, and `value` holds what was there before. */
typedef struct {
    uint32_t *position;
    uint8_t *value;
    size_t count;
    uint8_t *target;
    Indexing where;
    Digest digest; /* what the changes add to it */
} Landed;

#endif
