/* The start of every block, as in ../block_frame.py. */
#ifndef WW_BLOCK_FRAME_H
#define WW_BLOCK_FRAME_H

#include "rans.h"

enum { ULP = 1, DENSE = 2, FULL = 3, LINES = 16 };

static const uint8_t LANES[4] = {1, 4, 16, 0}; /* bits 2 and 3 of a tag are an index of these */

static const char OUT_OF_MEMORY[] = "out of memory";

static void encoder_finish(Encoder *e, uint8_t head, Bytes *out) {
    bytes_add_byte(out, (uint8_t)(head | (e->lanes == 16 ? 8 : e->lanes == 4 ? 4 : 0)));
    bytes_add_uvarint(out, e->room - e->at);
    bytes_add(out, e->state, 4 * e->lanes);
    bytes_add(out, e->words + e->at, 2 * (e->room - e->at));
}

/* Reads the start of a block. Returns the bytes after its words, or NULL. */
static const uint8_t *decoder_start(Decoder *d, const uint8_t *data, size_t size, const char **why) {
    uint64_t words = 0;
    size_t at = 1;
    *why = "it ends inside a number";
    for (unsigned shift = 0;; shift += 7) {
        if (at >= size) return NULL;
        uint8_t byte = data[at++];
        if (shift > 56 || (byte == 0 && shift)) {
            *why = "a number is not written in its shortest form or exceeds 64 bits";
            return NULL;
        }
        words |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80) break;
    }
    d->lanes = LANES[data[0] >> 2 & 3];
    *why = "its entropy-coded part is too short";
    if (words > size || 4 * d->lanes + 2 * words > size - at) return NULL;
    memcpy(d->state, data + at, 4 * d->lanes);
    for (unsigned i = 0; i < d->lanes; i++) {
        if (d->state[i] < RANS_LOW) {
            *why = "its entropy-coded part has an impossible state";
            return NULL;
        }
    }
    d->words = data + at + 4 * d->lanes;
    d->end = d->words + 2 * words;
    *why = NULL;
    return d->end;
}

#endif
