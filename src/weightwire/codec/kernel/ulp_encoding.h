/* The `ulp` encoding, as in ../ulp_encoding.py. */
#ifndef WW_ULP_ENCODING_H
#define WW_ULP_ENCODING_H

#include "class_heads.h"
#include "marks.h"
#include "step_tables.h"

enum { FIRST_J = 20 };

#define WRONG_STEPS "the number of steps differs from the number of changes"

static unsigned next_j(unsigned j) { return j > 4 ? j - 4 : 0; }

/* --- writing --- */

typedef struct {
    uint64_t *step;
    uint8_t *symbol;
    size_t count;
} Steps;

static void steps_code(Steps *s, int plain, StepTable *t) {
    memset(t, 0, sizeof *t);
    for (size_t i = 0; i < s->count; i++) {
        unsigned raw, token = token_of(magnitude_of(s->step[i]), plain, &raw), negative = (unsigned)(s->step[i] >> 63);
        t->counts[token]++;
        t->positive += !negative;
        s->symbol[i] = (uint8_t)(2 * token + negative);
    }
    t->total = s->count;
}

/* The changes of a block before they are written. */
typedef struct {
    int by_lines;
    Marks lines, marks[CLASSES];
    Steps steps[CLASSES];
    StepTables tables;
} Plan;

static void plan_free(Plan *p) {
    marks_free(&p->lines);
    for (unsigned c = 0; c < CLASSES; c++) {
        marks_free(&p->marks[c]);
        scratch_free(p->steps[c].step);
        scratch_free(p->steps[c].symbol);
    }
}

/* Sorts the changes by class and turns them into symbols. */
static int plan_make(Plan *p, Scan *s, const Classing *k, size_t lines) {
    size_t marked[CLASSES] = {0};
    uint32_t *rank[CLASSES] = {0};
    for (size_t i = 0; i < s->count; i++) marked[s->class[i]]++;
    p->by_lines = lines && lines_pay(s->members, s->inside, marked, s->lines, lines);
    int good = 1;
    for (unsigned c = 0; c < CLASSES; c++) {
        if (!marked[c]) continue;
        rank[c] = scratch_new(marked[c] * sizeof **rank);
        p->steps[c].step = scratch_new(marked[c] * sizeof(uint64_t));
        p->steps[c].symbol = scratch_new(marked[c]);
        good &= rank[c] && p->steps[c].step && p->steps[c].symbol;
    }
    for (size_t i = 0; good && i < s->count; i++) {
        unsigned c = s->class[i];
        size_t at = p->steps[c].count++;
        rank[c][at] = p->by_lines ? s->change[i].rank_inside : s->change[i].rank;
        p->steps[c].step[at] = s->change[i].step;
    }
    for (unsigned c = 0; c < CLASSES; c++) {
        if (!marked[c]) continue;
        if (!good) {
            scratch_free(rank[c]);
            continue;
        }
        good &= marks_of(&p->marks[c], rank[c], marked[c], p->by_lines ? s->inside[c] : s->members[c]);
        p->tables.present[c] = 1;
        steps_code(&p->steps[c], !k->exponent, &p->tables.table[c]);
    }
    if (good) share_tables(&p->tables);
    if (good && p->by_lines) {
        uint32_t *listed = s->line;
        s->line = NULL;
        good = marks_of(&p->lines, listed, s->lines, (uint32_t)lines);
    }
    return good;
}

static void plan_write_bits(const Plan *p, const Classing *k, BitWriter *w) {
    write_classes(w, k, p->tables.present);
    if (p->by_lines) write_marks(w, &p->lines, 0);
    unsigned expected = FIRST_J;
    for (unsigned c = 0; c < CLASSES; c++) {
        const Marks *m = &p->marks[c];
        if (!p->steps[c].count) continue;
        write_marks(w, m, expected);
        if (m->complement) bits_golomb(w, p->steps[c].count - 1, 8);
        expected = next_j(m->symbols ? m->j : expected);
    }
    write_step_tables(w, &p->tables);
    if (p->by_lines) write_marks_raw(w, &p->lines);
    for (unsigned c = 0; c < CLASSES; c++) write_marks_raw(w, &p->marks[c]);
    for (unsigned c = 0; k->exponent && c < CLASSES; c++) {
        for (size_t i = 0; i < p->steps[c].count; i++) {
            if (p->steps[c].symbol[i] < 30) continue;
            unsigned raw;
            uint64_t magnitude = magnitude_of(p->steps[c].step[i]);
            token_of(magnitude, 0, &raw);
            bits_number(w, magnitude, raw);
        }
    }
    bits_flush(w);
}

