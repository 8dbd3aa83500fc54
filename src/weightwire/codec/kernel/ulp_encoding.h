/* The `ulp` encoding, as in ../ulp_encoding.py. */
#ifndef WW_ULP_ENCODING_H
#define WW_ULP_ENCODING_H

#include "block_frame.h"
#include "hot.h"
#include "step_tokens.h"

enum { FIRST_J = 20 };

#define WRONG_STEPS "the number of steps differs from the number of changes"

/* --- marks: ranks as gaps --- */

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

static unsigned next_j(unsigned j) { return j > 4 ? j - 4 : 0; }

/* --- ulp --- */

static int lines_pay(const Scan *s, const size_t *marked, size_t lines) {
    int64_t saved = 0;
    for (unsigned c = 0; c < CLASSES; c++)
        saved += (int64_t)entropy_of_two(marked[c], s->members[c] - marked[c]) -
                 (int64_t)entropy_of_two(marked[c], s->inside[c] - marked[c]);
    return saved > (int64_t)entropy_of_two(s->lines, lines - s->lines) + (INT64_C(64) << 24);
}

enum { TOKENS = 111 };

/* The table of one class, or of several neighbours that share it. */
typedef struct {
    uint32_t counts[TOKENS]; /* of magnitude tokens */
    uint64_t positive, total;
    Levels levels;
    unsigned plus;
    uint64_t cost; /* of the steps and the table, in units of 2^-24 bits */
} StepTable;

typedef struct {
    uint64_t *step;
    uint8_t *symbol;
    size_t count;
    int same; /* it has the table of the class before */
    StepTable table;
} Steps;

static void step_table_finish(StepTable *t) {
    quantise(t->counts, TOKENS, &t->levels);
    t->plus = bias(t->positive, t->total);
    unsigned bits = levels_bits(&t->levels) + bias_bits(t->plus);
    t->cost = entropy_of(t->counts, TOKENS) + entropy_of_two(t->positive, t->total - t->positive) + ((uint64_t)bits << 24);
}

static void steps_code(Steps *s) {
    StepTable *t = &s->table;
    memset(t, 0, sizeof *t);
    for (size_t i = 0; i < s->count; i++) {
        unsigned raw, token = token_of(magnitude_of(s->step[i]), &raw), negative = (unsigned)(s->step[i] >> 63);
        t->counts[token]++;
        t->positive += !negative;
        s->symbol[i] = (uint8_t)(2 * token + negative);
    }
    t->total = s->count;
    step_table_finish(t);
}

/* A class shares the table of the one before if that is shorter. */
static void share_tables(Steps *steps) {
    unsigned member[CLASSES], members = 0;
    for (unsigned c = 0; c < CLASSES; c++) {
        if (!steps[c].count) continue;
        if (members) {
            const StepTable *before = &steps[member[members - 1]].table, *own = &steps[c].table;
            StepTable both = *own;
            for (unsigned t = 0; t < TOKENS; t++) both.counts[t] += before->counts[t];
            both.positive += before->positive;
            both.total += before->total;
            step_table_finish(&both);
            steps[c].same = both.cost <= before->cost + own->cost;
            if (!steps[c].same) members = 0;
            member[members++] = c;
            for (unsigned i = 0; steps[c].same && i < members; i++) steps[member[i]].table = both;
        } else {
            member[members++] = c;
        }
    }
}

/* The changes of a block before they are written. */
typedef struct {
    int by_lines;
    Marks lines, marks[CLASSES];
    Steps steps[CLASSES];
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
static int plan_make(Plan *p, Scan *s, size_t lines) {
    size_t marked[CLASSES] = {0};
    uint32_t *rank[CLASSES] = {0};
    for (size_t i = 0; i < s->count; i++) marked[s->class[i]]++;
    p->by_lines = lines && lines_pay(s, marked, lines);
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
        steps_code(&p->steps[c]);
    }
    if (good) share_tables(p->steps);
    if (good && p->by_lines) {
        uint32_t *listed = s->line;
        s->line = NULL;
        good = marks_of(&p->lines, listed, s->lines, (uint32_t)lines);
    }
    return good;
}

