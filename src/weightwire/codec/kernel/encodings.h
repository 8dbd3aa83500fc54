/* The shortest encoding of a block, as in ../encodings.py. */
#ifndef WW_ENCODINGS_H
#define WW_ENCODINGS_H

#include "class_choice.h"
#include "plane_encodings.h"
#include "ulp_encoding.h"

static int equal(const Pieces *a, const Pieces *b, size_t segments) {
    for (size_t i = 0; i < segments; i++)
        if (memcmp(piece_of(a, i), piece_of(b, i), a->size)) return 0;
    return 1;
}

/* The shortest encoding of a block, empty if nothing changed. Changed units and changes of the digest are added for each
 * segment. */
static int encode_block(
    const Pieces *old, const Pieces *new, size_t count, size_t line, Classing *k, Indexing where, Bytes *out,
    uint32_t *changed, Digest *digests) {
    if (!old) {
        for (size_t i = 0; i < count / where.segment; i++) changed[i] = (uint32_t)where.segment;
        return encode_planes(NULL, new, count, k, SIZE_MAX, out);
    }
    if (equal(old, new, count / where.segment)) return 1;
    ClassTable table;
    if (!choose_classes(old, new, count, k, &table)) return 0;
    Scan s;
    memset(&s, 0, sizeof s);
    s.changed = changed;
    s.digests = digests;
    int good = HOT(scan, old, new, count, line, k, where, &s);
    size_t changes = s.count;
    good = good && encode_ulp(&s, k, line ? count / line : 0, out);
    scan_free(&s);
    if (!good || 8 * changes <= count) return good;
    for (int full = 0; full < 2; full++) {
        Bytes other = {0};
        if (!encode_planes(full ? NULL : old, new, count, k, out->size, &other)) {
            scratch_free(other.data);
            return 0;
        }
        if (other.size && other.size < out->size) {
            Bytes worse = *out;
            *out = other;
            other = worse;
        }
        scratch_free(other.data);
    }
    return 1;
}

#endif