static int plan_write_symbols(const Plan *p, Bytes *out) {
    uint64_t symbols = p->lines.symbols;
    for (unsigned c = 0; c < CLASSES; c++) symbols += p->marks[c].symbols + p->steps[c].count;
    Encoder e;
    Table t;
    if (!encoder_start(&e, symbols)) return 0;
    for (unsigned c = CLASSES; c-- > 0;) {
        if (!p->steps[c].count) continue;
        step_shares(&p->tables.table[c].levels, p->tables.table[c].plus, 0, &t);
        encode_section(&e, p->steps[c].symbol, p->steps[c].count, &t);
    }
    for (unsigned c = CLASSES; c-- > 0;) {
        gap_table(gap_which(p->marks[c].j), &t);
        encode_section(&e, p->marks[c].symbol, p->marks[c].symbols, &t);
    }
    if (p->by_lines) {
        gap_table(gap_which(p->lines.j), &t);
        encode_section(&e, p->lines.symbol, p->lines.symbols, &t);
    }
    encoder_finish(&e, (uint8_t)(ULP | (p->by_lines ? LINES : 0)), out);
    scratch_free(e.words);
    return 1;
}

static int encode_ulp(Scan *s, const Classing *k, size_t lines, Bytes *out) {
    Plan p;
    BitWriter w = {0};
    memset(&p, 0, sizeof p);
    int good = plan_make(&p, s, k, lines) && plan_write_symbols(&p, out);
    if (good) {
        plan_write_bits(&p, k, &w);
        bytes_add(out, w.bytes.data, w.bytes.size);
    }
    good = good && !w.bytes.failed && !out->failed;
    scratch_free(w.bytes.data);
    plan_free(&p);
    return good;
}

/* --- reading --- */

typedef struct {
    Gaps gaps;
    uint64_t *step;
    size_t steps;
} Head;

static const char *read_steps(
    Decoder *d, BitReader *r, const Table *table, int plain, DecodeTable *slots, uint8_t *symbols, Head *h) {
    h->step = scratch_new((h->steps + 1) * sizeof *h->step);
    if (!h->step) return OUT_OF_MEMORY;
    decode_table(table, slots);
    if (!decode_section(d, slots, symbols, h->steps)) return "its entropy-coded part is too short";
    for (size_t i = 0; i < h->steps; i++) {
        unsigned raw;
        uint64_t magnitude = least_of(symbols[i] >> 1, plain, &raw);
        if (raw) magnitude += read_number(r, raw);
        h->step[i] = symbols[i] & 1 ? 0 - magnitude : magnitude;
    }
    return r->failed ? "its bit stream is too short" : NULL;
}

typedef struct {
    int by_lines;
    Gaps lines;
    Head head[CLASSES];
    Table table[CLASSES];
    unsigned used;
    uint8_t class[CLASSES];
    size_t steps; /* of all classes */
    ClassTable classes;
} Reading;

static void reading_free(Reading *g) {
    scratch_free(g->lines.distance);
    for (unsigned i = 0; i < g->used; i++) {
        scratch_free(g->head[i].gaps.distance);
        scratch_free(g->head[i].step);
    }
}

