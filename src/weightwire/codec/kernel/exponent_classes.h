/* A weight's class and its place on the ordered integer line, as in ../exponent_classes.py. */
#ifndef WW_EXPONENT_CLASSES_H
#define WW_EXPONENT_CLASSES_H

#include "units.h"

enum { CLASSES = 16, ZERO_CLASS = 15, MOST_BOUNDS = CLASSES - 2, MOST_EXPONENTS = 1 << 11 };
enum { STEP_KINDS = 32 };

/* The class of each exponent. At least 256 entries, for vectors. */
typedef struct {
    uint8_t class[MOST_EXPONENTS];
} ClassTable;

typedef struct {
    unsigned unit, exponent, mantissa; /* bytes, bits, bits; no exponent: not a float */
    unsigned bounds;
    uint16_t bound[MOST_BOUNDS]; /* strictly descending */
    const ClassTable *table;
} Classing;

/* `ulp` and `dense` see units that are not floats as bytes, because few bytes of one change. */
static inline Classing coded_as(const Classing *k) {
    Classing coded = *k;
    if (!k->exponent) coded.unit = 1;
    return coded;
}

static inline uint8_t class_of(uint64_t bits, const Classing *k) {
    return k->table->class[bits >> k->mantissa & ((UINT64_C(1) << k->exponent) - 1)];
}

/* Fills the table from the bounds. */
static void use_bounds(Classing *k, ClassTable *table) {
    unsigned exponents = 1u << k->exponent, c = k->bounds;
    for (unsigned e = 0; e < exponents || e < 256; e++) {
        while (c && e >= k->bound[c - 1]) c--;
        table->class[e] = (uint8_t)c;
    }
    table->class[0] = ZERO_CLASS;
    k->table = table;
}

/* Without a branch: signs are random, and half of the predictions would be wrong. */
static inline uint64_t ordered(uint64_t bits, unsigned exponent, unsigned unit) {
    unsigned top = 8 * unit - 1;
    return exponent ? bits ^ ((0 - (bits >> top)) | UINT64_C(1) << top) : bits;
}

/* The step from old to new, sign-extended from the width of a unit. Of bytes that are not floats, from -127 to 128. */
static inline uint64_t step_between(uint64_t old, uint64_t new, unsigned exponent, unsigned unit) {
    /* One lower before the sign is extended: 128 stays positive. -128 would need the 257th symbol. */
    unsigned spare = 64 - 8 * unit, lower = !exponent;
    uint64_t difference = ordered(new, exponent, unit) - ordered(old, exponent, unit) - lower;
    return (uint64_t)((int64_t)(difference << spare) >> spare) + lower;
}

/* The unit after a step. Only its low bytes count. */
static inline uint64_t step_from(uint64_t old, uint64_t step, unsigned exponent, unsigned unit) {
    unsigned top = 8 * unit - 1;
    uint64_t there = ordered(old, exponent, unit) + step;
    return exponent ? there ^ (((there >> top & 1) - 1) | UINT64_C(1) << top) : there;
}

/* The units of each exponent, those that changed, and the kinds of their steps. */
typedef struct {
    uint32_t units[MOST_EXPONENTS], steps[MOST_EXPONENTS][STEP_KINDS];
} Counts;

#endif
