/* The `full` encoding, as in ../full_encoding.py. */
#ifndef WW_FULL_ENCODING_H
#define WW_FULL_ENCODING_H

#include "block_frame.h"
#include "exponent_classes.h"

enum { PER_BYTE = 1024 };

static inline uint64_t rotated(uint64_t new, const Classing *k) {
    unsigned width = 8 * k->unit;
    return k->exponent ? low_bits(new << 1 | new >> (width - 1), width) : new;
}

static inline uint64_t unrotated(uint64_t rotated, const Classing *k) {
    unsigned width = 8 * k->unit;
    return k->exponent ? low_bits(rotated >> 1 | rotated << (width - 1), width) : rotated;
}

/* The cost of a coded plane, in units of 2^-24 bits. */
static uint64_t plane_cost(const uint32_t *counts, const Table *t) {
    uint64_t total = 0;
    for (unsigned s = 0; s < t->symbols; s++)
        if (counts[s]) total += counts[s] * ((UINT64_C(12) << 24) - lg(t->share[s]));
    return total;
}

/* Cuts rotated units into planes that are `apart`, and counts the symbols of each. */
static inline __attribute__((always_inline)) void cut(
    const uint8_t *units, size_t count, const Classing *k, uint8_t *planes, size_t apart, uint32_t (*counts)[SYMBOLS],
    const unsigned unit) {
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = rotated(load(units + i * unit, unit), k);
        for (unsigned b = 0; b < unit; b++) {
            uint8_t byte = (uint8_t)(bits >> (8 * b));
            planes[b * apart + i] = byte;
            counts[b][byte]++;
        }
    }
}

static void cut_units(
    const Pieces *units, size_t count, const Classing *k, uint8_t *planes, uint32_t (*counts)[SYMBOLS]) {
    size_t segment = units->size / k->unit;
    for (size_t at = 0; at < count; at += segment) {
        const uint8_t *p = piece_of(units, at / segment);
        switch (k->unit) {
            case 1: cut(p, segment, k, planes + at, count, counts, 1); break;
            case 2: cut(p, segment, k, planes + at, count, counts, 2); break;
            case 4: cut(p, segment, k, planes + at, count, counts, 4); break;
            default: cut(p, segment, k, planes + at, count, counts, 8); break;
        }
    }
}

/* No block is shorter than this. */
static size_t full_least(size_t count, unsigned unit) { return (count * unit + PER_BYTE - 1) / PER_BYTE; }

/* Gives up with an empty `out` if the result cannot be smaller than `most` bytes. */
static int encode_full(const Pieces *new, size_t count, const Classing *given, size_t most, Bytes *out) {
    const Classing own = *given, *k = &own;
    unsigned unit = k->unit, raw_planes = 0, coded = 0;
    uint8_t *planes = scratch_new(count * unit + 1);
    Table *tables = scratch_new(unit * sizeof *tables);
    uint32_t(*counts)[SYMBOLS] = scratch_new(unit * sizeof *counts);
    BitWriter w = {0};
    Encoder e = {0};
    int good = planes && tables && counts;
    uint64_t expected = 0; /* in bits of 2^-24 */
    if (good) {
        memset(counts, 0, unit * sizeof *counts);
        cut_units(new, count, k, planes, counts);
    }
    for (unsigned b = 0; good && b < unit; b++) {
        Levels levels;
        quantise(counts[b], SYMBOLS, &levels);
        shares(&levels, 1, &tables[b]);
        BitWriter before = w; /* to return to, if the plane does not pay for its table */
        uint64_t start = 8 * w.bytes.size + w.count;
        write_levels(&w, &levels);
        uint64_t cost = plane_cost(counts[b], &tables[b]) + ((8 * w.bytes.size + w.count - start) << 24);
        uint64_t raw = (UINT64_C(8) * count) << 24;
        if (64 * cost < 63 * raw) {
            coded++;
            expected += cost;
        } else {
            bits_go_back(&w, &before);
            raw_planes |= 1u << b;
            expected += raw;
        }
    }
    /* The coder is within 0.1% of the expected size: more than 1% above is hopeless. */
    int hopeless = good && (expected >> 27) / 101 * 100 > most;
    good = good && (hopeless || encoder_start(&e, (uint64_t)coded * count));
    if (good && !hopeless) {
        for (unsigned b = unit; b-- > 0;)
            if (!(raw_planes >> b & 1)) encode_section(&e, planes + b * count, count, &tables[b]);
        encoder_finish(&e, FULL, out);
        bytes_add_byte(out, (uint8_t)raw_planes);
        for (unsigned b = 0; b < unit; b++)
            if (raw_planes >> b & 1) bytes_add(out, planes + b * count, count);
        bits_flush(&w);
        bytes_add(out, w.bytes.data, w.bytes.size);
        bytes_pad(out, full_least(count, unit));
    }
    good = good && !w.bytes.failed && !out->failed;
    scratch_free(planes);
    scratch_free(tables);
    scratch_free(counts);
    scratch_free(w.bytes.data);
    scratch_free(e.words);
    return good;
}

