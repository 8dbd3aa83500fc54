/* Lands the marks of a block on its weights, for landing.h. Part of hot_loops.h. */

TARGET static inline unsigned NAME(select)(uint64_t mask, unsigned rank) {
#if VECTORS
    return (unsigned)__builtin_ctzll(_pdep_u64(UINT64_C(1) << rank, mask));
#else
    while (rank--) mask &= mask - 1;
    return (unsigned)__builtin_ctzll(mask);
#endif
}

#if VECTORS == 512
/* Every eighth row of `before`, by class: to find the eighth of a chunk in one step. */
INLINE void NAME(turn_eighths)(Chunk *chunk) {
    __m256i row[8], pair[8], four[8];
    for (unsigned i = 0; i < 8; i++) row[i] = _mm256_load_si256((const __m256i *)chunk->before[i * (GROUPS / 8)]);
    for (unsigned i = 0; i < 4; i++) {
        pair[i] = _mm256_unpacklo_epi16(row[2 * i], row[2 * i + 1]);     /* classes 0-3 and 8-11 */
        pair[i + 4] = _mm256_unpackhi_epi16(row[2 * i], row[2 * i + 1]); /* classes 4-7 and 12-15 */
    }
    for (unsigned h = 0; h < 2; h++) {
        for (unsigned i = 0; i < 2; i++) {
            four[4 * h + i] = _mm256_unpacklo_epi32(pair[4 * h + 2 * i], pair[4 * h + 2 * i + 1]);
            four[4 * h + 2 + i] = _mm256_unpackhi_epi32(pair[4 * h + 2 * i], pair[4 * h + 2 * i + 1]);
        }
    }
    for (unsigned i = 0; i < 4; i++) { /* four[2 * i], four[2 * i + 1]: rows 0-3 and 4-7 of two classes */
        __m256i even = _mm256_unpacklo_epi64(four[2 * i], four[2 * i + 1]);
        __m256i odd = _mm256_unpackhi_epi64(four[2 * i], four[2 * i + 1]);
        _mm_store_si128((__m128i *)chunk->eighths[2 * i], _mm256_castsi256_si128(even));
        _mm_store_si128((__m128i *)chunk->eighths[2 * i + 8], _mm256_extracti128_si256(even, 1));
        _mm_store_si128((__m128i *)chunk->eighths[2 * i + 1], _mm256_castsi256_si128(odd));
        _mm_store_si128((__m128i *)chunk->eighths[2 * i + 9], _mm256_extracti128_si256(odd, 1));
    }
}
#endif

/* A chunk that is being changed: the changes so far and their values or, with a target, the rewritten words. */
typedef struct {
    const uint8_t *units;
    size_t at, in_segment; /* the first unit of the chunk: in the block, and in its segment */
    uint8_t *segment;      /* the segment of the target, if there is one, and its digest */
    Digest *digest;
    uint64_t groups, changed[GROUPS];
    Rewritten words;
    uint8_t value[CHUNK * 8];
} NAME(Landing);

/* Changes the member of a class that has this rank in the chunk. */
INLINE void NAME(place)(
    NAME(Landing) *p, const Chunk *chunk, unsigned c, unsigned rank, uint64_t step, const Classing *k, Landed *out,
    const unsigned unit) {
    const uint16_t *before = &chunk->before[0][c];
    size_t half = GROUPS / 2;
#if VECTORS == 512
    uint8_t upto = _mm_cmple_epu16_mask(_mm_load_si128((const __m128i *)chunk->eighths[c]), _mm_set1_epi16((short)rank));
    before += ((unsigned)__builtin_popcount(upto) - 1) * (GROUPS / 8 * CLASSES);
    half = GROUPS / 16;
#endif
    for (; half; half /= 2) /* by a mask: no branch */
        before += (half * CLASSES) & (0 - (size_t)(before[half * CLASSES] <= rank));
    size_t g = (size_t)(before - chunk->before[0]) / CLASSES;
    unsigned bit = NAME(select)(chunk->members[g][c], rank - *before);
    size_t at = 64 * g + bit;
    uint64_t was = load(p->units + at * unit, unit);
    uint64_t to = low_bits(step_from(was, step, k->exponent, unit), 8 * unit);
    if (out->target) {
        write_unit(p->segment, p->in_segment + at, was, to, out->where, &p->words, unit);
        if (p->words.count == BATCH) NAME(digest_rewritten)(&p->words, p->digest);
        out->position[out->count] = (uint32_t)(p->at + at);
        memcpy(out->value + out->count * unit, &was, unit);
        out->count++;
    } else {
        p->groups |= UINT64_C(1) << g;
        p->changed[g] |= UINT64_C(1) << bit;
        memcpy(p->value + at * unit, &to, unit);
    }
}

