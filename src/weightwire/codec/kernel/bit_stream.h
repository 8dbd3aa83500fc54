/* The bit stream of ../bit_stream.py. A reader that runs out sets `failed` and returns zeros. */
#ifndef WW_BIT_STREAM_H
#define WW_BIT_STREAM_H

#include "logarithms.h"
#include "scratch.h"

static inline uint64_t low_bits(uint64_t value, unsigned width) {
    return width >= 64 ? value : value & ((UINT64_C(1) << width) - 1);
}

static inline uint64_t zigzag(int64_t value) { return ((uint64_t)value << 1) ^ (uint64_t)(value >> 63); }

static inline int64_t unzigzag(uint64_t value) { return (int64_t)(value >> 1) ^ -(int64_t)(value & 1); }

/* --- growing bytes --- */

typedef struct {
    uint8_t *data;
    size_t size, room;
    int failed; /* out of memory */
} Bytes;

static int bytes_reserve(Bytes *b, size_t more) {
    if (b->failed) return 0;
    if (b->size + more <= b->room) return 1;
    size_t room = (b->size + more) * 2 + 64;
    uint8_t *data = scratch_grow(b->data, room);
    if (!data) {
        b->failed = 1;
        return 0;
    }
    b->data = data;
    b->room = room;
    return 1;
}

static void bytes_add(Bytes *b, const void *data, size_t size) {
    if (!size || !bytes_reserve(b, size)) return;
    memcpy(b->data + b->size, data, size);
    b->size += size;
}

static void bytes_add_byte(Bytes *b, uint8_t byte) { bytes_add(b, &byte, 1); }

static void bytes_add_uvarint(Bytes *b, uint64_t value) {
    while (value > 0x7F) {
        bytes_add_byte(b, (uint8_t)(value & 0x7F) | 0x80);
        value >>= 7;
    }
    bytes_add_byte(b, (uint8_t)value);
}

static void bytes_pad(Bytes *b, size_t size) {
    if (b->size >= size || !bytes_reserve(b, size - b->size)) return;
    memset(b->data + b->size, 0, size - b->size);
    b->size = size;
}

/* --- bit stream --- */

typedef struct {
    Bytes bytes;
    uint64_t held;
    unsigned count; /* bits in `held`, always below 8 between calls */
} BitWriter;

static void bits_number(BitWriter *w, uint64_t value, unsigned width) {
    while (width > 32) {
        bits_number(w, value & 0xFFFFFFFF, 32);
        value >>= 32;
        width -= 32;
    }
    if (!bytes_reserve(&w->bytes, 8)) return;
    w->held |= low_bits(value, width) << w->count;
    w->count += width;
    while (w->count >= 8) {
        w->bytes.data[w->bytes.size++] = (uint8_t)w->held;
        w->held >>= 8;
        w->count -= 8;
    }
}

static void bits_golomb(BitWriter *w, uint64_t value, unsigned order) {
    uint64_t shifted = value + (UINT64_C(1) << order);
    unsigned width = bit_length(shifted) - 1;
    bits_number(w, (UINT64_C(1) << (width - order)) - 1, width - order + 1);
    bits_number(w, shifted, width);
}

static inline unsigned golomb_bits(uint64_t value, unsigned order) {
    unsigned width = bit_length(value + (UINT64_C(1) << order)) - 1;
    return 2 * width - order + 1;
}

/* Appends the first `count` bits of `data`. */
static void bits_append(BitWriter *w, const uint8_t *data, uint64_t count) {
    uint64_t at = 0;
    if (!bytes_reserve(&w->bytes, count / 8 + 16)) return;
    for (; at + 32 <= count; at += 32) {
        uint32_t value;
        memcpy(&value, data + at / 8, 4);
        w->held |= (uint64_t)value << w->count;
        memcpy(w->bytes.data + w->bytes.size, &w->held, 4);
        w->bytes.size += 4;
        w->held >>= 32;
    }
    for (; at < count; at += 8) bits_number(w, data[at / 8], count - at < 8 ? (unsigned)(count - at) : 8);
}

/* Drops everything that was written since `before`. */
static void bits_go_back(BitWriter *w, const BitWriter *before) {
    w->bytes.size = before->bytes.size;
    w->held = before->held;
    w->count = before->count;
}

static void bits_flush(BitWriter *w) {
    if (!w->count) return;
    bytes_add_byte(&w->bytes, (uint8_t)w->held);
    w->held = 0;
    w->count = 0;
}

typedef struct {
    const uint8_t *data;
    uint64_t at, end; /* in bits */
    int failed;
} BitReader;

static uint64_t read_number_slowly(BitReader *r, unsigned width) {
    if (width > r->end - r->at) {
        r->failed = 1;
        return 0;
    }
    uint64_t value = 0;
    for (unsigned i = 0; i < width; i++, r->at++)
        value |= (uint64_t)(r->data[r->at >> 3] >> (r->at & 7) & 1) << i;
    return value;
}

static inline uint64_t read_number(BitReader *r, unsigned width) {
    if (width > 56 || r->end - r->at < 64) return read_number_slowly(r, width);
    uint64_t value;
    memcpy(&value, r->data + (r->at >> 3), 8);
    value = low_bits(value >> (r->at & 7), width);
    r->at += width;
    return value;
}

static uint64_t read_golomb(BitReader *r, unsigned order) {
    unsigned width = order;
    while (read_number(r, 1)) {
        if (++width > 32) {
            r->failed = 1;
            return 0;
        }
    }
    return read_number(r, width) + (UINT64_C(1) << width) - (UINT64_C(1) << order);
}

/* Checks that only zero bits are left: less than a byte, unless the stream is padded. */
static int bits_end_well(BitReader *r, int padded) {
    if (r->failed || (r->end - r->at > 7 && !padded)) return 0;
    while (r->at < r->end) {
        unsigned width = r->end - r->at < 56 ? (unsigned)(r->end - r->at) : 56;
        if (read_number(r, width)) return 0;
    }
    return 1;
}

#endif