static inline __attribute__((always_inline)) void join(
    const uint8_t *planes, size_t count, const Classing *k, uint8_t *value, const unsigned unit) {
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = 0;
        for (unsigned b = 0; b < unit; b++) bits |= (uint64_t)planes[b * count + i] << (8 * b);
        bits = unrotated(bits, k);
        memcpy(value + i * unit, &bits, unit);
    }
}

static void join_planes(const uint8_t *planes, size_t count, const Classing *given, uint8_t *value) {
    const Classing own = *given, *k = &own;
    switch (k->unit) {
        case 1: join(planes, count, k, value, 1); break;
        case 2: join(planes, count, k, value, 2); break;
        case 4: join(planes, count, k, value, 4); break;
        default: join(planes, count, k, value, 8); break;
    }
}

/* Returns NULL on success; `value` then holds `count` units. */
static const char *decode_full(
    const uint8_t *data, size_t size, size_t count, const Classing *k, uint8_t *value) {
    unsigned unit = k->unit;
    const char *why = "it is too short for what it claims to hold";
    if (size < full_least(count, unit)) return why;
    Decoder d;
    const uint8_t *rest = decoder_start(&d, data, size, &why), *end = data + size;
    if (!rest) return why;
    if (rest == end || *rest >> unit) return "its byte planes are out of range";
    unsigned raw_planes = *rest++;
    uint8_t *planes = scratch_new(count * unit + 1);
    DecodeTable *slots = scratch_new(sizeof *slots);
    Table tables[8];
    if (!planes || !slots) why = OUT_OF_MEMORY;
    for (unsigned b = 0; !why && b < unit; b++) {
        if (!(raw_planes >> b & 1)) continue;
        if ((size_t)(end - rest) < count) {
            why = "a byte plane is too short";
            break;
        }
        memcpy(planes + b * count, rest, count);
        rest += count;
    }
    BitReader r = {rest, 0, (uint64_t)(end - rest) * 8, 0};
    for (unsigned b = 0; !why && b < unit; b++) {
        Levels levels;
        if (raw_planes >> b & 1) continue;
        why = read_levels(&r, SYMBOLS, &levels);
        if (!why) shares(&levels, 1, &tables[b]);
    }
    for (unsigned b = 0; !why && b < unit; b++) {
        if (raw_planes >> b & 1) continue;
        decode_table(&tables[b], slots);
        if (!decode_section(&d, slots, planes + b * count, count)) why = "its entropy-coded part is too short";
    }
    if (!why && !decoder_ends_well(&d)) why = "its entropy-coded part does not end where it should";
    if (!why && !bits_end_well(&r, size == full_least(count, unit)))
        why = "its bit stream is too long or too short";
    if (!why) join_planes(planes, count, k, value);
    scratch_free(planes);
    scratch_free(slots);
    return why;
}

#endif
