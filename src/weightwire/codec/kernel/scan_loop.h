/* Finds the changes of a block, for scan.h. Part of hot_loops.h. */

/* Counts the kinds of steps from each exponent. */
INLINE void NAME(count_units)(
    const uint8_t *old, const uint8_t *new, size_t count, const Classing *k, uint32_t (*steps)[STEP_KINDS],
    const unsigned unit) {
    uint64_t field = (UINT64_C(1) << k->exponent) - 1;
    for (size_t start = 0; start < count; start += 64) {
        unsigned here = count - start < 64 ? (unsigned)(count - start) : 64;
        uint64_t changed = NAME(differ)(old + start * unit, new + start * unit, here, unit);
        for (; changed; changed &= changed - 1) {
            size_t at = start + (unsigned)__builtin_ctzll(changed);
            uint64_t was = load(old + at * unit, unit), to = load(new + at * unit, unit);
            uint64_t step = step_between(was, to, k->exponent, unit), negative = step >> 63;
            uint64_t beyond = (negative ? 0 - step : step) - 1;
            steps[was >> k->mantissa & field][2 * (beyond < 15 ? beyond : 15) + negative]++;
        }
    }
}

TARGET static void NAME(count_steps)(
    const uint8_t *old, const uint8_t *new, size_t count, const Classing *given, uint32_t (*steps)[STEP_KINDS]) {
    const Classing own = *given, *k = &own;
    switch (k->unit) {
        case 1: NAME(count_units)(old, new, count, k, steps, 1); break;
        case 2: NAME(count_units)(old, new, count, k, steps, 2); break;
        case 4: NAME(count_units)(old, new, count, k, steps, 4); break;
        default: NAME(count_units)(old, new, count, k, steps, 8); break;
    }
}

INLINE int NAME(scan_chunk)(
    Progress *p, Chunk *chunk, size_t at, unsigned count, const Classing *k, Indexing where, Scan *out,
    const unsigned unit) {
    const uint8_t *o = p->old + at * unit, *n = p->new + at * unit;
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
        /* If another thread writes to the weights, the delta is wrong and its digests show that, but nothing crashes. */
        if (was == to || !(chunk->members[g][c] >> bit & 1)) continue;
        uint64_t below = chunk->members[g][c] & ((UINT64_C(1) << bit) - 1);
        uint64_t rank = p->seen[c] + chunk->before[g][c] + (uint64_t)__builtin_popcountll(below);
        Change *change = &out->change[out->count];
        change->rank = (uint32_t)rank;
        change->rank_inside = (uint32_t)(rank - p->skipped[c]);
        change->step = step_between(was, to, k->exponent, unit);
        out->class[out->count++] = (uint8_t)c;
        uint64_t word = word_of(at + in_chunk, where.word, unit);
        if (word == p->last_word) continue;
        p->last_word = word;
        size_t w = p->words.count++;
        p->words.index[w] = where.start + word;
        p->words.before[w] = load_word(p->old, word, where.word, unit);
        p->words.after[w] = load_word(p->new, word, where.word, unit);
        if (p->words.count == BATCH) NAME(digest_rewritten)(&p->words, p->digest);
    }
    for (unsigned c = 0; c < CLASSES; c++) p->seen[c] += chunk->before[chunk->groups][c];
    return 1;
}

/* Finds and ranks the changes of a block. Returns 0 if memory runs out. */
INLINE int NAME(scan_units)(
    const Pieces *old, const Pieces *new, size_t count, size_t line, const Classing *k, Indexing where, Scan *out,
    const unsigned unit) {
    Progress p;
    memset(p.seen, 0, sizeof p.seen);
    memset(p.skipped, 0, sizeof p.skipped);
    p.words.count = 0;
    p.digest = NULL;
    Chunk chunk;
    memset(&chunk, 0, sizeof chunk);
    size_t length = line ? line : where.segment, origin = 0, segment = 0;
    for (size_t start = 0; start < count; start += length) {
        size_t end = start + length, found = out->count;
        if (!p.digest || start - origin == where.segment) {
            NAME(digest_rewritten)(&p.words, p.digest);
            segment += p.digest != NULL;
            origin = start;
            p.digest = &out->digests[segment];
            p.old = piece_of(old, segment);
            p.new = piece_of(new, segment);
            p.last_word = UINT64_MAX;
        }
        uint64_t before[CLASSES];
        memcpy(before, p.seen, sizeof before);
        for (size_t at = start; at < end; at += CHUNK) {
            unsigned here = end - at < CHUNK ? (unsigned)(end - at) : CHUNK;
            if (!NAME(scan_chunk)(&p, &chunk, at - origin, here, k, where, out, unit)) return 0;
        }
        out->changed[segment] += (uint32_t)(out->count - found);
        if (out->count == found) {
            for (unsigned c = 0; c < CLASSES; c++) p.skipped[c] += p.seen[c] - before[c];
        } else if (!scan_add_line(out, (uint32_t)(start / length))) {
            return 0;
        }
    }
    NAME(digest_rewritten)(&p.words, p.digest);
    for (unsigned c = 0; c < CLASSES; c++) {
        out->members[c] = (uint32_t)p.seen[c];
        out->inside[c] = (uint32_t)(p.seen[c] - p.skipped[c]);
    }
    return 1;
}

TARGET static int NAME(scan)(
    const Pieces *old, const Pieces *new, size_t count, size_t line, const Classing *given, Indexing where, Scan *out) {
    const Classing own = *given, *k = &own; /* a local copy stays in registers */
    switch (k->unit) {
        case 1: return NAME(scan_units)(old, new, count, line, k, where, out, 1);
        case 2: return NAME(scan_units)(old, new, count, line, k, where, out, 2);
        case 4: return NAME(scan_units)(old, new, count, line, k, where, out, 4);
        default: return NAME(scan_units)(old, new, count, line, k, where, out, 8);
    }
}
