/* The hot loops: a chunk of 4096 weights at a time, as groups of 64. Included once per instruction set, with
 *   NAME(x)   the name of x for this instruction set
 *   TARGET    the attribute that lets a function use it
 *   VECTORS   how wide its vectors are: 512 or 256 bits, or 0 for none
 *
 * A group's classes are bytes of four bits; gathered bit by bit into 64-bit planes, they give the members of every class
 * as 64 bits. A population count advances a rank, and selecting the r-th set bit lands on a member. First all members of a
 * chunk are found, which takes the same steps whatever the data; then its changes are dealt with, one like the other. A
 * branch that is guessed wrong costs as much as a group: so loops depend on the data once a chunk, not once a group.
 */

#define INLINE TARGET static inline __attribute__((always_inline))

#if VECTORS == 512

typedef __m512i NAME(Group);

/* The classes of 64 units of 16 bits. */
TARGET static inline NAME(Group) NAME(classify16)(const uint8_t *p, const Classing *k) {
    __m128i shift = _mm_cvtsi32_si128((int)k->mantissa);
    __m256i a = _mm512_cvtepi16_epi8(_mm512_srl_epi16(_mm512_loadu_si512(p), shift));
    __m256i b = _mm512_cvtepi16_epi8(_mm512_srl_epi16(_mm512_loadu_si512(p + 64), shift));
    __m512i e = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
    e = _mm512_and_si512(e, _mm512_set1_epi8((char)((1 << k->exponent) - 1)));
    __m512i c = _mm512_subs_epu8(_mm512_set1_epi8((char)k->top), e);
    c = _mm512_min_epu8(c, _mm512_set1_epi8((char)(k->width - 1)));
    return _mm512_mask_mov_epi8(c, _mm512_testn_epi8_mask(e, e), _mm512_set1_epi8(ZERO_CLASS));
}

/* Which units of 64 bytes differ. */
INLINE uint64_t NAME(differ_line)(const uint8_t *a, const uint8_t *b, const unsigned unit) {
    __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    return unit == 1   ? _mm512_cmpneq_epi8_mask(x, y)
           : unit == 2 ? _mm512_cmpneq_epi16_mask(x, y)
           : unit == 4 ? _mm512_cmpneq_epi32_mask(x, y)
                       : _mm512_cmpneq_epi64_mask(x, y);
}

TARGET static inline NAME(Group) NAME(load_group)(const uint8_t *classes) { return _mm512_loadu_si512(classes); }

TARGET static inline uint64_t NAME(plane)(NAME(Group) g, const unsigned bit) {
    return _mm512_test_epi8_mask(g, _mm512_set1_epi8((char)(1 << bit)));
}

#elif VECTORS == 256

typedef struct {
    __m256i low, high;
} NAME(Group);

/* The classes of 32 units of 16 bits, in order. */
TARGET static inline __m256i NAME(half16)(const uint8_t *p, const Classing *k) {
    __m128i shift = _mm_cvtsi32_si128((int)k->mantissa);
    __m256i field = _mm256_set1_epi16((short)((1 << k->exponent) - 1));
    __m256i a = _mm256_and_si256(_mm256_srl_epi16(_mm256_loadu_si256((const __m256i *)p), shift), field);
    __m256i b = _mm256_and_si256(_mm256_srl_epi16(_mm256_loadu_si256((const __m256i *)(p + 32)), shift), field);
    __m256i e = _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xD8);
    __m256i c = _mm256_subs_epu8(_mm256_set1_epi8((char)k->top), e);
    c = _mm256_min_epu8(c, _mm256_set1_epi8((char)(k->width - 1)));
    __m256i zero = _mm256_cmpeq_epi8(e, _mm256_setzero_si256());
    return _mm256_blendv_epi8(c, _mm256_set1_epi8(ZERO_CLASS), zero);
}

TARGET static inline NAME(Group) NAME(classify16)(const uint8_t *p, const Classing *k) {
    return (NAME(Group)){NAME(half16)(p, k), NAME(half16)(p + 64, k)};
}

/* Which units of 32 bytes are the same: all bits of those. */
INLINE __m256i NAME(same)(const uint8_t *a, const uint8_t *b, const unsigned unit) {
    __m256i x = _mm256_loadu_si256((const __m256i *)a), y = _mm256_loadu_si256((const __m256i *)b);
    return unit == 1   ? _mm256_cmpeq_epi8(x, y)
           : unit == 2 ? _mm256_cmpeq_epi16(x, y)
           : unit == 4 ? _mm256_cmpeq_epi32(x, y)
                       : _mm256_cmpeq_epi64(x, y);
}

