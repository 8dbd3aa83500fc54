/* The hot loops: a tile of 256 weights at a time, as four groups of 64. Included once per instruction set, with
 *   NAME(x)   the name of x for this instruction set
 *   TARGET    the attribute that lets a function use it
 *   VECTORS   how wide its vectors are: 512 or 256 bits, or 0 for none
 *
 * A group's classes are bytes; one compare and movemask per class gives its members as 64 bits, a population count
 * advances its rank, and selecting the r-th set bit lands on a member. What depends on the data (how many changes there
 * are, and where) is decided once a tile and not once a group: a branch that is guessed wrong costs as much as a group.
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

/* Finds the members of wanted classes, four at a time, among `count` units, at most a tile. */
INLINE void NAME(fill)(
    Tile *tile, const uint8_t *p, unsigned count, const Classing *k, const NAME(Wanted) *wanted, unsigned first,
    unsigned used, const unsigned unit) {
    for (unsigned g = 0; g < GROUPS; g++) {
        unsigned here = count < 64 * g ? 0 : count - 64 * g < 64 ? count - 64 * g : 64;
        uint64_t valid = here < 64 ? (UINT64_C(1) << here) - 1 : UINT64_MAX;
        NAME(Group) group = NAME(classify)(p + (size_t)64 * g * unit, here, k, unit);
        for (unsigned four = first; four < used; four += 4)
            for (unsigned i = four; i < four + 4; i++)
                tile->members[g][i] = NAME(members)(group, wanted[i]) & valid;
    }
}

/* How many members each class has in a tile. */
#if VECTORS == 512
INLINE __m512i NAME(totals)(const Tile *tile, unsigned first) {
    __m512i total = _mm512_popcnt_epi64(_mm512_load_si512(&tile->members[0][first]));
    for (unsigned g = 1; g < GROUPS; g++)
        total = _mm512_add_epi64(total, _mm512_popcnt_epi64(_mm512_load_si512(&tile->members[g][first])));
    return total;
}
#else
INLINE uint64_t NAME(total)(const Tile *tile, unsigned i) {
    uint64_t total = 0;
    for (unsigned g = 0; g < GROUPS; g++) total += (uint64_t)__builtin_popcountll(tile->members[g][i]);
    return total;
}
#endif

INLINE void NAME(count_members)(uint64_t *seen, const Tile *tile) {
#if VECTORS == 512
    for (unsigned i = 0; i < CLASSES; i += 8)
        _mm512_store_si512(&seen[i], _mm512_add_epi64(_mm512_load_si512(&seen[i]), NAME(totals)(tile, i)));
#else
    for (unsigned i = 0; i < CLASSES; i++) seen[i] += NAME(total)(tile, i);
#endif
}

/* Takes a tile's members off what is left before each class's next mark; returns the classes that reach it. */
INLINE uint32_t NAME(advance)(uint64_t *left, const Tile *tile, unsigned used) {
    uint32_t reached = 0;
#if VECTORS == 512
    for (unsigned i = 0; i < CLASSES; i += 8) {
        if (i >= used) break;
        __m512i total = NAME(totals)(tile, i), before = _mm512_load_si512(&left[i]);
        reached |= (uint32_t)_mm512_cmplt_epu64_mask(before, total) << i;
        _mm512_store_si512(&left[i], _mm512_sub_epi64(before, total));
    }
#else
    for (unsigned i = used; i-- > 0;) {
        uint64_t total = NAME(total)(tile, i);
        reached = reached << 1 | (left[i] < total);
        left[i] -= total;
    }
#endif
    return reached;
}

