/* Turns the units of a block into symbols and back, for dense.h. Part of hot_loops.h. */

/* The classes of `count` units. */
INLINE void NAME(classify_all)(const uint8_t *p, size_t count, const Classing *k, uint8_t *class, const unsigned unit) {
    size_t i = 0;
#if VECTORS == 512
    for (; unit == 2 && k->exponent && i + 64 <= count; i += 64)
        _mm512_storeu_si512(class + i, NAME(classify16)(p + i * unit, k));
#endif
    for (; i < count; i++) class[i] = k->exponent ? class_of(load(p + i * unit, unit), k) : ZERO_CLASS;
}

TARGET static void NAME(classify_units)(const uint8_t *p, size_t count, const Classing *given, uint8_t *class) {
    const Classing own = *given, *k = &own;
    switch (k->unit) {
        case 1: NAME(classify_all)(p, count, k, class, 1); break;
        case 2: NAME(classify_all)(p, count, k, class, 2); break;
        case 4: NAME(classify_all)(p, count, k, class, 4); break;
        default: NAME(classify_all)(p, count, k, class, 8); break;
    }
}

#if VECTORS == 512

TARGET static inline __m512i NAME(ordered_16)(__m512i x) {
    __m512i top = _mm512_set1_epi16((short)0x8000);
    return _mm512_xor_si512(x, _mm512_or_si512(_mm512_srai_epi16(x, 15), top));
}

/* The symbols of sixteen steps, and the magnitudes that have raw bits. */
TARGET static inline void NAME(symbols16)(__m256i steps, uint8_t *symbol, uint32_t *large, unsigned *found) {
    const __m512i one = _mm512_set1_epi32(1);
    __m512i step = _mm512_cvtepi16_epi32(steps), magnitude = _mm512_abs_epi32(step);
    __m512i octave = _mm512_sub_epi32(_mm512_set1_epi32(31), _mm512_lzcnt_epi32(magnitude));
    __m512i below = _mm512_srlv_epi32(magnitude, _mm512_sub_epi32(octave, _mm512_set1_epi32(2)));
    below = _mm512_and_si512(below, _mm512_set1_epi32(3));
    __m512i token = _mm512_add_epi32(_mm512_slli_epi32(octave, 2), below); /* + 1 */
    __mmask16 is_large = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(15));
    token = _mm512_mask_mov_epi32(magnitude, is_large, token);
    token = _mm512_sub_epi32(_mm512_slli_epi32(token, 1), one);
    token = _mm512_add_epi32(token, _mm512_srli_epi32(step, 31));
    token = _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(step, step), token);
    _mm_storeu_si128((__m128i *)symbol, _mm512_cvtepi32_epi8(token));
    _mm512_storeu_si512(large + *found, _mm512_maskz_compress_epi32(is_large, magnitude));
    *found += (unsigned)__builtin_popcount(is_large);
}

/* Writes the raw bits of magnitudes from 16 to 2^16 - 1. */
TARGET static inline void NAME(put_large)(const uint32_t *large, unsigned count, DenseScan *out) {
    uint8_t *p = out->raw.data + out->raw.size;
    uint64_t held = out->held;
    unsigned bits = out->held_bits;
    for (unsigned i = 0; i < count; i++) {
        unsigned width = 29 - (unsigned)__builtin_clz(large[i]);
        held |= (uint64_t)_bzhi_u32(large[i], width) << bits;
        bits += width;
        memcpy(p, &held, 8);
        p += bits / 8;
        held >>= bits & ~7u;
        bits &= 7;
    }
    out->raw.size = (size_t)(p - out->raw.data);
    out->held = held;
    out->held_bits = bits;
}

/* The symbols of a chunk of floats of 16 bits, in whole groups of 32. Returns how many changed. */
TARGET static inline unsigned NAME(symbols_of_16)(
    const uint8_t *o, const uint8_t *n, unsigned count, uint8_t *symbol, DenseScan *out) {
    uint32_t large[CHUNK + 16];
    unsigned found = 0, changed = 0;
    for (unsigned i = 0; i < count; i += 32) {
        __m512i was = _mm512_loadu_si512(o + 2 * (size_t)i), to = _mm512_loadu_si512(n + 2 * (size_t)i);
        __m512i step = _mm512_sub_epi16(NAME(ordered_16)(to), NAME(ordered_16)(was));
        changed += (unsigned)__builtin_popcount(_mm512_test_epi16_mask(step, step));
        NAME(symbols16)(_mm512_castsi512_si256(step), symbol + i, large, &found);
        NAME(symbols16)(_mm512_extracti64x4_epi64(step, 1), symbol + i + 16, large, &found);
    }
    NAME(put_large)(large, found, out);
    return changed;
}

#endif