static void plan_write_bits(const Plan *p, const Classing *k, BitWriter *w) {
    bits_number(w, k->bounds, 4);
    for (unsigned i = 0; i < k->bounds; i++) {
        if (i == 0)
            bits_number(w, k->bound[0], k->exponent);
        else
            bits_golomb(w, k->bound[i - 1] - k->bound[i] - 1u, 0);
    }
    for (unsigned c = 0; c <= k->bounds; c++) bits_number(w, p->steps[c].count > 0, 1);
    bits_number(w, p->steps[ZERO_CLASS].count > 0, 1);
    if (p->by_lines) write_marks(w, &p->lines, 0);
    unsigned expected = FIRST_J;
    for (unsigned c = 0; c < CLASSES; c++) {
        const Marks *m = &p->marks[c];
        if (!p->steps[c].count) continue;
        write_marks(w, m, expected);
        if (m->complement) bits_golomb(w, p->steps[c].count - 1, 8);
        expected = next_j(m->symbols ? m->j : expected);
    }
    int first = 1;
    for (unsigned c = 0; c < CLASSES; c++) {
        if (!p->steps[c].count) continue;
        if (!first) bits_number(w, (uint64_t)p->steps[c].same, 1);
        first = 0;
        if (p->steps[c].same) continue;
        write_levels(w, &p->steps[c].table.levels);
        write_bias(w, p->steps[c].table.plus);
    }
    if (p->by_lines) write_marks_raw(w, &p->lines);
    for (unsigned c = 0; c < CLASSES; c++) write_marks_raw(w, &p->marks[c]);
    for (unsigned c = 0; c < CLASSES; c++) {
        for (size_t i = 0; i < p->steps[c].count; i++) {
            if (p->steps[c].symbol[i] < 30) continue;
            unsigned raw;
            uint64_t magnitude = magnitude_of(p->steps[c].step[i]);
            token_of(magnitude, &raw);
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
        step_table(&p->steps[c].table.levels, p->steps[c].table.plus, &t);
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
    int good = plan_make(&p, s, lines) && plan_write_symbols(&p, out);
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
    int complement;
    unsigned j;
    size_t symbols;
    uint32_t *distance; /* as a Cursor reads them */
    size_t marks;
    uint64_t *step;
    size_t steps;
    Table table;
} Head;

static const char *read_marks(BitReader *r, size_t length, unsigned expected, Head *h) {
    h->complement = (int)read_number(r, 1);
    h->symbols = read_golomb(r, 8);
    if (h->symbols > length) return "it has more marks than weights";
    int64_t j = expected;
    if (h->symbols) j += unzigzag(read_golomb(r, 1));
    if (j < 0 || j > 127) return "a gap parameter is out of range";
    h->j = (unsigned)j;
    return NULL;
}

/* Gap symbols and raw bits -> distances. */
static const char *read_gaps(Decoder *d, BitReader *r, size_t length, DecodeTable *slots, uint8_t *symbols, Head *h) {
    Table t;
    unsigned raw = gap_raw(h->j), go_on = GO_ON_SYMBOL[gap_which(h->j)];
    h->distance = scratch_new((h->symbols + 1) * sizeof *h->distance);
    if (!h->distance) return OUT_OF_MEMORY;
    gap_table(gap_which(h->j), &t);
    decode_table(&t, slots);
    if (!decode_section(d, slots, symbols, h->symbols)) return "its entropy-coded part is too short";
    if (h->symbols && symbols[h->symbols - 1] == go_on) return "a gap does not end";
    uint64_t quotient = 0, after = 0;
    for (size_t i = 0; i < h->symbols; i++) {
        quotient += symbols[i];
        if (symbols[i] == go_on) continue;
        uint64_t gap = (quotient << raw) + (raw ? read_number(r, raw) : 0);
        after += gap + 1;
        if (after > length) return "it marks a weight past its end";
        h->distance[h->marks] = (uint32_t)gap + (h->marks > 0);
        h->marks++;
        quotient = 0;
    }
    h->distance[h->marks] = FAR;
    return r->failed ? "its bit stream is too short" : NULL;
}

static const char *read_steps(Decoder *d, BitReader *r, DecodeTable *slots, uint8_t *symbols, Head *h) {
    h->step = scratch_new((h->steps + 1) * sizeof *h->step);
    if (!h->step) return OUT_OF_MEMORY;
    decode_table(&h->table, slots);
    if (!decode_section(d, slots, symbols, h->steps)) return "its entropy-coded part is too short";
    for (size_t i = 0; i < h->steps; i++) {
        unsigned raw;
        uint64_t magnitude = least_of(symbols[i] >> 1, &raw);
        if (raw) magnitude += read_number(r, raw);
        h->step[i] = symbols[i] & 1 ? 0 - magnitude : magnitude;
    }
    return r->failed ? "its bit stream is too short" : NULL;
}

typedef struct {
    int by_lines;
    Head lines, head[CLASSES];
    unsigned used;
    uint8_t class[CLASSES];
    size_t steps; /* of all classes */
    ClassTable classes;
} Reading;

static void reading_free(Reading *g) {
    scratch_free(g->lines.distance);
    for (unsigned i = 0; i < g->used; i++) {
        scratch_free(g->head[i].distance);
        scratch_free(g->head[i].step);
    }
}

static const char *read_bounds(BitReader *r, Classing *k) {
    k->bounds = (unsigned)read_number(r, 4);
    if (k->bounds > (k->exponent ? MOST_BOUNDS : 0)) return "it has too many classes";
    int64_t bound = 0;
    for (unsigned i = 0; i < k->bounds; i++) {
        bound = i ? bound - (int64_t)read_golomb(r, 0) - 1 : (int64_t)read_number(r, k->exponent);
        if (bound < 1) return "a class is out of range";
        k->bound[i] = (uint16_t)bound;
    }
    return NULL;
}

static const char *read_heads(Reading *g, BitReader *r, size_t count, size_t lines, Classing *k) {
    const char *why = read_bounds(r, k);
    if (why) return why;
    use_bounds(k, &g->classes);
    uint64_t present = read_number(r, k->bounds + 1);
    present |= read_number(r, 1) << ZERO_CLASS;
    if (r->failed) return "its bit stream is too short";
    if (!present) return "it changes nothing";
    if (g->by_lines && !lines) return "it lists lines where there are none";
    if (g->by_lines && (why = read_marks(r, lines, 0, &g->lines))) return why;
    unsigned expected = FIRST_J;
    size_t symbols = 0, steps = 0; /* of all classes: no weight belongs to two of them */
    for (unsigned c = 0; c < CLASSES; c++) {
        if (!(present >> c & 1)) continue;
        Head *h = &g->head[g->used];
        g->class[g->used++] = (uint8_t)c;
        if ((why = read_marks(r, count - symbols, expected, h))) return why;
        if (h->complement) h->steps = read_golomb(r, 8) + 1;
        if (!h->complement && !h->symbols) return "it lists a class without a change";
        symbols += h->symbols;
        steps += h->steps;
        if (steps > count) return "it has more steps than weights";
        expected = next_j(h->j);
    }
    for (unsigned i = 0; i < g->used; i++) {
        Levels levels;
        if (i && read_number(r, 1)) {
            g->head[i].table = g->head[i - 1].table;
            continue;
        }
        if ((why = read_levels(r, tokens_of_width(k->unit), &levels))) return why;
        int plus = read_bias(r);
        if (plus < 0) return "a sign table is out of range";
        step_table(&levels, (unsigned)plus, &g->head[i].table);
    }
    return r->failed ? "its bit stream is too short" : NULL;
}

static const char *read_body(
    Reading *g, Decoder *d, BitReader *r, size_t count, size_t lines, DecodeTable *slots, uint8_t *symbols) {
    const char *why = NULL;
    if (g->by_lines && (why = read_gaps(d, r, lines, slots, symbols, &g->lines))) return why;
    for (unsigned i = 0; i < g->used; i++) {
        Head *h = &g->head[i];
        if ((why = read_gaps(d, r, count, slots, symbols, h))) return why;
        if (!h->complement) h->steps = h->marks;
    }
    for (unsigned i = 0; i < g->used; i++)
        if ((why = read_steps(d, r, slots, symbols, &g->head[i]))) return why;
    if (!decoder_ends_well(d)) return "its entropy-coded part does not end where it should";
    return bits_end_well(r, 0) ? NULL : "its bit stream is too long or too short";
}

/* The lines to process. `room` holds their list. */
static void lines_to_scan(
    const Reading *g, size_t count, size_t lines, size_t segment, uint32_t *room, Lines *out) {
    *out = (Lines){NULL, count / segment, segment};
    if (!g->by_lines) return;
    *out = (Lines){room, 0, count / lines};
    const uint32_t *distance = g->lines.distance;
    uint64_t next = *distance;
    for (uint32_t l = 0; l < lines; l++) {
        int marked = l == next;
        if (marked) next += *++distance;
        if (marked != g->lines.complement) room[out->count++] = l;
    }
}

/* Applies the changes that were read. `out` has room for all steps. */
static const char *land_marks(
    Reading *g, const Pieces *old, size_t count, size_t line, const Classing *k, Landed *out) {
    Cursor cursors[CLASSES];
    size_t lines = line ? count / line : 0;
    for (unsigned i = 0; i < g->used; i++) {
        Head *h = &g->head[i];
        cursors[i] = (Cursor){g->class[i], h->complement, h->distance, *h->distance, h->step, h->step + h->steps};
    }
    uint32_t *listed = scratch_new((lines + 1) * sizeof *listed);
    if (!listed) return OUT_OF_MEMORY;
    Lines through;
    lines_to_scan(g, count, lines, out->where.segment, listed, &through);
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
        size_t here = g->head[i].symbols > g->head[i].steps ? g->head[i].symbols : g->head[i].steps;
        most = here > most ? here : most;
    }
    DecodeTable *slots = scratch_new(sizeof *slots);
    uint8_t *symbols = scratch_new(most + 1);
    why = slots && symbols ? read_body(g, &d, &r, count, lines, slots, symbols) : OUT_OF_MEMORY;
    scratch_free(slots);
    scratch_free(symbols);
    for (unsigned i = 0; i < g->used; i++) g->steps += g->head[i].steps;
    return !why && g->steps > count ? "it has more steps than weights" : why;
}

#endif