static const char *read_heads(Reading *g, BitReader *r, size_t count, size_t lines, Classing *k) {
    const char *why = read_classes(r, k, &g->classes, g->class, &g->used);
    if (why) return why;
    if (g->by_lines && !lines) return "it lists lines where there are none";
    if (g->by_lines && (why = read_marks(r, lines, 0, &g->lines))) return why;
    unsigned expected = FIRST_J;
    size_t symbols = 0, steps = 0; /* of all classes: no weight belongs to two of them */
    for (unsigned i = 0; i < g->used; i++) {
        Head *h = &g->head[i];
        if ((why = read_marks(r, count - symbols, expected, &h->gaps))) return why;
        if (h->gaps.complement) h->steps = read_golomb(r, 8) + 1;
        if (!h->gaps.complement && !h->gaps.symbols) return "it lists a class without a change";
        symbols += h->gaps.symbols;
        steps += h->steps;
        if (steps > count) return "it has more steps than weights";
        expected = next_j(h->gaps.j);
    }
    return read_step_tables(r, g->used, k, 0, g->table);
}

static const char *read_body(
    Reading *g, Decoder *d, BitReader *r, size_t count, size_t lines, const Classing *k, DecodeTable *slots,
    uint8_t *symbols) {
    const char *why = NULL;
    if (g->by_lines && (why = read_gaps(d, r, lines, slots, symbols, &g->lines))) return why;
    for (unsigned i = 0; i < g->used; i++) {
        Head *h = &g->head[i];
        if ((why = read_gaps(d, r, count, slots, symbols, &h->gaps))) return why;
        if (!h->gaps.complement) h->steps = h->gaps.marks;
    }
    for (unsigned i = 0; i < g->used; i++)
        if ((why = read_steps(d, r, &g->table[i], !k->exponent, slots, symbols, &g->head[i]))) return why;
    if (!decoder_ends_well(d)) return "its entropy-coded part does not end where it should";
    return bits_end_well(r, 0) ? NULL : "its bit stream is too long or too short";
}

/* Applies the changes that were read. `out` has room for all steps. */
static const char *land_marks(
    Reading *g, const Pieces *old, size_t count, size_t line, const Classing *k, Landed *out) {
    Cursor cursors[CLASSES];
    size_t lines = line ? count / line : 0;
    for (unsigned i = 0; i < g->used; i++) {
        Head *h = &g->head[i];
        const uint32_t *distance = h->gaps.distance;
        cursors[i] = (Cursor){g->class[i], h->gaps.complement, distance, *distance, h->step, h->step + h->steps};
    }
    uint32_t *listed = scratch_new((lines + 1) * sizeof *listed);
    if (!listed) return OUT_OF_MEMORY;
    Lines through = {NULL, count / out->where.segment, out->where.segment};
    if (g->by_lines) through = (Lines){listed, list_lines(&g->lines, lines, listed), line};
    const char *why = NULL;
    if (!HOT(land, old, &through, k, cursors, g->used, out)) why = WRONG_STEPS;
    scratch_free(listed);
    for (unsigned i = 0; i < g->used && !why; i++) {
        if (*cursors[i].distance != FAR) why = "it marks a weight past the end of its class";
        else if (cursors[i].step != cursors[i].step_end) why = WRONG_STEPS;
    }
    if (why) put_back(out, k->unit);
    return why;
}

/* Reads the parts of a block that do not need its base. */
static const char *read_ulp(
    const uint8_t *data, size_t size, size_t count, size_t line, Classing *k, Reading *g) {
    const char *why;
    Decoder d;
    const uint8_t *rest = decoder_start(&d, data, size, &why);
    if (!rest) return why;
    BitReader r = {rest, 0, (uint64_t)(data + size - rest) * 8, 0};
    size_t lines = line ? count / line : 0;
    g->by_lines = (data[0] & LINES) != 0;
    why = read_heads(g, &r, count, lines, k);
    if (why) return why;
    size_t most = g->lines.symbols;
    for (unsigned i = 0; i < g->used; i++) {
        size_t here = g->head[i].gaps.symbols > g->head[i].steps ? g->head[i].gaps.symbols : g->head[i].steps;
        most = here > most ? here : most;
    }
    DecodeTable *slots = scratch_new(sizeof *slots);
    uint8_t *symbols = scratch_new(most + 1);
    why = slots && symbols ? read_body(g, &d, &r, count, lines, k, slots, symbols) : OUT_OF_MEMORY;
    scratch_free(slots);
    scratch_free(symbols);
    for (unsigned i = 0; i < g->used; i++) g->steps += g->head[i].steps;
    return !why && g->steps > count ? "it has more steps than weights" : why;
}

#endif