/* The symbols of a chunk of bytes that are not floats: 1 for a step of 1, 2 for -1, ... 255 for 128. The compiler
 * vectorizes it. */
INLINE unsigned NAME(symbols_of_bytes)(const uint8_t *o, const uint8_t *n, unsigned count, uint8_t *symbol) {
    unsigned changed = 0;
    for (unsigned i = 0; i < count; i++) {
        uint8_t step = (uint8_t)(n[i] - o[i]), up = (uint8_t)(2 * step - 1), down = (uint8_t)(0 - 2 * step);
        symbol[i] = step == 0 ? 0 : step <= 128 ? up : down;
        changed += step != 0;
    }
    return changed;
}

/* The symbols of a chunk. Returns how many units changed. */
INLINE unsigned NAME(symbols_of)(
    const uint8_t *o, const uint8_t *n, unsigned count, const Classing *k, uint8_t *symbol, DenseScan *out,
    const unsigned unit) {
    unsigned changed = 0, i = 0;
    if (unit == 1 && !k->exponent) return NAME(symbols_of_bytes)(o, n, count, symbol);
#if VECTORS == 512
    if (unit == 2 && k->exponent) {
        i = count & ~31u;
        changed = NAME(symbols_of_16)(o, n, i, symbol, out);
    }
#endif
    for (; i < count; i++) {
        uint64_t was = load(o + (size_t)i * unit, unit), to = load(n + (size_t)i * unit, unit);
        symbol[i] = 0;
        if (was == to) continue;
        uint64_t step = step_between(was, to, k->exponent, unit), magnitude = magnitude_of(step);
        unsigned raw, token = token_of(magnitude, !k->exponent, &raw);
        symbol[i] = (uint8_t)(2 * token + (step >> 63) + 1);
        if (raw > 32) raw_put(out, magnitude & UINT32_MAX, 32);
        if (raw) raw_put(out, raw > 32 ? magnitude >> 32 : magnitude, raw > 32 ? raw - 32 : raw);
        changed++;
    }
    return changed;
}

INLINE void NAME(count_symbols)(const DenseScan *out, size_t at, size_t count) {
    const uint8_t *symbol = out->symbol + at, *class = out->class + at;
    for (size_t i = 0; i < count; i++) out->counts->of[i % APART][class[i]][symbol[i]]++;
}

/* Returns 0 if memory runs out. */
INLINE int NAME(dense_units)(
    const Pieces *old, const Pieces *new, size_t count, size_t line, const Classing *k, Indexing where, DenseScan *out,
    const unsigned unit) {
    size_t length = line ? line : where.segment;
    for (size_t start = 0; start < count; start += length) {
        size_t segment = start / where.segment, in_segment = start - segment * where.segment;
        const uint8_t *o = piece_of(old, segment) + in_segment * unit, *n = piece_of(new, segment) + in_segment * unit;
        uint32_t changed = 0;
        for (size_t at = 0; at < length; at += CHUNK) {
            unsigned here = length - at < CHUNK ? (unsigned)(length - at) : CHUNK;
            if (!bytes_reserve(&out->raw, (size_t)here * unit + 64)) return 0;
            NAME(classify_all)(o + at * unit, here, k, out->class + start + at, unit);
            unsigned found = NAME(symbols_of)(o + at * unit, n + at * unit, here, k, out->symbol + start + at, out, unit);
            changed += found;
            if (!found) continue;
            Digest before = {{0}}, after = {{0}};
            uint64_t word = where.start + (in_segment + at) * unit / where.word;
            NAME(digest)(o + at * unit, (size_t)here * unit, where.word, word, &before);
            NAME(digest)(n + at * unit, (size_t)here * unit, where.word, word, &after);
            for (unsigned i = 0; i < 2; i++) out->digests[segment].sum[i] += after.sum[i] - before.sum[i];
        }
        out->changed[segment] += changed;
        if (changed || !line) {
            NAME(count_symbols)(out, start, length);
            if (line) out->line[out->lines++] = (uint32_t)(start / line);
        } else {
            for (size_t i = start; i < start + length; i++) out->still[out->class[i]]++;
        }
    }
    return 1;
}

TARGET static int NAME(dense_scan)(
    const Pieces *old, const Pieces *new, size_t count, size_t line, const Classing *given, Indexing where,
    DenseScan *out) {
    const Classing own = *given, *k = &own;
    switch (k->unit) {
        case 1: return NAME(dense_units)(old, new, count, line, k, where, out, 1);
        case 2: return NAME(dense_units)(old, new, count, line, k, where, out, 2);
        case 4: return NAME(dense_units)(old, new, count, line, k, where, out, 4);
        default: return NAME(dense_units)(old, new, count, line, k, where, out, 8);
    }
}

/* --- reading --- */

#if VECTORS == 512

