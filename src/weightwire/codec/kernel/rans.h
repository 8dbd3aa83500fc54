/* The entropy coder, as in ../rans.py. */
#ifndef WW_RANS_H
#define WW_RANS_H

#include "frequency_tables.h"
#include "lanes.h"

static int vectors; /* width of the vectors in use */

#define RANS_LOW (UINT32_C(1) << 16)

typedef struct {
    uint32_t state[16];
    unsigned lanes;
    uint16_t *words; /* filled from the end */
    size_t at, room;
} Encoder;

static unsigned lanes_for(uint64_t symbols) { return symbols < 4096 ? 1 : symbols < 32768 ? 4 : 16; }

/* Room for one word per symbol that will be coded. */
static int encoder_start(Encoder *e, uint64_t symbols) {
    e->lanes = lanes_for(symbols);
    for (int i = 0; i < 16; i++) e->state[i] = RANS_LOW;
    e->at = e->room = symbols + 1; /* one extra: a word is stored before it is known to be needed */
    e->words = scratch_new(e->room * sizeof(uint16_t));
    return e->words != NULL;
}

/* x / share, as a multiplication: exact, since x is below 2^32 and shares are at most 2^12. */
static inline uint32_t divide(uint32_t x, uint32_t share, uint64_t reciprocal) {
    return share == 1 ? x : (uint32_t)((unsigned __int128)reciprocal * x >> 64);
}

/* Of one table, for each symbol. */
typedef struct {
    struct {
        uint64_t reciprocal;
        uint32_t share, start;
    } of[SYMBOLS];
} Codes;

static void codes_of(const Table *t, Codes *codes) {
    uint32_t start = 0;
    for (unsigned s = 0; s < t->symbols; s++) {
        codes->of[s].share = t->share[s];
        codes->of[s].start = start;
        codes->of[s].reciprocal = t->share[s] > 1 ? UINT64_MAX / t->share[s] + 1 : 0;
        start += t->share[s];
    }
}

#if HAS_LANES
static void lane_codes_of(const Table *t, LaneCodes *codes) {
    uint32_t start = 0;
    for (unsigned s = 0; s < t->symbols; s++) {
        codes->inverse[s] = t->share[s] ? 1.0 / t->share[s] : 0;
        codes->code[s] = ((t->share[s] - 1u) & (SCALE - 1)) | start << 12;
        start += t->share[s];
    }
}
#endif

/* Codes the symbols of a section from `first` to before `end`, from the last. `which` is NULL if there is one table. */
static inline __attribute__((always_inline)) void encode_symbols(
    Encoder *e, const uint8_t *symbols, const uint8_t *which, size_t first, size_t end, const Codes *codes) {
    uint16_t *words = e->words;
    size_t at = e->at;
    uint32_t state[16];
    memcpy(state, e->state, sizeof state);
    unsigned mask = e->lanes - 1;
    for (size_t i = end; i-- > first;) {
        const Codes *c = codes + (which ? which[i] : 0);
        uint32_t x = state[i & mask], share = c->of[symbols[i]].share;
        /* Without a branch: whether a word is needed is random. */
        words[at - 1] = (uint16_t)x;
        unsigned due = x >= (uint64_t)share << 20;
        at -= due;
        x >>= 16 * due;
        uint32_t quotient = divide(x, share, c->of[symbols[i]].reciprocal);
        state[i & mask] = (quotient << SCALE_BITS) + (x - quotient * share) + c->of[symbols[i]].start;
    }
    memcpy(e->state, state, sizeof state);
    e->at = at;
}

/* The symbols of a section that are coded in groups of sixteen. The rest at its end is coded before them. */
static size_t grouped_symbols(const Encoder *e, size_t count) {
#if HAS_LANES
    if (vectors == 512 && e->lanes == 16 && count >= 64) return count & ~(size_t)15;
#endif
    (void)e, (void)count;
    return 0;
}

/* Sections are coded last to first, each from its end. */
static void encode_section(Encoder *e, const uint8_t *symbols, size_t count, const Table *t) {
    size_t grouped = grouped_symbols(e, count);
    Codes codes;
    codes_of(t, &codes);
    encode_symbols(e, symbols, NULL, grouped, count, &codes);
#if HAS_LANES
    LaneCodes lanes;
    if (!grouped) return;
    lane_codes_of(t, &lanes);
    e->at = encode_sixteen(e->state, e->words, e->at, &lanes, symbols, NULL, grouped);
#endif
}

