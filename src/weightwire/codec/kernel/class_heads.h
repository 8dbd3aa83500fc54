/* The classes of a block in its bit stream, as in ../exponent_classes.py. */
#ifndef WW_CLASS_HEADS_H
#define WW_CLASS_HEADS_H

#include "bit_stream.h"
#include "exponent_classes.h"

/* The bounds, and which classes have a change. */
static void write_classes(BitWriter *w, const Classing *k, const uint8_t *present) {
    bits_number(w, k->bounds, 4);
    for (unsigned i = 0; i < k->bounds; i++) {
        if (i == 0)
            bits_number(w, k->bound[0], k->exponent);
        else
            bits_golomb(w, k->bound[i - 1] - k->bound[i] - 1u, 0);
    }
    for (unsigned c = 0; c <= k->bounds; c++) bits_number(w, present[c], 1);
    bits_number(w, present[ZERO_CLASS], 1);
}

static const char *read_bounds(BitReader *r, Classing *k) {
    k->bounds = (unsigned)read_number(r, 4);
    if (k->bounds > (k->exponent ? MOST_BOUNDS : 0)) return "it has too many classes";
    int64_t bound = 0;
    for (unsigned i = 0; i < k->bounds; i++) {
        bound = i ? bound - (int64_t)read_golomb(r, 0) - 1 : (int64_t)read_number(r, k->exponent);
        if (bound < 1) return "a class is out of range";
        k->bound[i] = (uint16_t)bound;
    }
    return NULL;
}

/* Fills `table` from the bounds, and lists the classes that have a change. */
static const char *read_classes(BitReader *r, Classing *k, ClassTable *table, uint8_t *present, unsigned *used) {
    const char *why = read_bounds(r, k);
    if (why) return why;
    use_bounds(k, table);
    uint64_t bits = read_number(r, k->bounds + 1);
    bits |= read_number(r, 1) << ZERO_CLASS;
    if (r->failed) return "its bit stream is too short";
    *used = 0;
    for (unsigned c = 0; c < CLASSES; c++)
        if (bits >> c & 1) present[(*used)++] = (uint8_t)c;
    return *used ? NULL : "it changes nothing";
}

#endif