/* Which units of 64 bytes differ. */
INLINE uint64_t NAME(differ_line)(const uint8_t *a, const uint8_t *b, const unsigned unit) {
    __m256i x = NAME(same)(a, b, unit), y = NAME(same)(a + 32, b + 32, unit);
    if (unit == 2) {
        return ~(uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(x, y), 0xD8));
    } else if (unit == 4) {
        int low = _mm256_movemask_ps(_mm256_castsi256_ps(x)), high = _mm256_movemask_ps(_mm256_castsi256_ps(y));
        return 0xFFFF ^ (unsigned)(high << 8 | low);
    } else if (unit == 8) {
        int low = _mm256_movemask_pd(_mm256_castsi256_pd(x)), high = _mm256_movemask_pd(_mm256_castsi256_pd(y));
        return 0xFF ^ (unsigned)(high << 4 | low);
    }
    return ~((uint64_t)(uint32_t)_mm256_movemask_epi8(y) << 32 | (uint32_t)_mm256_movemask_epi8(x));
}

TARGET static inline NAME(Group) NAME(load_group)(const uint8_t *classes) {
    return (NAME(Group)){
        _mm256_loadu_si256((const __m256i *)classes), _mm256_loadu_si256((const __m256i *)(classes + 32))};
}

TARGET static inline uint64_t NAME(plane)(NAME(Group) g, const unsigned bit) {
    uint32_t low = (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(g.low, 7 - (int)bit));
    uint32_t high = (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(g.high, 7 - (int)bit));
    return (uint64_t)high << 32 | low;
}

#else

typedef struct {
    uint64_t eight[8];
} NAME(Group);

TARGET static inline NAME(Group) NAME(load_group)(const uint8_t *classes) {
    NAME(Group) g;
    memcpy(g.eight, classes, 64);
    return g;
}

/* The multiplication gathers the lowest bits of eight bytes. */
TARGET static inline uint64_t NAME(plane)(NAME(Group) g, const unsigned bit) {
    uint64_t mask = 0;
    for (unsigned i = 0; i < 8; i++) {
        uint64_t lowest = g.eight[i] >> bit & UINT64_C(0x0101010101010101);
        mask |= (lowest * UINT64_C(0x0102040810204080) >> 56) << (8 * i);
    }
    return mask;
}

#endif

TARGET static inline unsigned NAME(select)(uint64_t mask, unsigned rank) {
#if VECTORS
    return (unsigned)__builtin_ctzll(_pdep_u64(UINT64_C(1) << rank, mask));
#else
    while (rank--) mask &= mask - 1;
    return (unsigned)__builtin_ctzll(mask);
#endif
}

/* The classes of `count` units (64 but at the end of a line); what lies beyond is never looked at. */
INLINE NAME(Group) NAME(classify)(const uint8_t *p, unsigned count, const Classing *k, const unsigned unit) {
#if VECTORS
    if (unit == 2 && count == 64 && k->exponent) return NAME(classify16)(p, k);
#endif
    uint8_t classes[64];
    memset(classes, ZERO_CLASS, 64);
    for (unsigned i = 0; k->exponent && i < count; i++) classes[i] = class_of(load(p + (size_t)i * unit, unit), k);
    return NAME(load_group)(classes);
}

/* Which of `count` units differ. */
INLINE uint64_t NAME(differ)(const uint8_t *a, const uint8_t *b, unsigned count, const unsigned unit) {
    uint64_t mask = 0;
#if VECTORS
    if (count == 64) {
        for (unsigned i = 0; i < unit; i++) mask |= NAME(differ_line)(a + 64 * i, b + 64 * i, unit) << (64 / unit * i);
        return mask;
    }
#endif
    if (!memcmp(a, b, (size_t)count * unit)) return 0;
    for (unsigned i = 0, some = 8 / unit; i < count;) {
        if (count - i >= some && load(a + (size_t)i * unit, 8) == load(b + (size_t)i * unit, 8)) {
            i += some;
            continue;
        }
        for (unsigned end = count - i < some ? count : i + some; i < end; i++)
            mask |= (uint64_t)(load(a + (size_t)i * unit, unit) != load(b + (size_t)i * unit, unit)) << i;
    }
    return mask;
}

