/* Finds the changes of a block, for scan.h. Part of hot_loops.h. */

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
        /* If another thread writes to the weights, the delta is wrong and its digests show that, but nothing crashes. */
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

/* Finds and ranks the changes of a block. Returns 0 if memory runs out. */
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

TARGET static int NAME(scan)(
    const uint8_t *old, const uint8_t *new, size_t count, size_t line, const Classing *given, Indexing where,
    Scan *out) {
    const Classing own = *given, *k = &own; /* a local copy stays in registers */
    switch (k->unit) {
        case 1: return NAME(scan_units)(old, new, count, line, k, where, out, 1);
        case 2: return NAME(scan_units)(old, new, count, line, k, where, out, 2);
        case 4: return NAME(scan_units)(old, new, count, line, k, where, out, 4);
        default: return NAME(scan_units)(old, new, count, line, k, where, out, 8);
    }
}
