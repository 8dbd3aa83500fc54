/* The hot loops: 64 weights at a time. Included once per instruction set, with
 *   NAME(x)   the name of x for this instruction set
 *   TARGET    the attribute that lets a function use it
 *   VECTORS   how wide its vectors are: 512 or 256 bits, or 0 for none
 *
 * A group's classes are bytes; one compare and movemask per class gives its members as 64 bits, a population count
 * advances its rank, and selecting the r-th set bit lands on a member.
 */

#define INLINE TARGET static inline __attribute__((always_inline))

#if VECTORS == 512

typedef __m512i NAME(Group);
typedef __m512i NAME(Wanted);

TARGET static inline NAME(Wanted) NAME(wanted)(uint8_t c) { return _mm512_set1_epi8((char)c); }

TARGET static inline uint64_t NAME(members)(NAME(Group) g, NAME(Wanted) c) { return _mm512_cmpeq_epi8_mask(g, c); }

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

TARGET static inline uint64_t NAME(differ16)(const uint8_t *a, const uint8_t *b) {
    uint64_t low = _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(a), _mm512_loadu_si512(b));
    uint64_t high = _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(a + 64), _mm512_loadu_si512(b + 64));
    return high << 32 | low;
}

TARGET static inline NAME(Group) NAME(load_group)(const uint8_t *classes) { return _mm512_loadu_si512(classes); }

#elif VECTORS == 256

typedef struct {
    __m256i low, high;
} NAME(Group);

typedef __m256i NAME(Wanted);

TARGET static inline NAME(Wanted) NAME(wanted)(uint8_t c) { return _mm256_set1_epi8((char)c); }

TARGET static inline uint64_t NAME(members)(NAME(Group) g, NAME(Wanted) c) {
    uint32_t low = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(g.low, c));
    uint32_t high = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(g.high, c));
    return (uint64_t)high << 32 | low;
}

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

TARGET static inline uint32_t NAME(differ_half16)(const uint8_t *a, const uint8_t *b) {
    __m256i x = _mm256_cmpeq_epi16(_mm256_loadu_si256((const __m256i *)a), _mm256_loadu_si256((const __m256i *)b));
    __m256i y = _mm256_cmpeq_epi16(
        _mm256_loadu_si256((const __m256i *)(a + 32)), _mm256_loadu_si256((const __m256i *)(b + 32)));
    return ~(uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(x, y), 0xD8));
}

TARGET static inline uint64_t NAME(differ16)(const uint8_t *a, const uint8_t *b) {
    return (uint64_t)NAME(differ_half16)(a + 64, b + 64) << 32 | NAME(differ_half16)(a, b);
}

TARGET static inline NAME(Group) NAME(load_group)(const uint8_t *classes) {
    return (NAME(Group)){
        _mm256_loadu_si256((const __m256i *)classes), _mm256_loadu_si256((const __m256i *)(classes + 32))};
}

#else

typedef struct {
    uint64_t eight[8];
} NAME(Group);

typedef uint64_t NAME(Wanted);

TARGET static inline NAME(Wanted) NAME(wanted)(uint8_t c) { return c * UINT64_C(0x0101010101010101); }

/* Classes are below 16, so a byte's high bit is free to say that it is not zero. */
TARGET static inline uint64_t NAME(members)(NAME(Group) g, NAME(Wanted) c) {
    uint64_t mask = 0;
    for (unsigned i = 0; i < 8; i++) {
        uint64_t other = (g.eight[i] ^ c) + UINT64_C(0x7F7F7F7F7F7F7F7F);
        uint64_t equal = (~other & UINT64_C(0x8080808080808080)) >> 7;
        mask |= (equal * UINT64_C(0x0102040810204080) >> 56) << (8 * i);
    }
    return mask;
}

TARGET static inline NAME(Group) NAME(load_group)(const uint8_t *classes) {
    NAME(Group) g;
    memcpy(g.eight, classes, 64);
    return g;
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
#if VECTORS
    if (unit == 2 && count == 64) return NAME(differ16)(a, b);
#endif
    uint64_t mask = 0;
    if (!memcmp(a, b, (size_t)count * unit)) return 0;
    for (unsigned i = 0; i < count; i++)
        mask |= (uint64_t)(load(a + (size_t)i * unit, unit) != load(b + (size_t)i * unit, unit)) << i;
    return mask;
}

