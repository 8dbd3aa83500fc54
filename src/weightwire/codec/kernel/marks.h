/* Marks: which members of a class changed, or which lines of a block, as in ../marks.py. */
#ifndef WW_MARKS_H
#define WW_MARKS_H

#include "block_frame.h"
#include "hot.h"

/* --- writing --- */

typedef struct {
    int complement;
    unsigned j;
    uint32_t *rank; /* the coded ones */
    size_t ranks;
    uint8_t *symbol;
    size_t symbols;
} Marks;

/* Takes ownership of the sorted `rank`. If most members are marked, the others are coded. */
static int marks_of(Marks *m, uint32_t *rank, size_t ranks, uint32_t members) {
    m->rank = rank;
    m->ranks = ranks;
    m->complement = 2 * ranks > members;
    if (m->complement) {
        m->ranks = members - ranks;
        m->rank = scratch_new((m->ranks + 1) * sizeof *m->rank);
        size_t at = 0, k = 0;
        for (uint32_t r = 0; m->rank && r < members; r++) {
            if (at < ranks && rank[at] == r)
                at++;
            else
                m->rank[k++] = r;
        }
        scratch_free(rank);
        if (!m->rank) return 0;
    }
    m->j = m->ranks ? j_of(members, m->ranks) : 0;
    unsigned raw = gap_raw(m->j), go_on = GO_ON_SYMBOL[gap_which(m->j)];
    size_t room = m->ranks + ((size_t)members >> raw) / go_on + 1;
    m->symbol = scratch_new(room);
    if (!m->symbol) return 0;
    m->symbols = 0;
    uint32_t after = 0;
    for (size_t i = 0; i < m->ranks; i++) {
        uint32_t quotient = (m->rank[i] - after) >> raw;
        for (; quotient >= go_on; quotient -= go_on) m->symbol[m->symbols++] = (uint8_t)go_on;
        m->symbol[m->symbols++] = (uint8_t)quotient;
        after = m->rank[i] + 1;
    }
    return 1;
}

static void marks_free(Marks *m) {
    scratch_free(m->rank);
    scratch_free(m->symbol);
}

static void write_marks(BitWriter *w, const Marks *m, unsigned expected) {
    bits_number(w, (uint64_t)m->complement, 1);
    bits_golomb(w, m->symbols, 8);
    if (m->symbols) bits_golomb(w, zigzag((int64_t)m->j - (int64_t)expected), 1);
}

static void write_marks_raw(BitWriter *w, const Marks *m) {
    unsigned raw = gap_raw(m->j);
    uint32_t after = 0;
    for (size_t i = 0; raw && i < m->ranks; i++) {
        bits_number(w, m->rank[i] - after, raw);
        after = m->rank[i] + 1;
    }
}

/* Whether listing the lines with changes saves more than it costs. By class: all members, those of active lines, and those
 * that changed. */
static int lines_pay(
    const uint32_t *members, const uint32_t *inside, const size_t *changed, size_t active, size_t lines) {
    int64_t saved = 0;
    for (unsigned c = 0; c < CLASSES; c++)
        saved += (int64_t)entropy_of_two(changed[c], members[c] - changed[c]) -
                 (int64_t)entropy_of_two(changed[c], inside[c] - changed[c]);
    return saved > (int64_t)entropy_of_two(active, lines - active) + (INT64_C(64) << 24);
}

/* --- reading --- */

typedef struct {
    int complement;
    unsigned j;
    size_t symbols;
    uint32_t *distance; /* as a Cursor reads them */
    size_t marks;
} Gaps;

static const char *read_marks(BitReader *r, size_t length, unsigned expected, Gaps *g) {
    g->complement = (int)read_number(r, 1);
    g->symbols = read_golomb(r, 8);
    if (g->symbols > length) return "it has more marks than weights";
    int64_t j = expected;
    if (g->symbols) j += unzigzag(read_golomb(r, 1));
    if (j < 0 || j > 127) return "a gap parameter is out of range";
    g->j = (unsigned)j;
    return NULL;
}

/* Gap symbols and raw bits -> distances. */
static const char *read_gaps(Decoder *d, BitReader *r, size_t length, DecodeTable *slots, uint8_t *symbols, Gaps *g) {
    Table t;
    unsigned raw = gap_raw(g->j), go_on = GO_ON_SYMBOL[gap_which(g->j)];
    g->distance = scratch_new((g->symbols + 1) * sizeof *g->distance);
    if (!g->distance) return OUT_OF_MEMORY;
    gap_table(gap_which(g->j), &t);
    decode_table(&t, slots);
    if (!decode_section(d, slots, symbols, g->symbols)) return "its entropy-coded part is too short";
    if (g->symbols && symbols[g->symbols - 1] == go_on) return "a gap does not end";
    uint64_t quotient = 0, after = 0;
    for (size_t i = 0; i < g->symbols; i++) {
        quotient += symbols[i];
        if (symbols[i] == go_on) continue;
        uint64_t gap = (quotient << raw) + (raw ? read_number(r, raw) : 0);
        after += gap + 1;
        if (after > length) return "it marks a weight past its end";
        g->distance[g->marks] = (uint32_t)gap + (g->marks > 0);
        g->marks++;
        quotient = 0;
    }
    g->distance[g->marks] = FAR;
    return r->failed ? "its bit stream is too short" : NULL;
}

/* The marked lines, in order. Returns their number. `out` has room for all. */
static size_t list_lines(const Gaps *g, size_t lines, uint32_t *out) {
    size_t found = 0;
    const uint32_t *distance = g->distance;
    uint64_t next = *distance;
    for (uint32_t l = 0; l < lines; l++) {
        int marked = l == next;
        if (marked) next += *++distance;
        if (marked != g->complement) out[found++] = l;
    }
    return found;
}

#endif
