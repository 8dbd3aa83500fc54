/* The choice between the encodings of a block, as in ../encodings.py. */
#ifndef WW_ENCODINGS_H
#define WW_ENCODINGS_H

#include "class_choice.h"
#include "dense_encoding.h"
#include "full_encoding.h"
#include "ulp_encoding.h"

static int equal(const Pieces *a, const Pieces *b, size_t segments) {
    for (size_t i = 0; i < segments; i++)
        if (memcmp(piece_of(a, i), piece_of(b, i), a->size)) return 0;
    return 1;
}

static int scan_and_encode_ulp(
    const Pieces *old, const Pieces *new, size_t count, size_t line, const Classing *k, Indexing where, Bytes *out,
    uint32_t *changed, Digest *digests) {
    Scan s;
    memset(&s, 0, sizeof s);
    s.changed = changed;
    s.digests = digests;
    int good = HOT(scan, old, new, count, line, k, where, &s);
    good = good && encode_ulp(&s, k, line ? count / line : 0, out);
    scan_free(&s);
    return good;
}

/* The changed units of each segment. */
static void count_changed(const Pieces *old, const Pieces *new, size_t segments, unsigned unit, uint32_t *changed) {
    for (size_t i = 0; i < segments; i++) {
        const uint8_t *o = piece_of(old, i), *n = piece_of(new, i);
        changed[i] = 0;
        for (size_t at = 0; at < old->size; at += unit) changed[i] += load(o + at, unit) != load(n + at, unit);
    }
}

/* The encoding of a block that should be shortest, empty if nothing changed. Sets the changed units, and adds the changes
 * of the digest, of each segment. */
static int encode_block(
    const Pieces *old, const Pieces *new, size_t count, size_t line, const Classing *k, Indexing where, Bytes *out,
    uint32_t *changed, Digest *digests) {
    if (!old) {
        for (size_t i = 0; i < count / where.segment; i++) changed[i] = (uint32_t)where.segment;
        return encode_full(new, count, k, SIZE_MAX, out);
    }
    if (equal(old, new, count / where.segment)) return 1;
    Classing coded = coded_as(k);
    unsigned in_unit = k->unit / coded.unit;
    Indexing within = {where.word, where.start, where.segment * in_unit};
    ClassTable table;
    int dense, good;
    if (!choose_classes(old, new, count * in_unit, &coded, &table, &dense)) return 0;
    if (dense)
        good = encode_dense(old, new, count * in_unit, line * in_unit, &coded, within, out, changed, digests);
    else
        good = scan_and_encode_ulp(old, new, count * in_unit, line * in_unit, &coded, within, out, changed, digests);
    if (good && in_unit > 1) count_changed(old, new, count / where.segment, k->unit, changed);
    if (!good || 8 * out->size <= 5 * count * k->unit) return good;
    Bytes full = {0};
    good = encode_full(new, count, k, out->size, &full);
    if (good && full.size && full.size < out->size) {
        Bytes longer = *out;
        *out = full;
        full = longer;
    }
    scratch_free(full.data);
    return good;
}

#endif
