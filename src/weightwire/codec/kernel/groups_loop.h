/* Groups of 64 weights: which of them differ, and the class of each. Part of hot_loops.h.
 *
 * The classes of a group are 4-bit numbers. Gathered bit by bit into 64-bit planes, they give the members of every class
 * as 64 bits. A population count advances a rank, and selecting the r-th set bit finds a member. First all members of a
 * chunk are found, without data-dependent branches. Then its changes are processed.
 */

#if VECTORS == 512

typedef __m512i NAME(Group);

/* The classes of 64 units of 16 bits. */
TARGET static inline NAME(Group) NAME(classify16)(const uint8_t *p, const Classing *k) {
    __m128i shift = _mm_cvtsi32_si128((int)k->mantissa);
    const uint8_t *table = k->table->class;
    __m256i a = _mm512_cvtepi16_epi8(_mm512_srl_epi16(_mm512_loadu_si512(p), shift));
    __m256i b = _mm512_cvtepi16_epi8(_mm512_srl_epi16(_mm512_loadu_si512(p + 64), shift));
    __m512i e = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
    e = _mm512_and_si512(e, _mm512_set1_epi8((char)((1 << k->exponent) - 1)));
    __m512i low = _mm512_permutex2var_epi8(_mm512_loadu_si512(table), e, _mm512_loadu_si512(table + 64));
    __m512i high = _mm512_permutex2var_epi8(_mm512_loadu_si512(table + 128), e, _mm512_loadu_si512(table + 192));
    return _mm512_mask_mov_epi8(low, _mm512_movepi8_mask(e), high);
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
    __m256i c = _mm256_setzero_si256(), flip = _mm256_set1_epi8((char)0x80), signed_e = _mm256_xor_si256(e, flip);
    for (unsigned i = 0; i < k->bounds; i++) {
        __m256i bound = _mm256_set1_epi8((char)(k->bound[i] ^ 0x80));
        c = _mm256_sub_epi8(c, _mm256_cmpgt_epi8(bound, signed_e));
    }
    __m256i zero = _mm256_cmpeq_epi8(e, _mm256_setzero_si256());
    return _mm256_blendv_epi8(c, _mm256_set1_epi8(ZERO_CLASS), zero);
}

TARGET static inline NAME(Group) NAME(classify16)(const uint8_t *p, const Classing *k) {
    return (NAME(Group)){NAME(half16)(p, k), NAME(half16)(p + 64, k)};
}

/* Which units of 32 bytes are equal: sets all of their bits. */
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

/* The classes of `count` units: 64, or fewer at the end of a line. */
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

/* The members of each class among the valid units of a group. */
INLINE void NAME(members)(NAME(Group) group, uint64_t valid, uint64_t *row) {
    uint64_t p0 = NAME(plane)(group, 0), p1 = NAME(plane)(group, 1);
    uint64_t p2 = NAME(plane)(group, 2), p3 = NAME(plane)(group, 3);
#if VECTORS == 512
    const __m512i odd = _mm512_set_epi64(0, -1, 0, -1, 0, -1, 0, -1); /* inverts bits that are 0 in the class */
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

/* The number of members of each class before each group of a chunk, and in total. */
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

/* Finds the members of every class among `count` units, and counts those before each group. */
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

/* Lists the set bits in order. Two at a time without a branch: a group rarely has more. */
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
