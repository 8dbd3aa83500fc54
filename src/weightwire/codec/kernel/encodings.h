/* The shortest encoding of a block, as in ../encodings.py. */
#ifndef WW_ENCODINGS_H
#define WW_ENCODINGS_H

#include "plane_encodings.h"
#include "ulp_encoding.h"

/* The shortest encoding of a block, empty if nothing changed. `lines` is the number of lines that may be skipped, or 0. */
static int encode_block(
    const uint8_t *old, const uint8_t *new, size_t count, size_t line, Classing *k, Indexing where, Bytes *out,
    size_t *changed, Digest *digest) {
    *changed = count;
    if (!old) return encode_planes(NULL, new, count, k, SIZE_MAX, out);
    *changed = 0;
    if (!memcmp(old, new, count * k->unit)) return 1;
    choose_window(old, new, count, k);
    Scan s;
    memset(&s, 0, sizeof s);
    int good = HOT(scan, old, new, count, line, k, where, &s);
    *changed = s.count;
    *digest = s.digest;
    good = good && encode_ulp(&s, k, line ? count / line : 0, out);
    scan_free(&s);
    if (!good || 8 * *changed <= count) return good;
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
