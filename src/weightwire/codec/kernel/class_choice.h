/* Chooses the classes of a block: choose_classes of ../exponent_classes.py. */
#ifndef WW_CLASS_CHOICE_H
#define WW_CLASS_CHOICE_H

#include "hot.h"

enum { STRETCH = 1024, STRETCHES = 128, ENOUGH = 256 };
enum { MANY = 8 }; /* a block is dense if more than one of so many units changes */

#define HEAD_COST (UINT64_C(24) << 24)  /* of a class */
#define NOISE_COST (UINT64_C(4) << 24) /* by which a sample flatters a class */

/* Neighbours often have the same exponent. Counting them apart keeps an addition from waiting for the one before. */
static inline __attribute__((always_inline)) void count_apart(
    const uint8_t *old, size_t count, const Classing *k, uint32_t *units, const unsigned unit) {
    enum { APART = 4, ROWS = 256 };
    uint32_t apart[APART][ROWS] = {{0}};
    unsigned shift = k->mantissa, rows = 1u << k->exponent;
    size_t i = 0;
    for (; rows <= ROWS && i + APART <= count; i += APART)
        for (unsigned j = 0; j < APART; j++) apart[j][load(old + (i + j) * unit, unit) >> shift & (rows - 1)]++;
    for (; i < count; i++) units[load(old + i * unit, unit) >> shift & (rows - 1)]++;
    for (unsigned e = 0; rows <= ROWS && e < rows; e++)
        for (unsigned j = 0; j < APART; j++) units[e] += apart[j][e];
}

static void count_units(const uint8_t *old, size_t count, const Classing *k, uint32_t *units) {
    switch (k->unit) {
        case 1: count_apart(old, count, k, units, 1); break;
        case 2: count_apart(old, count, k, units, 2); break;
        case 4: count_apart(old, count, k, units, 4); break;
        default: count_apart(old, count, k, units, 8); break;
    }
}

/* The counts of a stretch of a block, which may cover parts of several segments. `units` is NULL if they are known. */
static void count_stretch(
    const Pieces *old, const Pieces *new, size_t start, size_t count, const Classing *k, Counts *found, int units) {
    size_t segment = old->size / k->unit;
    while (count) {
        size_t which = start / segment, at = start - which * segment, here = segment - at < count ? segment - at : count;
        const uint8_t *o = piece_of(old, which) + at * k->unit, *n = piece_of(new, which) + at * k->unit;
        HOT(count_steps, o, n, here, k, found->steps);
        if (units) count_units(o, here, k, found->units);
        start += here;
        count -= here;
    }
}

/* Neighbouring exponents, and what their marks and steps cost as a class of their own. */
typedef struct {
    unsigned high;
    uint32_t units, steps[STEP_KINDS];
    uint64_t cost;
} Group;

static void group_cost(Group *g, uint64_t penalty) {
    uint64_t changed = 0;
    for (unsigned i = 0; i < STEP_KINDS; i++) changed += g->steps[i];
    g->cost = changed ? entropy_of_two(changed, g->units - changed) + entropy_of(g->steps, STEP_KINDS) + penalty : 0;
}

static void group_both(Group *out, const Group *a, const Group *b, uint64_t penalty) {
    *out = *a;
    out->units += b->units;
    for (unsigned i = 0; i < STEP_KINDS; i++) out->steps[i] += b->steps[i];
    group_cost(out, penalty);
}

/* Starts with a class for each exponent. Merges the two neighbours that lose least until all merges lose. */
static int merge_exponents(Classing *k, const Counts *found, uint64_t penalty) {
    unsigned exponents = 1u << k->exponent, groups = 0;
    Group *group = scratch_new(2 * exponents * sizeof *group), *merged = group + exponents;
    if (!group) return 0;
    for (unsigned e = exponents; e-- > 1;) {
        if (!found->units[e]) continue;
        Group *g = &group[groups++];
        g->high = e;
        g->units = found->units[e];
        memcpy(g->steps, found->steps[e], sizeof g->steps);
        group_cost(g, penalty);
    }
    for (unsigned i = 0; i + 1 < groups; i++) group_both(&merged[i], &group[i], &group[i + 1], penalty);
    while (groups > 1) {
        unsigned best = 0;
        int64_t least = INT64_MAX;
        for (unsigned i = 0; i + 1 < groups; i++) {
            int64_t loss = (int64_t)(merged[i].cost - group[i].cost - group[i + 1].cost);
            if (loss < least) {
                least = loss;
                best = i;
            }
        }
        if (least > 0 && groups < CLASSES) break;
        group[best] = merged[best];
        groups--;
        memmove(&group[best + 1], &group[best + 2], (groups - best - 1) * sizeof *group);
        memmove(&merged[best], &merged[best + 1], (groups - best) * sizeof *merged);
        for (unsigned i = best ? best - 1 : 0; i < best + 1 && i + 1 < groups; i++)
            group_both(&merged[i], &group[i], &group[i + 1], penalty);
    }
    k->bounds = groups ? groups - 1 : 0;
    for (unsigned i = 0; i < k->bounds; i++) k->bound[i] = (uint16_t)(group[i + 1].high + 1);
    scratch_free(group);
    return 1;
}

/* Chooses the classes of a block from a sample, and tells if many units change. Returns 0 if memory runs out. */
static int choose_classes(
    const Pieces *old, const Pieces *new, size_t count, Classing *k, ClassTable *table, int *dense) {
    size_t seen = count < STRETCH * STRETCHES ? count : STRETCH * STRETCHES, rows = (size_t)1 << k->exponent;
    Counts *found = scratch_new(sizeof *found);
    if (!found) return 0;
    memset(found->units, 0, rows * sizeof *found->units);
    memset(found->steps, 0, rows * sizeof *found->steps);
    if (seen == count) count_stretch(old, new, 0, count, k, found, 1);
    for (size_t i = 0; seen < count && i < STRETCHES; i++)
        count_stretch(old, new, i * (count - STRETCH) / (STRETCHES - 1), STRETCH, k, found, 1);
    uint64_t changed = 0, penalty = HEAD_COST;
    for (size_t e = 0; e < rows; e++)
        for (unsigned i = 0; i < STEP_KINDS; i++) changed += found->steps[e][i];
    *dense = MANY * changed > seen;
    if (seen < count && changed < ENOUGH) {
        memset(found->steps, 0, rows * sizeof *found->steps);
        count_stretch(old, new, 0, count, k, found, 0);
        for (size_t e = 0; e < rows; e++) {
            uint64_t units = (uint64_t)found->units[e] * count / seen, here = 0;
            for (unsigned i = 0; i < STEP_KINDS; i++) here += found->steps[e][i];
            found->units[e] = (uint32_t)(units > here ? units : here);
        }
    } else if (seen < count) {
        penalty = penalty * seen / count + NOISE_COST;
    }
    int good = merge_exponents(k, found, penalty);
    scratch_free(found);
    use_bounds(k, table);
    return good;
}

#endif