/* Brings a digest up to date, and forgets the words. */
INLINE void NAME(digest_rewritten)(Rewritten *words, Digest *digest) {
    uint64_t a = 0, b = 0;
    for (size_t i = 0; i < words->count; i++) {
        a += digest_a(words->index[i], words->after[i]) - digest_a(words->index[i], words->before[i]);
        b += digest_b(words->index[i], words->after[i]) - digest_b(words->index[i], words->before[i]);
    }
    digest->lane[0] += a;
    digest->lane[1] += b;
    words->count = 0;
}

/* The digest of a run of words. Two plain sums: the compiler makes vectors of them. */
INLINE void NAME(digest_words)(
    const uint8_t *p, size_t count, uint64_t start, Digest *out, const unsigned word) {
    uint64_t a = 0, b = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = load(p + i * word, word);
        a += digest_a(start + i, bits);
        b += digest_b(start + i, bits);
    }
    *out = (Digest){{a, b}};
}

/* Which of the valid units of a group belong to each class: those whose class has the same four bits. */
INLINE void NAME(members)(NAME(Group) group, uint64_t valid, uint64_t *row) {
    uint64_t p0 = NAME(plane)(group, 0), p1 = NAME(plane)(group, 1);
    uint64_t p2 = NAME(plane)(group, 2), p3 = NAME(plane)(group, 3);
#if VECTORS == 512
    const __m512i odd = _mm512_set_epi64(0, -1, 0, -1, 0, -1, 0, -1); /* inverts where the class has a 0 */
    const __m512i twos = _mm512_set_epi64(0, 0, -1, -1, 0, 0, -1, -1);
    const __m512i fours = _mm512_set_epi64(0, 0, 0, 0, -1, -1, -1, -1);
    __m512i same = _mm512_xor_si512(_mm512_set1_epi64((int64_t)p0), odd);
    same = _mm512_and_si512(same, _mm512_xor_si512(_mm512_set1_epi64((int64_t)p1), twos));
    same = _mm512_and_si512(same, _mm512_xor_si512(_mm512_set1_epi64((int64_t)p2), fours));
    _mm512_store_si512(row, _mm512_and_si512(same, _mm512_set1_epi64((int64_t)(valid & ~p3))));
    _mm512_store_si512(row + 8, _mm512_and_si512(same, _mm512_set1_epi64((int64_t)(valid & p3))));
#else
    uint64_t low[4] = {~p1 & ~p0, ~p1 & p0, p1 & ~p0, p1 & p0};
    uint64_t high[4] = {~p3 & ~p2 & valid, ~p3 & p2 & valid, p3 & ~p2 & valid, p3 & p2 & valid};
    for (unsigned c = 0; c < CLASSES; c++) row[c] = high[c / 4] & low[c % 4];
#endif
}

/* How many members of each class come before each group of a chunk, and in all of it. */
INLINE void NAME(sum_up)(Chunk *chunk) {
#if VECTORS == 512
    __m256i before = _mm256_setzero_si256();
    for (size_t g = 0; g < chunk->groups; g++) {
        _mm256_store_si256((__m256i *)chunk->before[g], before);
        __m128i low = _mm512_cvtepi64_epi16(_mm512_popcnt_epi64(_mm512_load_si512(&chunk->members[g][0])));
        __m128i high = _mm512_cvtepi64_epi16(_mm512_popcnt_epi64(_mm512_load_si512(&chunk->members[g][8])));
        before = _mm256_add_epi16(before, _mm256_set_m128i(high, low));
    }
    _mm256_store_si256((__m256i *)chunk->before[chunk->groups], before);
#else
    for (size_t g = 0; g < chunk->groups; g++)
        for (size_t c = 0; c < CLASSES; c++)
            chunk->before[g + 1][c] =
                (uint16_t)(chunk->before[g][c] + (unsigned)__builtin_popcountll(chunk->members[g][c]));
#endif
}

/* Finds the members of every class among `count` units, and how many come before each group. */
INLINE void NAME(fill)(Chunk *chunk, const uint8_t *p, unsigned count, const Classing *k, const unsigned unit) {
    chunk->groups = (count + 63) / 64;
    for (size_t g = 0; g < chunk->groups; g++) {
        unsigned here = count - 64 * g < 64 ? (unsigned)(count - 64 * g) : 64;
        uint64_t valid = here < 64 ? (UINT64_C(1) << here) - 1 : UINT64_MAX;
        const uint8_t *units = p + 64 * g * unit;
        for (unsigned i = 0; i < 64 * unit; i += 64) __builtin_prefetch(units + AHEAD + i);
        NAME(members)(NAME(classify)(units, here, k, unit), valid, chunk->members[g]);
    }
    NAME(sum_up)(chunk);
}

