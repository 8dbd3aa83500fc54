/* Finds and replaces differences, for replace.h. Part of hot_loops.h. */

/* Replaces a chunk of the target. Returns 0 without memory for the old units. Prefetching, which helps the other loops,
 * makes this one 25% slower. */
INLINE int NAME(replace_chunk)(
    uint8_t *t, const uint8_t *s, size_t at, unsigned count, Replaced *out, const unsigned unit) {
    uint64_t changed[GROUPS], groups = 0;
    uint16_t listed[CHUNK + 1];
    for (unsigned g = 0; 64 * g < count; g++) {
        unsigned here = count - 64 * g < 64 ? count - 64 * g : 64;
        size_t start = (size_t)64 * g * unit;
        changed[g] = NAME(differ)(t + start, s + start, here, unit);
        groups |= (uint64_t)(changed[g] != 0) << g;
    }
    if (!groups) return 1;
    unsigned found = NAME(list)(groups, changed, listed);
    if (!replaced_reserve(out, found, unit)) return 0;
    uint32_t *position = out->position + out->count;
    uint8_t *value = out->value + out->count * unit;
    for (unsigned i = 0; i < found; i++) { /* unit by unit: equal units need no write */
        size_t in_chunk = listed[i];
        position[i] = (uint32_t)(at + in_chunk);
        memcpy(value + (size_t)i * unit, t + in_chunk * unit, unit);
        memcpy(t + in_chunk * unit, s + in_chunk * unit, unit);
    }
    out->count += found;
    return 1;
}

/* Chunk by chunk, until more than `most` units were found to differ. */
INLINE int NAME(replace_units)(
    const Pieces *target, const Pieces *source, size_t count, size_t most, Replaced *out, const unsigned unit) {
    size_t segment = target->size / unit;
    for (size_t origin = 0; origin < count; origin += segment) {
        uint8_t *t = piece_of(target, origin / segment);
        const uint8_t *s = piece_of(source, origin / segment);
        for (size_t at = 0; at < segment && out->count <= most;) {
            unsigned here = segment - at < CHUNK ? (unsigned)(segment - at) : CHUNK;
            if (!NAME(replace_chunk)(t + at * unit, s + at * unit, origin + at, here, out, unit)) return 0;
            out->reached = origin + (at += here);
        }
        if (out->count > most) break;
    }
    return 1;
}

TARGET static int NAME(replace)(
    const Pieces *target, const Pieces *source, size_t count, size_t most, unsigned unit, Replaced *out) {
    switch (unit) {
        case 1: return NAME(replace_units)(target, source, count, most, out, 1);
        case 2: return NAME(replace_units)(target, source, count, most, out, 2);
        case 4: return NAME(replace_units)(target, source, count, most, out, 4);
        default: return NAME(replace_units)(target, source, count, most, out, 8);
    }
}