/* A scan under way: how many members of each class it has seen, and how to find them in a group. */
typedef struct {
    uint32_t seen[CLASSES];
    uint32_t skipped[CLASSES]; /* those in lines without a change */
    uint64_t last_word;
    NAME(Wanted) wanted[CLASSES];
} NAME(Progress);

INLINE int NAME(scan_group)(
    NAME(Progress) *p, const uint8_t *old, const uint8_t *new, size_t at, unsigned count, const Classing *k,
    Indexing where, Scan *out, const unsigned unit) {
    uint64_t valid = count < 64 ? (UINT64_C(1) << count) - 1 : UINT64_MAX;
    const uint8_t *o = old + at * unit, *n = new + at * unit;
    uint64_t changed = NAME(differ)(o, n, count, unit);
    NAME(Group) g = NAME(classify)(o, count, k, unit);
    if (changed && !scan_reserve(out, 64)) return 0;
    for (; changed; changed &= changed - 1) {
        unsigned bit = (unsigned)__builtin_ctzll(changed);
        uint64_t was = load(o + bit * unit, unit);
        unsigned c = k->exponent ? class_of(was, k) : ZERO_CLASS;
        uint64_t below = NAME(members)(g, p->wanted[c]) & ((UINT64_C(1) << bit) - 1);
        Change *change = &out->change[out->count];
        change->rank = p->seen[c] + (uint32_t)__builtin_popcountll(below);
        change->rank_inside = change->rank - p->skipped[c];
        change->step = step_between(was, load(n + bit * unit, unit), k->exponent, unit);
        out->class[out->count++] = (uint8_t)c;
        uint64_t word = (at + bit) * unit / where.word;
        if (word == p->last_word) continue;
        p->last_word = word;
        digest_term(&out->digest, where.start + word, load(old + word * where.word, where.word), -1);
        digest_term(&out->digest, where.start + word, load(new + word * where.word, where.word), 1);
    }
    /* All classes, used or not: a loop of fixed length is unrolled, and what is not a float has but one. */
    for (unsigned c = k->exponent ? 0 : ZERO_CLASS; c < CLASSES; c++)
        p->seen[c] += (uint32_t)__builtin_popcountll(NAME(members)(g, p->wanted[c]) & valid);
    return 1;
}

/* Finds and ranks the changes of a block. 0 where memory ran out. */
INLINE int NAME(scan_units)(
    const uint8_t *old, const uint8_t *new, size_t count, size_t line, const Classing *k, Indexing where, Scan *out,
    const unsigned unit) {
    NAME(Progress) p;
    memset(&p, 0, sizeof p);
    p.last_word = UINT64_MAX;
    for (unsigned c = 0; c < CLASSES; c++) p.wanted[c] = NAME(wanted)((uint8_t)c);
    size_t length = line ? line : count;
    for (size_t start = 0; start < count; start += length) {
        size_t end = start + length, at = start, found = out->count;
        uint32_t before[CLASSES];
        memcpy(before, p.seen, sizeof before);
        for (; at + 64 <= end; at += 64)
            if (!NAME(scan_group)(&p, old, new, at, 64, k, where, out, unit)) return 0;
        if (at < end && !NAME(scan_group)(&p, old, new, at, (unsigned)(end - at), k, where, out, unit)) return 0;
        if (out->count == found) {
            for (unsigned c = 0; c < CLASSES; c++) p.skipped[c] += p.seen[c] - before[c];
        } else if (!scan_add_line(out, (uint32_t)(start / length))) {
            return 0;
        }
    }
    for (unsigned c = 0; c < CLASSES; c++) {
        out->members[c] = p.seen[c];
        out->inside[c] = p.seen[c] - p.skipped[c];
    }
    return 1;
}

/* A landing under way: per class, how many of its members come before the next mark. */
typedef struct {
    unsigned used;
    uint32_t complements; /* the classes whose marks say what did not change */
    uint32_t left[CLASSES];
    NAME(Wanted) wanted[CLASSES];
} NAME(Landing);