/* The units after the steps of floats of 16 bits, in whole groups of 32. Returns how many: fewer near the end of the bits. */
TARGET static inline size_t NAME(apply_steps_16)(
    const uint8_t *old, const uint8_t *symbol, size_t count, const SymbolSteps *steps, BitReader *r, uint8_t *value) {
    enum { LISTED = 128 }; /* more symbols than floats of 16 bits have */
    uint16_t listed[LISTED], raw[32];
    uint8_t widths[64];
    for (unsigned s = 0; s < LISTED; s++) listed[s] = (uint16_t)steps->least[s];
    const __m512i w0 = _mm512_loadu_si512(steps->width), w1 = _mm512_loadu_si512(steps->width + 64);
    const __m512i m0 = _mm512_loadu_si512(listed), m1 = _mm512_loadu_si512(listed + 32);
    const __m512i m2 = _mm512_loadu_si512(listed + 64), m3 = _mm512_loadu_si512(listed + 96);
    const __m512i one = _mm512_set1_epi16(1), top = _mm512_set1_epi16((short)0x8000);
    size_t i = 0;
    uint64_t at = r->at;
    for (; i + 32 <= count && r->end - at >= 32 * 16 + 64; i += 32) {
        __m256i symbols = _mm256_loadu_si256((const __m256i *)(symbol + i));
        __m512i s = _mm512_cvtepu8_epi16(symbols);
        __m512i low = _mm512_permutex2var_epi16(m0, s, m1), high = _mm512_permutex2var_epi16(m2, s, m3);
        __m512i magnitude = _mm512_mask_mov_epi16(low, _mm512_test_epi16_mask(s, _mm512_set1_epi16(64)), high);
        __m512i width = _mm512_permutex2var_epi8(w0, _mm512_castsi256_si512(symbols), w1);
        if (_mm256_movemask_epi8(_mm256_cmpgt_epi8(_mm512_castsi512_si256(width), _mm256_setzero_si256()))) {
            _mm512_storeu_si512(widths, width);
            for (unsigned j = 0; j < 32; j++) {
                uint64_t bits;
                memcpy(&bits, r->data + (at >> 3), 8);
                raw[j] = (uint16_t)_bzhi_u64(bits >> (at & 7), widths[j]);
                at += widths[j];
            }
            magnitude = _mm512_add_epi16(magnitude, _mm512_loadu_si512(raw));
        }
        __m512i was = NAME(ordered_16)(_mm512_loadu_si512(old + 2 * i));
        __mmask32 negative = _mm512_testn_epi16_mask(s, one);
        __m512i there = _mm512_add_epi16(was, magnitude);
        there = _mm512_mask_sub_epi16(there, negative, was, magnitude);
        __m512i flip = _mm512_or_si512(_mm512_andnot_si512(_mm512_srai_epi16(there, 15), _mm512_set1_epi16(-1)), top);
        _mm512_storeu_si512(value + 2 * i, _mm512_xor_si512(there, flip));
    }
    r->at = at;
    return i;
}

#endif

/* The units after their steps. If raw bits are missing, `r->failed` is set, and the caller refuses the block. */
INLINE void NAME(apply_steps)(
    const uint8_t *old, const uint8_t *symbol, size_t count, const Classing *k, const SymbolSteps *steps, BitReader *r,
    uint8_t *value, const unsigned unit) {
    size_t i = 0;
    if (unit == 1 && !k->exponent) {
        for (; i < count; i++) {
            uint8_t s = symbol[i], magnitude = (uint8_t)(s / 2 + s % 2);
            value[i] = (uint8_t)(s & 1 ? old[i] + magnitude : old[i] - magnitude);
        }
        return;
    }
#if VECTORS == 512
    if (unit == 2 && k->exponent) i = NAME(apply_steps_16)(old, symbol, count, steps, r, value);
#endif
    for (; i < count; i++) {
        unsigned s = symbol[i];
        uint64_t magnitude = steps->least[s];
        if (steps->width[s]) magnitude += read_number(r, steps->width[s]);
        uint64_t to = step_from(load(old + i * unit, unit), s & 1 ? magnitude : 0 - magnitude, k->exponent, unit);
        memcpy(value + i * unit, &to, unit);
    }
}

TARGET static void NAME(dense_apply)(
    const uint8_t *old, const uint8_t *symbol, size_t count, const Classing *given, const SymbolSteps *steps,
    BitReader *r, uint8_t *value) {
    const Classing own = *given, *k = &own;
    switch (k->unit) {
        case 1: NAME(apply_steps)(old, symbol, count, k, steps, r, value, 1); break;
        case 2: NAME(apply_steps)(old, symbol, count, k, steps, r, value, 2); break;
        case 4: NAME(apply_steps)(old, symbol, count, k, steps, r, value, 4); break;
        default: NAME(apply_steps)(old, symbol, count, k, steps, r, value, 8); break;
    }
}
