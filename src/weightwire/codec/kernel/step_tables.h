/* Steps: tokens and raw bits of magnitudes, and tables that neighbouring classes may share, as in ../step_tables.py. */
#ifndef WW_STEP_TABLES_H
#define WW_STEP_TABLES_H

#include "exponent_classes.h"
#include "frequency_tables.h"

enum { PLAIN_TOKENS = 128, TOKENS = PLAIN_TOKENS, BALANCED = 128 }; /* plain: of bytes that are not floats */

static unsigned tokens_of(const Classing *k) {
    if (!k->exponent) return PLAIN_TOKENS;
    return k->unit == 1 ? 31 : k->unit == 2 ? 63 : k->unit == 4 ? 79 : 111;
}

static inline unsigned token_of(uint64_t magnitude, int plain, unsigned *raw) {
    if (magnitude < 16 || plain) {
        *raw = 0;
        return (unsigned)magnitude - 1;
    }
    unsigned octave = bit_length(magnitude) - 1;
    *raw = octave < 16 ? octave - 2 : octave;
    return octave < 16 ? 15 + (octave - 4) * 4 + (unsigned)(magnitude >> (octave - 2) & 3) : 63 + octave - 16;
}

static inline uint64_t least_of(unsigned token, int plain, unsigned *raw) {
    if (token < 15 || plain) {
        *raw = 0;
        return token + 1;
    }
    unsigned octave = token < 63 ? (token - 15) / 4 + 4 : token - 63 + 16;
    *raw = token < 63 ? octave - 2 : octave;
    return (uint64_t)(token < 63 ? (token - 15) % 4 + 4 : 1) << *raw;
}

static inline uint64_t magnitude_of(uint64_t step) { return (int64_t)step < 0 ? 0 - step : step; }

/* The table of one class, or of several neighbours that share it. */
typedef struct {
    uint32_t counts[1 + TOKENS]; /* of magnitude tokens and, in a dense block, before them of unchanged units */
    uint64_t positive, total;    /* steps */
    Levels levels;
    unsigned plus;
    uint64_t cost; /* of the symbols and the table, in units of 2^-24 bits */
} StepTable;

/* The tables of all classes with a change. */
typedef struct {
    uint8_t present[CLASSES], same[CLASSES]; /* same: it has the table of the present class before */
    StepTable table[CLASSES];
} StepTables;

static unsigned bias(uint64_t positive, uint64_t total) {
    if (positive == 0) return 0;
    if (positive == total) return 256;
    int64_t lean = 2 * (int64_t)positive - (int64_t)total;
    if ((uint64_t)(lean * lean) <= 11 * total) return BALANCED;
    uint64_t plus = (512 * positive + total) / (2 * total);
    return plus < 1 ? 1 : plus > 255 ? 255 : (unsigned)plus;
}

static void write_bias(BitWriter *w, unsigned plus) {
    bits_number(w, plus == BALANCED ? 0 : plus == 256 ? 1 : plus == 0 ? 2 : 3, 2);
    if (plus != BALANCED && plus != 256 && plus != 0) bits_number(w, plus, 8);
}

static unsigned bias_bits(unsigned plus) { return plus == BALANCED || plus == 256 || plus == 0 ? 2 : 10; }

/* Returns -1 if the bias is out of range. */
static int read_bias(BitReader *r) {
    static const int known[3] = {BALANCED, 256, 0};
    uint64_t mode = read_number(r, 2);
    if (mode < 3) return known[mode];
    int plus = (int)read_number(r, 8);
    return plus ? plus : -1;
}

/* The shares of all symbols. The first level of a dense block is that of unchanged units, which have no sign. */
static void step_shares(const Levels *levels, unsigned plus, unsigned dense, Table *t) {
    int one_sign = plus == 0 || plus == 256;
    Table slots;
    shares(levels, one_sign ? 1 : 2, &slots);
    if (dense) t->share[0] = slots.share[0];
    t->symbols = dense;
    for (unsigned s = dense; s < slots.symbols; s++) {
        unsigned share = slots.share[s], above;
        if (s - dense == PLAIN_TOKENS - 1) { /* it is for one step, which has no other sign */
            t->share[t->symbols++] = (uint16_t)share;
            break;
        }
        if (one_sign || !share) {
            above = plus ? share : 0;
        } else {
            above = share * plus >> 8;
            if (above < 1) above = 1;
            if (above > share - 1) above = share - 1;
        }
        t->share[t->symbols++] = (uint16_t)above;
        t->share[t->symbols++] = (uint16_t)(share - above);
    }
}

static void step_table_finish(StepTable *t) {
    quantise(t->counts, 1 + TOKENS, &t->levels);
    t->plus = bias(t->positive, t->total);
    unsigned bits = levels_bits(&t->levels) + bias_bits(t->plus);
    t->cost = entropy_of(t->counts, 1 + TOKENS) + entropy_of_two(t->positive, t->total - t->positive) +
              ((uint64_t)bits << 24);
}

/* Finishes the tables from their counts. A class shares the table of the one before if that is shorter. */
static void share_tables(StepTables *all) {
    unsigned member[CLASSES], members = 0;
    for (unsigned c = 0; c < CLASSES; c++) {
        if (!all->present[c]) continue;
        const StepTable *own = &all->table[c];
        step_table_finish(&all->table[c]);
        all->same[c] = 0;
        if (members) {
            const StepTable *before = &all->table[member[members - 1]];
            StepTable both = *own;
            for (unsigned t = 0; t <= TOKENS; t++) both.counts[t] += before->counts[t];
            both.positive += before->positive;
            both.total += before->total;
            step_table_finish(&both);
            all->same[c] = both.cost <= before->cost + own->cost;
            if (!all->same[c]) members = 0;
            member[members++] = c;
            for (unsigned i = 0; all->same[c] && i < members; i++) all->table[member[i]] = both;
        } else {
            member[members++] = c;
        }
    }
}

static void write_step_tables(BitWriter *w, const StepTables *all) {
    int first = 1;
    for (unsigned c = 0; c < CLASSES; c++) {
        if (!all->present[c]) continue;
        if (!first) bits_number(w, all->same[c], 1);
        first = 0;
        if (all->same[c]) continue;
        write_levels(w, &all->table[c].levels);
        write_bias(w, all->table[c].plus);
    }
}

/* Reads the tables of so many classes. */
static const char *read_step_tables(
    BitReader *r, unsigned classes, const Classing *k, unsigned dense, Table *tables) {
    for (unsigned i = 0; i < classes; i++) {
        Levels levels;
        const char *why;
        if (i && read_number(r, 1)) {
            tables[i] = tables[i - 1];
            continue;
        }
        if ((why = read_levels(r, tokens_of(k) + dense, &levels))) return why;
        if (dense && levels.count == 1) return "it lists a class without a change";
        int plus = read_bias(r);
        if (plus < 0) return "a sign table is out of range";
        step_shares(&levels, (unsigned)plus, dense, &tables[i]);
    }
    return r->failed ? "its bit stream is too short" : NULL;
}

#endif
