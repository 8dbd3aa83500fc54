/* The `dense` and `full` encodings, as in ../planes.py. */
#ifndef WW_PLANES_H
#define WW_PLANES_H

#include "classes.h"
#include "frame.h"

enum { PER_BYTE = 1024 };

static inline uint64_t fold_full(uint64_t new, const Classing *k) {
    unsigned width = 8 * k->unit;
    return k->exponent ? low_bits(new << 1 | new >> (width - 1), width) : new;
}

static inline uint64_t unfold_full(uint64_t folded, const Classing *k) {
    unsigned width = 8 * k->unit;
    return k->exponent ? low_bits(folded >> 1 | folded << (width - 1), width) : folded;
}

static inline uint64_t fold_dense(uint64_t old, uint64_t new, const Classing *k) {
    return low_bits(zigzag((int64_t)step_between(old, new, k->exponent, k->unit)), 8 * k->unit);
}

static inline uint64_t unfold_dense(uint64_t old, uint64_t folded, const Classing *k) {
    return step_from(old, (uint64_t)unzigzag(folded), k->exponent, k->unit);
}

static int worth_coding(const uint32_t *counts, const Table *t, size_t length) {
    uint64_t total = 0;
    for (unsigned s = 0; s < t->symbols; s++)
        if (counts[s]) total += counts[s] * ((UINT64_C(12) << 24) - lg(t->share[s]));
    return 64 * total < (UINT64_C(63) * 8 * length) << 24;
}

/* No block is shorter than this. */
static size_t planes_least(size_t count, unsigned unit) { return (count * unit + PER_BYTE - 1) / PER_BYTE; }

/* `old` is NULL for a full block. */
static int encode_planes(const uint8_t *old, const uint8_t *new, size_t count, const Classing *k, Bytes *out) {
    unsigned unit = k->unit;
    uint8_t *planes = scratch_new(count * unit + 1);
    Table *tables = scratch_new(unit * sizeof *tables);
    BitWriter w = {0};
    Encoder e = {0};
    int good = planes && tables;
    unsigned raw_planes = 0, coded = 0;
    for (size_t i = 0; good && i < count; i++) {
        uint64_t bits = load(new + i * unit, unit);
        uint64_t folded = old ? fold_dense(load(old + i * unit, unit), bits, k) : fold_full(bits, k);
        for (unsigned b = 0; b < unit; b++) planes[b * count + i] = (uint8_t)(folded >> (8 * b));
    }
    for (unsigned b = 0; good && b < unit; b++) {
        uint32_t counts[SYMBOLS] = {0};
        Levels levels;
        for (size_t i = 0; i < count; i++) counts[planes[b * count + i]]++;
        quantise(counts, SYMBOLS, &levels);
        shares(&levels, 1, &tables[b]);
        if (worth_coding(counts, &tables[b], count)) {
            write_levels(&w, &levels);
            coded++;
        } else {
            raw_planes |= 1u << b;
        }
    }
    good = good && encoder_start(&e, (uint64_t)coded * count);
    if (good) {
        for (unsigned b = unit; b-- > 0;)
            if (!(raw_planes >> b & 1)) encode_section(&e, planes + b * count, count, &tables[b]);
        encoder_finish(&e, old ? DENSE : FULL, out);
        bytes_add_byte(out, (uint8_t)raw_planes);
        for (unsigned b = 0; b < unit; b++)
            if (raw_planes >> b & 1) bytes_add(out, planes + b * count, count);
        bits_flush(&w);
        bytes_add(out, w.bytes.data, w.bytes.size);
        bytes_pad(out, planes_least(count, unit));
    }
    good = good && !w.bytes.failed && !out->failed;
    scratch_free(planes);
    scratch_free(tables);
    scratch_free(w.bytes.data);
    scratch_free(e.words);
    return good;
}

/* NULL where all is well; `value` then holds `count` units. */
static const char *decode_planes(
    const uint8_t *data, size_t size, const uint8_t *old, size_t count, const Classing *k, uint8_t *value) {
    unsigned unit = k->unit;
    const char *why;
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
    if (!why && !bits_end_well(&r, size == planes_least(count, unit)))
        why = "its bit stream is too long or too short";
    for (size_t i = 0; !why && i < count; i++) {
        uint64_t folded = 0;
        for (unsigned b = 0; b < unit; b++) folded |= (uint64_t)planes[b * count + i] << (8 * b);
        folded = old ? unfold_dense(load(old + i * unit, unit), folded, k) : unfold_full(folded, k);
        memcpy(value + i * unit, &folded, unit);
    }
    scratch_free(planes);
    scratch_free(slots);
    return why;
}

#endif
