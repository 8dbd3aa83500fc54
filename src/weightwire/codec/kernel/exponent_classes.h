/* A weight's class and its place on the ordered integer line, as in ../exponent_classes.py. */
#ifndef WW_EXPONENT_CLASSES_H
#define WW_EXPONENT_CLASSES_H

#include "units.h"

enum { CLASSES = 16, ZERO_CLASS = 15 };
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

/* Without a branch: signs are random, and half of the predictions would be wrong. */
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

/* The unit after a step. Only its low bytes count. */
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

#endif