INLINE int NAME(scan_tile)(
    Progress *p, Tile *tile, const NAME(Wanted) *wanted, const uint8_t *old, const uint8_t *new, size_t at,
    unsigned count, const Classing *k, Indexing where, Scan *out, const unsigned unit) {
    const uint8_t *o = old + at * unit, *n = new + at * unit;
    for (unsigned i = 0; i < TILE * unit; i += 64) {
        __builtin_prefetch(o + AHEAD + i);
        __builtin_prefetch(n + AHEAD + i);
    }
    uint64_t changed[GROUPS];
    uint32_t groups = 0;
    for (unsigned g = 0; g < GROUPS; g++) {
        unsigned here = count < 64 * g ? 0 : count - 64 * g < 64 ? count - 64 * g : 64;
        changed[g] = NAME(differ)(o + (size_t)64 * g * unit, n + (size_t)64 * g * unit, here, unit);
        groups |= (uint32_t)(changed[g] != 0) << g;
    }
    NAME(fill)(tile, o, count, k, wanted, k->exponent ? 0 : CLASSES - 4, CLASSES, unit);
    if (groups && !scan_reserve(out, TILE)) return 0;
    while (groups) {
        unsigned g = (unsigned)__builtin_ctz(groups), bit = (unsigned)__builtin_ctzll(changed[g]);
        changed[g] &= changed[g] - 1;
        groups &= ~((uint32_t)(changed[g] == 0) << g);
        size_t in_tile = 64 * g + bit;
        uint64_t was = load(o + in_tile * unit, unit);
        unsigned c = k->exponent ? class_of(was, k) : ZERO_CLASS;
        uint64_t rank = p->seen[c] + (uint64_t)__builtin_popcountll(tile->members[g][c] & ((UINT64_C(1) << bit) - 1));
        for (unsigned b = 0; b + 1 < GROUPS; b++)
            rank += b < g ? (uint64_t)__builtin_popcountll(tile->members[b][c]) : 0;
        Change *change = &out->change[out->count];
        change->rank = (uint32_t)rank;
        change->rank_inside = (uint32_t)(rank - p->skipped[c]);
        change->step = step_between(was, load(n + in_tile * unit, unit), k->exponent, unit);
        out->class[out->count++] = (uint8_t)c;
        uint64_t word = where.word == 8 ? (at + in_tile) * unit / 8 : at + in_tile;
        if (word == p->last_word) continue;
        p->last_word = word;
        digest_change(
            &out->digest, where.start + word, load_word(old, word, where.word, unit),
            load_word(new, word, where.word, unit));
    }
    NAME(count_members)(p->seen, tile);
    return 1;
}

/* Finds and ranks the changes of a block. 0 where memory ran out. */
INLINE int NAME(scan_units)(
    const uint8_t *old, const uint8_t *new, size_t count, size_t line, const Classing *k, Indexing where, Scan *out,
    const unsigned unit) {
    Progress p = {.last_word = UINT64_MAX};
    Tile tile = {0};
    NAME(Wanted) wanted[CLASSES];
    for (unsigned c = 0; c < CLASSES; c++) wanted[c] = NAME(wanted)((uint8_t)c);
    size_t length = line ? line : count;
    for (size_t start = 0; start < count; start += length) {
        size_t end = start + length, at = start, found = out->count;
        uint64_t before[CLASSES];
        memcpy(before, p.seen, sizeof before);
        for (; at + TILE <= end; at += TILE)
            if (!NAME(scan_tile)(&p, &tile, wanted, old, new, at, TILE, k, where, out, unit)) return 0;
        if (at < end) {
            unsigned rest = (unsigned)(end - at);
            if (!NAME(scan_tile)(&p, &tile, wanted, old, new, at, rest, k, where, out, unit)) return 0;
        }
        if (out->count == found) {
            for (unsigned c = 0; c < CLASSES; c++) p.skipped[c] += p.seen[c] - before[c];
        } else if (!scan_add_line(out, (uint32_t)(start / length))) {
            return 0;
        }
    }
    for (unsigned c = 0; c < CLASSES; c++) {
        out->members[c] = (uint32_t)p.seen[c];
        out->inside[c] = (uint32_t)(p.seen[c] - p.skipped[c]);
    }
    return 1;
}

/* Lands the marks of one class that fall into a tile. */
INLINE void NAME(land_class)(
    const Tile *tile, unsigned i, uint64_t *left, Cursor *cursor, const uint8_t *o, const Classing *k,
    uint64_t *changed, uint64_t *value, const unsigned unit) {
    uint64_t upto[GROUPS], total = 0;
    for (unsigned g = 0; g < GROUPS; g++) {
        upto[g] = total;
        total += (uint64_t)__builtin_popcountll(tile->members[g][i]);
    }
    uint64_t next = *left + total;
    do {
        unsigned g = 0;
        for (unsigned b = 1; b < GROUPS; b++) g += next >= upto[b];
        unsigned bit = NAME(select)(tile->members[g][i], (unsigned)(next - upto[g]));
        size_t at = 64 * g + bit;
        changed[g] |= UINT64_C(1) << bit;
        value[at] = step_from(load(o + at * unit, unit), *cursor->step++, k->exponent, unit);
        next += *++cursor->distance;
    } while (next < total);
    *left = next - total;
}