/* Lists the bits that are set, in order. Two at a time without a branch: there are seldom more in a group. */
INLINE unsigned NAME(list)(uint64_t groups, const uint64_t *bits, uint16_t *out) {
    unsigned count = 0;
    for (uint64_t rest = groups; rest; rest &= rest - 1) {
        unsigned g = (unsigned)__builtin_ctzll(rest);
        uint64_t here = bits[g], second = here & (here - 1), more = second & (second - 1);
        out[count] = (uint16_t)(64 * g + (unsigned)__builtin_ctzll(here));
        out[count + 1] = (uint16_t)(64 * g + (unsigned)__builtin_ctzll(second | UINT64_C(1) << 63));
        count += 1 + (second != 0);
        for (; more; more &= more - 1) out[count++] = (uint16_t)(64 * g + (unsigned)__builtin_ctzll(more));
    }
    return count;
}

INLINE int NAME(scan_chunk)(
    Progress *p, Chunk *chunk, const uint8_t *old, const uint8_t *new, size_t at, unsigned count, const Classing *k,
    Indexing where, Scan *out, const unsigned unit) {
    const uint8_t *o = old + at * unit, *n = new + at * unit;
    uint64_t changed[GROUPS], groups = 0;
    uint16_t listed[CHUNK + 1];
    NAME(fill)(chunk, o, count, k, unit);
    for (unsigned g = 0; g < chunk->groups; g++) {
        unsigned here = count - 64 * g < 64 ? count - 64 * g : 64;
        size_t start = (size_t)64 * g * unit;
        for (unsigned i = 0; i < 64 * unit; i += 64) __builtin_prefetch(n + start + AHEAD + i);
        changed[g] = NAME(differ)(o + start, n + start, here, unit);
        groups |= (uint64_t)(changed[g] != 0) << g;
    }
    unsigned found = NAME(list)(groups, changed, listed);
    if (!scan_reserve(out, found)) return 0;
    for (unsigned i = 0; i < found; i++) {
        unsigned in_chunk = listed[i], g = in_chunk / 64, bit = in_chunk % 64;
        uint64_t was = load(o + (size_t)in_chunk * unit, unit), to = load(n + (size_t)in_chunk * unit, unit);
        unsigned c = k->exponent ? class_of(was, k) : ZERO_CLASS;
        /* Weights that someone writes to meanwhile make a wrong delta, which its digests show; no worse than that. */
        if (was == to || !(chunk->members[g][c] >> bit & 1)) continue;
        uint64_t below = chunk->members[g][c] & ((UINT64_C(1) << bit) - 1);
        uint64_t rank = p->seen[c] + chunk->before[g][c] + (uint64_t)__builtin_popcountll(below);
        Change *change = &out->change[out->count];
        change->rank = (uint32_t)rank;
        change->rank_inside = (uint32_t)(rank - p->skipped[c]);
        change->step = step_between(was, to, k->exponent, unit);
        out->class[out->count++] = (uint8_t)c;
        uint64_t word = where.word == 8 ? (at + in_chunk) * unit / 8 : at + in_chunk;
        if (word == p->last_word) continue;
        p->last_word = word;
        size_t w = p->words.count++;
        p->words.index[w] = where.start + word;
        p->words.before[w] = load_word(old, word, where.word, unit);
        p->words.after[w] = load_word(new, word, where.word, unit);
        if (p->words.count == BATCH) NAME(digest_rewritten)(&p->words, &out->digest);
    }
    for (unsigned c = 0; c < CLASSES; c++) p->seen[c] += chunk->before[chunk->groups][c];
    return 1;
}