/* Codes a section whose symbol i has the table which[i]. Returns 0 without memory. */
static int encode_mixed_section(
    Encoder *e, const uint8_t *symbols, const uint8_t *which, size_t count, const Table *tables, unsigned used) {
    size_t grouped = grouped_symbols(e, count);
    Codes *codes = scratch_new(used * sizeof *codes);
    if (!codes) return 0;
    for (unsigned i = 0; i < used; i++) codes_of(&tables[i], &codes[i]);
    encode_symbols(e, symbols, which, grouped, count, codes);
    scratch_free(codes);
#if HAS_LANES
    if (!grouped) return 1;
    LaneCodes *lanes = scratch_new(used * sizeof *lanes);
    if (!lanes) return 0;
    for (unsigned i = 0; i < used; i++) lane_codes_of(&tables[i], &lanes[i]);
    e->at = encode_sixteen(e->state, e->words, e->at, lanes, symbols, which, grouped);
    scratch_free(lanes);
#endif
    return 1;
}

typedef struct {
    uint32_t state[16];
    unsigned lanes;
    const uint8_t *words, *end;
} Decoder;

/* One entry per slot: the symbol, the position of the slot within it, and its share minus one. */
typedef struct {
    uint32_t entry[SCALE];
} DecodeTable;

static void decode_table(const Table *t, DecodeTable *d) {
    unsigned slot = 0;
    for (unsigned s = 0; s < t->symbols; s++)
        for (unsigned i = 0; i < t->share[s]; i++)
            d->entry[slot++] = (uint32_t)s << 24 | i << 12 | (t->share[s] - 1u);
}

static inline uint8_t decode_one(uint32_t *state, const uint8_t **words, const DecodeTable *t) {
    uint32_t entry = t->entry[*state & (SCALE - 1)];
    uint32_t x = ((entry & (SCALE - 1)) + 1) * (*state >> SCALE_BITS) + (entry >> 12 & (SCALE - 1));
    uint16_t word;
    memcpy(&word, *words, 2);
    uint32_t more = x < RANS_LOW;
    *state = more ? x << 16 | word : x;
    *words += 2 * more;
    return (uint8_t)(entry >> 24);
}

/* Decodes a section. `which` is NULL if it has one table. Returns 0 if the words run out. */
static inline __attribute__((always_inline)) int decode_symbols(
    Decoder *d, const DecodeTable *tables, const uint8_t *which, uint8_t *out, size_t count) {
#define TABLE_OF(i) (which ? &tables[which[i]] : tables)
    size_t i = 0;
    const uint8_t *words = d->words;
    if (d->lanes == 4) {
        uint32_t a = d->state[0], b = d->state[1], c = d->state[2], e = d->state[3];
        for (; i + 4 <= count && d->end - words >= 8; i += 4) {
            out[i] = decode_one(&a, &words, TABLE_OF(i));
            out[i + 1] = decode_one(&b, &words, TABLE_OF(i + 1));
            out[i + 2] = decode_one(&c, &words, TABLE_OF(i + 2));
            out[i + 3] = decode_one(&e, &words, TABLE_OF(i + 3));
        }
        d->state[0] = a;
        d->state[1] = b;
        d->state[2] = c;
        d->state[3] = e;
    }
#if HAS_LANES
    if (d->lanes == 16 && vectors == 512)
        i = decode_sixteen(d->state, &words, d->end, tables->entry, which, out, count);
#endif
    if (d->lanes == 16) {
        for (; i + 16 <= count && d->end - words >= 32; i += 16)
            for (unsigned lane = 0; lane < 16; lane++)
                out[i + lane] = decode_one(&d->state[lane], &words, TABLE_OF(i + lane));
    }
    for (; i < count; i++) {
        uint32_t *state = &d->state[i & (d->lanes - 1)];
        uint32_t entry = TABLE_OF(i)->entry[*state & (SCALE - 1)];
        uint32_t x = ((entry & (SCALE - 1)) + 1) * (*state >> SCALE_BITS) + (entry >> 12 & (SCALE - 1));
        if (x < RANS_LOW) {
            uint16_t word;
            if (words == d->end) return 0;
            memcpy(&word, words, 2);
            words += 2;
            x = x << 16 | word;
        }
        *state = x;
        out[i] = (uint8_t)(entry >> 24);
    }
    d->words = words;
    return 1;
#undef TABLE_OF
}

static int decode_section(Decoder *d, const DecodeTable *table, uint8_t *out, size_t count) {
    return decode_symbols(d, table, NULL, out, count);
}

static int decode_mixed_section(
    Decoder *d, const DecodeTable *tables, const uint8_t *which, uint8_t *out, size_t count) {
    return decode_symbols(d, tables, which, out, count);
}

static int decoder_ends_well(const Decoder *d) {
    for (unsigned i = 0; i < d->lanes; i++)
        if (d->state[i] != RANS_LOW) return 0;
    return d->words == d->end;
}

#endif
