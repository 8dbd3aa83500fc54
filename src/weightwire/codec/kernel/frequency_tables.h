/* Symbol frequencies, as in ../frequency_tables.py. */
#ifndef WW_FREQUENCY_TABLES_H
#define WW_FREQUENCY_TABLES_H

#include "bit_stream.h"

enum { SCALE_BITS = 12, SCALE = 1 << SCALE_BITS, GAP_TABLES = 13, TOP_LEVEL = 40, SYMBOLS = 256 };

static const uint32_t GO_ON[GAP_TABLES] = {
    2147483648u, 2397865488u, 2630870735u, 2844240754u, 3037000500u, 3209167158u, 3361473452u,
    3495128183u, 3611622603u, 3712582389u, 3799660319u, 3874462704u, 3938502376u};
static const uint8_t GO_ON_SYMBOL[GAP_TABLES] = {7, 8, 10, 12, 14, 17, 20, 24, 28, 33, 40, 47, 56};
static const uint32_t BETWEEN[16] = {
    2020319617u, 1778252501u, 1554869531u, 1351751591u, 1169341376u, 1007231337u, 864423565u, 739546759u,
    631026644u,  537212857u,  456468484u,  387229468u,  328040869u,  277576050u,  234643803u, 198187320u};
static const uint32_t QUARTERS[4] = {65536, 77936, 92682, 110218};

typedef struct {
    unsigned symbols;
    uint16_t share[SYMBOLS]; /* of SCALE */
} Table;

typedef struct {
    unsigned count;
    uint8_t level[SYMBOLS];
} Levels;

static unsigned j_of(uint64_t members, uint64_t marked) {
    unsigned j = 0;
    for (; j < 127; j++) {
        unsigned past = j >= 16 ? (j - 12) / 4 : 0;
        if (marked << 32 >= members * (BETWEEN[j - 4 * past] >> past)) break;
    }
    return j;
}

static inline unsigned gap_raw(unsigned j) { return j < GAP_TABLES ? 0 : (j - GAP_TABLES + 4) / 4; }

static inline unsigned gap_which(unsigned j) { return j - 4 * gap_raw(j); }

static void gap_table(unsigned which, Table *t) {
    unsigned last = GO_ON_SYMBOL[which];
    uint64_t left = UINT64_C(1) << 32, bound = SCALE;
    t->symbols = last + 1;
    for (unsigned s = 0; s < last; s++) {
        left = left * GO_ON[which] >> 32;
        uint64_t next = (left + (1 << 19)) >> 20;
        t->share[s] = (uint16_t)(bound - next);
        bound = next;
    }
    t->share[last] = (uint16_t)bound;
}

static void quantise(const uint32_t *counts, unsigned symbols, Levels *out) {
    uint32_t most = 0;
    out->count = 0;
    for (unsigned s = 0; s < symbols; s++) {
        if (counts[s] > most) most = counts[s];
        if (counts[s]) out->count = s + 1;
    }
    uint64_t top = lg(most);
    for (unsigned s = 0; s < out->count; s++) {
        uint64_t below = counts[s] ? (4 * (top - lg(counts[s])) + (1 << 23)) >> 24 : 0;
        out->level[s] = !counts[s] ? 0 : below < TOP_LEVEL - 1 ? (uint8_t)(TOP_LEVEL - below) : 1;
    }
}

static void shares(const Levels *levels, unsigned least, Table *t) {
    uint64_t total = 0;
    int64_t excess = -SCALE;
    for (unsigned s = 0; s < levels->count; s++)
        if (levels->level[s]) total += (uint64_t)QUARTERS[levels->level[s] % 4] << (levels->level[s] / 4);
    t->symbols = levels->count;
    for (unsigned s = 0; s < levels->count; s++) {
        uint64_t weight = (uint64_t)QUARTERS[levels->level[s] % 4] << (levels->level[s] / 4);
        uint64_t slots = weight * SCALE / total;
        t->share[s] = levels->level[s] ? (uint16_t)(slots > least ? slots : least) : 0;
        excess += t->share[s];
    }
    while (excess) {
        unsigned largest = 0;
        for (unsigned s = 1; s < t->symbols; s++)
            if (t->share[s] > t->share[largest]) largest = s;
        int64_t spare = (int64_t)t->share[largest] - least, taken = excess < spare ? excess : spare;
        t->share[largest] = (uint16_t)(t->share[largest] - taken);
        excess -= taken;
    }
}

static void write_levels(BitWriter *w, const Levels *levels) {
    int64_t previous = TOP_LEVEL;
    bits_golomb(w, levels->count - 1, 2);
    for (unsigned at = 0; at < levels->count;) {
        bits_golomb(w, zigzag(levels->level[at] - previous), 2);
        previous = levels->level[at++];
        if (previous == 0) {
            unsigned more = 0;
            while (!levels->level[at + more]) more++; /* the last level is never 0 */
            bits_golomb(w, more, 1);
            at += more;
        }
    }
}

/* The number of bits that write_levels writes. */
static unsigned levels_bits(const Levels *levels) {
    int64_t previous = TOP_LEVEL;
    unsigned bits = golomb_bits(levels->count - 1, 2);
    for (unsigned at = 0; at < levels->count;) {
        bits += golomb_bits(zigzag(levels->level[at] - previous), 2);
        previous = levels->level[at++];
        if (previous == 0) {
            unsigned more = 0;
            while (!levels->level[at + more]) more++;
            bits += golomb_bits(more, 1);
            at += more;
        }
    }
    return bits;
}

static const char *read_levels(BitReader *r, unsigned most, Levels *out) {
    uint64_t count = read_golomb(r, 2) + 1;
    if (count > most) return "a table has too many symbols";
    int64_t level = TOP_LEVEL;
    int has_top = 0;
    unsigned at = 0;
    while (at < count) {
        int64_t before = level;
        level += unzigzag(read_golomb(r, 2));
        if (r->failed) return "its bit stream is too short";
        if (level < 0 || level > TOP_LEVEL) return "a table level is out of range";
        if (!before && !level) return "a table is not in its canonical form";
        out->level[at++] = (uint8_t)level;
        has_top |= level == TOP_LEVEL;
        if (level == 0) {
            uint64_t more = read_golomb(r, 1);
            if (r->failed || more >= count - at) return "a table is not in its canonical form";
            memset(out->level + at, 0, more);
            at += (unsigned)more;
        }
    }
    out->count = (unsigned)count;
    return level == 0 || !has_top ? "a table is not in its canonical form" : NULL;
}

#endif