/* Finds and ranks the changes of a block. 0 where memory ran out. */
INLINE int NAME(scan_units)(
    const uint8_t *old, const uint8_t *new, size_t count, size_t line, const Classing *k, Indexing where, Scan *out,
    const unsigned unit) {
    Progress p;
    memset(p.seen, 0, sizeof p.seen);
    memset(p.skipped, 0, sizeof p.skipped);
    p.last_word = UINT64_MAX;
    p.words.count = 0;
    Chunk chunk;
    memset(&chunk, 0, sizeof chunk);
    size_t length = line ? line : count;
    for (size_t start = 0; start < count; start += length) {
        size_t end = start + length, found = out->count;
        uint64_t before[CLASSES];
        memcpy(before, p.seen, sizeof before);
        for (size_t at = start; at < end; at += CHUNK) {
            unsigned here = end - at < CHUNK ? (unsigned)(end - at) : CHUNK;
            if (!NAME(scan_chunk)(&p, &chunk, old, new, at, here, k, where, out, unit)) return 0;
        }
        if (out->count == found) {
            for (unsigned c = 0; c < CLASSES; c++) p.skipped[c] += p.seen[c] - before[c];
        } else if (!scan_add_line(out, (uint32_t)(start / length))) {
            return 0;
        }
    }
    NAME(digest_rewritten)(&p.words, &out->digest);
    for (unsigned c = 0; c < CLASSES; c++) {
        out->members[c] = (uint32_t)p.seen[c];
        out->inside[c] = (uint32_t)(p.seen[c] - p.skipped[c]);
    }
    return 1;
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

/* A chunk whose changes are landing: which they are so far, and their values; or, if there is a target, the words that
 * were rewritten in it. */
typedef struct {
    const uint8_t *units;
    size_t at;
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
        write_unit(out->target, p->at + at, was, to, out->where, &p->words, unit);
        if (p->words.count == BATCH) NAME(digest_rewritten)(&p->words, &out->digest);
        out->position[out->count] = (uint32_t)(p->at + at);
        memcpy(out->value + out->count * unit, &was, unit);
        out->count++;
    } else {
        p->groups |= UINT64_C(1) << g;
        p->changed[g] |= UINT64_C(1) << bit;
        memcpy(p->value + at * unit, &to, unit);
    }
}

/* Lands the marks of one class that fall into a chunk. 0 where there are too few steps. */
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
    Chunk *chunk, const uint8_t *old, size_t at, unsigned count, const Classing *k, Cursor *cursors, unsigned used,
    Landed *out, const unsigned unit) {
    NAME(Landing) p;
    p.units = old + at * unit;
    p.at = at;
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
    NAME(digest_rewritten)(&p.words, &out->digest);
    uint16_t listed[CHUNK + 1];
    unsigned found = NAME(list)(p.groups, p.changed, listed);
    for (unsigned i = 0; i < found; i++) {
        out->position[out->count + i] = (uint32_t)at + listed[i];
        memcpy(out->value + (out->count + i) * unit, p.value + (size_t)listed[i] * unit, unit);
    }
    out->count += found;
    return good;
}

/* Lands the marks of every class on their weights: in the order of positions, or, with a target, in any order within a
 * chunk. 0 where there are too few steps. */
INLINE int NAME(land_units)(
    const uint8_t *old, const Lines *lines, const Classing *k, Cursor *cursors, unsigned used, Landed *out,
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

TARGET static void NAME(digest_all)(Rewritten *words, Digest *digest) { NAME(digest_rewritten)(words, digest); }

TARGET static void NAME(digest)(const uint8_t *p, size_t count, Indexing where, Digest *out) {
    switch (where.word) {
        case 1: NAME(digest_words)(p, count, where.start, out, 1); break;
        case 2: NAME(digest_words)(p, count, where.start, out, 2); break;
        case 4: NAME(digest_words)(p, count, where.start, out, 4); break;
        default: NAME(digest_words)(p, count, where.start, out, 8); break;
    }
}

TARGET static int NAME(scan)(
    const uint8_t *old, const uint8_t *new, size_t count, size_t line, const Classing *given, Indexing where,
    Scan *out) {
    const Classing own = *given, *k = &own; /* what nobody else can reach stays in registers */
    switch (k->unit) {
        case 1: return NAME(scan_units)(old, new, count, line, k, where, out, 1);
        case 2: return NAME(scan_units)(old, new, count, line, k, where, out, 2);
        case 4: return NAME(scan_units)(old, new, count, line, k, where, out, 4);
        default: return NAME(scan_units)(old, new, count, line, k, where, out, 8);
    }
}

TARGET static int NAME(land)(
    const uint8_t *old, const Lines *lines, const Classing *given, Cursor *cursors, unsigned used, Landed *out) {
    const Classing own = *given, *k = &own;
    switch (k->unit) {
        case 1: return NAME(land_units)(old, lines, k, cursors, used, out, 1);
        case 2: return NAME(land_units)(old, lines, k, cursors, used, out, 2);
        case 4: return NAME(land_units)(old, lines, k, cursors, used, out, 4);
        default: return NAME(land_units)(old, lines, k, cursors, used, out, 8);
    }
}

#include "replace_loop.h"

#undef NAME
#undef TARGET
#undef VECTORS
#undef INLINE