INLINE int NAME(land_group)(
    NAME(Landing) *p, const uint8_t *old, size_t at, unsigned count, const Classing *k, Cursor *cursors, Landed *out,
    const unsigned unit) {
    uint64_t valid = count < 64 ? (UINT64_C(1) << count) - 1 : UINT64_MAX, changed = 0, value[64];
    const uint8_t *o = old + at * unit;
    NAME(Group) g = NAME(classify)(o, count, k, unit);
    uint32_t reached = 0;
    for (unsigned i = p->used; i-- > 0;) {
        uint32_t here = (uint32_t)__builtin_popcountll(NAME(members)(g, p->wanted[i]) & valid), left = p->left[i];
        reached = reached << 1 | (left < here);
        p->left[i] = left - here; /* wraps where a mark was reached; mended below */
    }
    for (reached |= p->complements; reached; reached &= reached - 1) {
        unsigned i = (unsigned)__builtin_ctz(reached);
        Cursor *cursor = &cursors[i];
        uint64_t members = NAME(members)(g, p->wanted[i]) & valid, landed = cursor->complement ? members : 0;
        uint32_t here = (uint32_t)__builtin_popcountll(members), left = p->left[i] + here;
        for (; left < here; left += *++cursor->distance) landed ^= UINT64_C(1) << NAME(select)(members, left);
        p->left[i] = left - here;
        changed |= landed;
        for (; landed; landed &= landed - 1) {
            unsigned bit = (unsigned)__builtin_ctzll(landed);
            if (cursor->step == cursor->step_end) return 0;
            value[bit] = step_from(load(o + bit * unit, unit), *cursor->step++, k->exponent, unit);
        }
    }
    for (; changed; changed &= changed - 1) {
        unsigned bit = (unsigned)__builtin_ctzll(changed);
        out->position[out->count] = (uint32_t)(at + bit);
        memcpy(out->value + out->count * unit, &value[bit], unit);
        out->count++;
    }
    return 1;
}

/* Lands the marks of every class on their weights, in the order of positions. 0 where there are too few steps. */
INLINE int NAME(land_units)(
    const uint8_t *old, const Lines *lines, const Classing *k, Cursor *cursors, unsigned used, Landed *out,
    const unsigned unit) {
    NAME(Landing) p;
    memset(&p, 0, sizeof p);
    p.used = used;
    for (unsigned i = 0; i < used; i++) {
        p.wanted[i] = NAME(wanted)(cursors[i].class);
        p.left[i] = *cursors[i].distance;
        p.complements |= (uint32_t)cursors[i].complement << i;
    }
    for (size_t l = 0; l < lines->count; l++) {
        size_t at = (lines->listed ? lines->listed[l] : l) * lines->length, end = at + lines->length;
        for (; at + 64 <= end; at += 64)
            if (!NAME(land_group)(&p, old, at, 64, k, cursors, out, unit)) return 0;
        if (at < end && !NAME(land_group)(&p, old, at, (unsigned)(end - at), k, cursors, out, unit)) return 0;
    }
    return 1;
}

TARGET static int NAME(scan)(
    const uint8_t *old, const uint8_t *new, size_t count, size_t line, const Classing *k, Indexing where, Scan *out) {
    switch (k->unit) {
        case 1: return NAME(scan_units)(old, new, count, line, k, where, out, 1);
        case 2: return NAME(scan_units)(old, new, count, line, k, where, out, 2);
        case 4: return NAME(scan_units)(old, new, count, line, k, where, out, 4);
        default: return NAME(scan_units)(old, new, count, line, k, where, out, 8);
    }
}

TARGET static int NAME(land)(
    const uint8_t *old, const Lines *lines, const Classing *k, Cursor *cursors, unsigned used, Landed *out) {
    switch (k->unit) {
        case 1: return NAME(land_units)(old, lines, k, cursors, used, out, 1);
        case 2: return NAME(land_units)(old, lines, k, cursors, used, out, 2);
        case 4: return NAME(land_units)(old, lines, k, cursors, used, out, 4);
        default: return NAME(land_units)(old, lines, k, cursors, used, out, 8);
    }
}

#undef NAME
#undef TARGET
#undef VECTORS
#undef INLINE