/* The same for a class whose marks say what did not change. 0 where there are too few steps. */
INLINE int NAME(land_complement)(
    const Tile *tile, unsigned i, uint64_t *left, Cursor *cursor, const uint8_t *o, const Classing *k,
    uint64_t *changed, uint64_t *value, const unsigned unit) {
    for (unsigned g = 0; g < GROUPS; g++) {
        uint64_t members = tile->members[g][i], rest = members, here = (uint64_t)__builtin_popcountll(members);
        for (; cursor->left < here; cursor->left += *++cursor->distance)
            rest ^= UINT64_C(1) << NAME(select)(members, (unsigned)cursor->left);
        cursor->left -= here;
        changed[g] |= rest;
        for (; rest; rest &= rest - 1) {
            size_t at = 64 * g + (unsigned)__builtin_ctzll(rest);
            if (cursor->step == cursor->step_end) return 0;
            value[at] = step_from(load(o + at * unit, unit), *cursor->step++, k->exponent, unit);
        }
    }
    *left = 0;
    return 1;
}

INLINE int NAME(land_tile)(
    uint64_t *left, Tile *tile, const NAME(Wanted) *wanted, unsigned used, const uint8_t *old, size_t at,
    unsigned count, const Classing *k, Cursor *cursors, Landed *out, const unsigned unit) {
    const uint8_t *o = old + at * unit;
    for (unsigned i = 0; i < TILE * unit; i += 64) __builtin_prefetch(o + AHEAD + i);
    uint64_t changed[GROUPS] = {0}, value[TILE];
    NAME(fill)(tile, o, count, k, wanted, 0, used, unit);
    uint32_t reached = NAME(advance)(left, tile, used), groups = 0;
    for (; reached; reached &= reached - 1) {
        unsigned i = (unsigned)__builtin_ctz(reached);
        if (!cursors[i].complement)
            NAME(land_class)(tile, i, &left[i], &cursors[i], o, k, changed, value, unit);
        else if (!NAME(land_complement)(tile, i, &left[i], &cursors[i], o, k, changed, value, unit))
            return 0;
    }
    for (unsigned g = 0; g < GROUPS; g++) groups |= (uint32_t)(changed[g] != 0) << g;
    while (groups) {
        unsigned g = (unsigned)__builtin_ctz(groups);
        size_t in_tile = 64 * g + (unsigned)__builtin_ctzll(changed[g]);
        changed[g] &= changed[g] - 1;
        groups &= ~((uint32_t)(changed[g] == 0) << g);
        out->position[out->count] = (uint32_t)(at + in_tile);
        memcpy(out->value + out->count * unit, &value[in_tile], unit);
        out->count++;
    }
    return 1;
}

/* Lands the marks of every class on their weights, in the order of positions. 0 where there are too few steps.
 *
 * A class whose marks say what did not change has something to do wherever it has a member: so it is always left with
 * nothing, and its cursor counts.
 */
INLINE int NAME(land_units)(
    const uint8_t *old, const Lines *lines, const Classing *k, Cursor *cursors, unsigned used, Landed *out,
    const unsigned unit) {
    Tile tile = {0};
    NAME(Wanted) wanted[CLASSES];
    _Alignas(64) uint64_t left[CLASSES] = {0};
    for (unsigned i = 0; i < CLASSES; i++) {
        wanted[i] = NAME(wanted)(i < used ? cursors[i].class : NO_CLASS);
        left[i] = i >= used ? FAR : cursors[i].complement ? 0 : *cursors[i].distance;
    }
    for (size_t l = 0; l < lines->count; l++) {
        size_t at = (lines->listed ? lines->listed[l] : l) * lines->length, end = at + lines->length;
        for (; at + TILE <= end; at += TILE)
            if (!NAME(land_tile)(left, &tile, wanted, used, old, at, TILE, k, cursors, out, unit)) return 0;
        if (at < end) {
            unsigned rest = (unsigned)(end - at);
            if (!NAME(land_tile)(left, &tile, wanted, used, old, at, rest, k, cursors, out, unit)) return 0;
        }
    }
    return 1;
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

TARGET static void NAME(digest)(const uint8_t *p, size_t count, Indexing where, Digest *out) {
    switch (where.word) {
        case 1: NAME(digest_words)(p, count, where.start, out, 1); break;
        case 2: NAME(digest_words)(p, count, where.start, out, 2); break;
        case 4: NAME(digest_words)(p, count, where.start, out, 4); break;
        default: NAME(digest_words)(p, count, where.start, out, 8); break;
    }
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