/* Applies the marks of one class in a chunk. Returns 0 if there are too few steps. */
INLINE int NAME(land_class)(
    NAME(Landing) *p, const Chunk *chunk, Cursor *given, const Classing *k, Landed *out, const unsigned unit) {
    Cursor cursor = *given;
    unsigned c = cursor.class, total = chunk->before[chunk->groups][c];
    if (!cursor.complement) {
        for (; cursor.left < total; cursor.left += *++cursor.distance)
            NAME(place)(p, chunk, c, (unsigned)cursor.left, *cursor.step++, k, out, unit);
    } else {
        for (unsigned rank = 0; rank < total; rank++) {
            if (rank == cursor.left) {
                cursor.left += *++cursor.distance;
                continue;
            }
            if (cursor.step == cursor.step_end) return 0;
            NAME(place)(p, chunk, c, rank, *cursor.step++, k, out, unit);
        }
    }
    cursor.left -= total;
    *given = cursor;
    return 1;
}

INLINE int NAME(land_chunk)(
    Chunk *chunk, const Pieces *old, size_t at, unsigned count, const Classing *k, Cursor *cursors, unsigned used,
    Landed *out, const unsigned unit) {
    NAME(Landing) p;
    size_t segment = at / out->where.segment;
    p.at = at;
    p.in_segment = at - segment * out->where.segment;
    p.units = piece_of(old, segment) + p.in_segment * unit;
    p.segment = out->target ? piece_of(out->target, segment) : NULL;
    p.digest = out->digests + segment;
    p.groups = 0;
    p.words.count = 0;
    memset(p.changed, 0, sizeof p.changed);
    NAME(fill)(chunk, p.units, count, k, unit);
    for (size_t g = chunk->groups + 1; g < GROUPS; g++) memset(chunk->before[g], 0xFF, sizeof *chunk->before);
#if VECTORS == 512
    NAME(turn_eighths)(chunk);
#endif
    int good = 1;
    for (unsigned i = 0; good && i < used; i++) good = NAME(land_class)(&p, chunk, &cursors[i], k, out, unit);
    NAME(digest_rewritten)(&p.words, p.digest);
    uint16_t listed[CHUNK + 1];
    unsigned found = NAME(list)(p.groups, p.changed, listed);
    for (unsigned i = 0; i < found; i++) {
        out->position[out->count + i] = (uint32_t)at + listed[i];
        memcpy(out->value + (out->count + i) * unit, p.value + (size_t)listed[i] * unit, unit);
    }
    out->count += found;
    return good;
}

/* Applies the marks of all classes: in the order of positions or, with a target, in any order within a chunk. Returns 0
 * if there are too few steps. */
INLINE int NAME(land_units)(
    const Pieces *old, const Lines *lines, const Classing *k, Cursor *cursors, unsigned used, Landed *out,
    const unsigned unit) {
    Chunk chunk;
    memset(&chunk, 0, sizeof chunk);
    for (size_t l = 0; l < lines->count; l++) {
        size_t at = (lines->listed ? lines->listed[l] : l) * lines->length, end = at + lines->length;
        for (; at < end; at += CHUNK) {
            unsigned here = end - at < CHUNK ? (unsigned)(end - at) : CHUNK;
            if (!NAME(land_chunk)(&chunk, old, at, here, k, cursors, used, out, unit)) return 0;
        }
    }
    return 1;
}

TARGET static int NAME(land)(
    const Pieces *old, const Lines *lines, const Classing *given, Cursor *cursors, unsigned used, Landed *out) {
    const Classing own = *given, *k = &own;
    switch (k->unit) {
        case 1: return NAME(land_units)(old, lines, k, cursors, used, out, 1);
        case 2: return NAME(land_units)(old, lines, k, cursors, used, out, 2);
        case 4: return NAME(land_units)(old, lines, k, cursors, used, out, 4);
        default: return NAME(land_units)(old, lines, k, cursors, used, out, 8);
    }
}
